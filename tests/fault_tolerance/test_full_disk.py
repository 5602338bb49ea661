"""Backups that cannot be written: training goes on with a warning, and the last good backup stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import small_disks
from tests.fault_tolerance.job import Job
from tests.fault_tolerance.trials import KILLED, Case, Trials, at, differences
from tfdist.checkpoint.store import CheckpointStore

pytestmark = pytest.mark.slow

JOB = Job(backup={"save_freq": 4, "asynchronous": False}).light.with_(epochs=3)
KILL = at(8)
WARNING = "RuntimeWarning: A backup could not be written; training goes on, and the last good one is kept. The "


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.exhaustive
def test_files_that_are_too_large(trials: Trials, asynchronous: bool) -> None:
    job = JOB.with_(backup={**JOB.backup, "asynchronous": asynchronous})
    limited = job.with_(hook="small files only")
    outcome = trials.outcome(Case(f"limited {asynchronous}", (job.with_(kill=KILL), limited, job)))
    assert outcome.codes == [KILLED, 0, 0]
    log = outcome.runs[1].log
    assert WARNING in log and "File too large" in log
    assert differences(outcome.reference, outcome.runs[1]) == []
    # Nothing of the second run was kept, so that the third goes on where the second did.
    assert outcome.steps[2] == outcome.steps[1] > 0
    assert outcome.differences == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder with room for the first backups of a job, but not for all."""
    with small_disks.small_disk(tmp_path / "backup", "400k"):
        yield tmp_path


@pytest.mark.mount
@pytest.mark.exhaustive
def test_full_disk(trials: Trials, small_disk: Path) -> None:
    first = trials.jobs.run(JOB.with_(kill=KILL), small_disk)
    assert first.code == KILLED, first.log
    store = CheckpointStore(str(small_disk / "backup"), writer=False)
    good = store.newest()
    filler = small_disk / "backup" / "filler"
    small_disks.fill(filler)
    second = trials.jobs.run(JOB, small_disk)
    assert second.code == 0, second.log
    assert WARNING in second.log and "No space left on device" in second.log
    assert store.newest().meta == good.meta
    reference = trials.jobs.run(JOB.reference, small_disk / "reference")
    assert differences(reference, second) == []
    filler.unlink()
    third = trials.jobs.run(JOB, small_disk)
    assert third.code == 0, third.log
    assert third.result["steps of this process"] == second.result["steps of this process"] > 0
    assert differences(reference, third) == []
    assert store.newest().meta["done"]
