"""SIGTERM where nothing can be saved: the exit code and the last line say so, and the last good backup stays."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import small_disks
from tests.fault_tolerance.forked_jobs import ForkedJobs
from tests.fault_tolerance.job import Job
from tests.fault_tolerance.test_preemption import sigterm
from tests.fault_tolerance.trials import Case, Trials, at, differences
from tfdist.supervision.exit_codes import PREEMPTED, UNSAVED

pytestmark = pytest.mark.slow

JOB = Job(backup={"save_freq": 4, "asynchronous": False}).light.with_(epochs=3)
UNWRITTEN = r"The checkpoint \S+ cannot be written: .*File too large.* A new start "


def limited(asynchronous: bool, **changes: Any) -> Job:
    return JOB.with_(backup={**JOB.backup, "asynchronous": asynchronous}, hook="small files only", **changes)


CASES = {
    asynchronous: Case(
        f"limited, asynchronous={asynchronous}", (JOB.with_(kill=at(8)), limited(asynchronous, kill=sigterm(3)), JOB)
    )
    for asynchronous in (False, True)
}


@pytest.mark.parametrize(
    "case",
    [CASES[True], pytest.param(CASES[False], marks=pytest.mark.exhaustive)],
    ids=str,
)
def test_it_says_what_is_lost(case: Case, trials: Trials) -> None:
    outcome = trials.outcome(case)
    assert outcome.codes == [-signal.SIGKILL, UNSAVED, 0]
    said = re.search(r"SIGTERM: stopped after .*", outcome.runs[1].log)[0]
    assert re.fullmatch(
        rf"SIGTERM: stopped after step \d+ of epoch \d, which is not saved\. {UNWRITTEN}goes on from the last backup, "
        rf"checkpoint-0000000\d, of (step \d+ of )?epoch \d; exit code {UNSAVED}",
        said,
    ), said
    assert "is saved" not in outcome.runs[1].log
    # The steps of the second run are done again, and the end is the same.
    assert outcome.steps[2] > outcome.steps[1] > 0
    assert outcome.differences == []


NOTHING = Case("nothing at all", (limited(False, kill=sigterm(3)),))
# One backup an epoch: the limit is for the log, too, and a warning of each is there.
LAST = Case(
    "at the end of the fit",
    (limited(False, epochs=1, kill=sigterm(1, "on_epoch_end")).with_(backup={"asynchronous": False}),),
)


@pytest.mark.parametrize("case", [NOTHING, pytest.param(LAST, marks=pytest.mark.exhaustive)], ids=str)
def test_it_says_that_there_is_no_backup(case: Case, trials: Trials) -> None:
    outcome = trials.outcome(case)
    assert outcome.codes == [UNSAVED]
    where = "at the end of the fit" if case is LAST else r"after step \d+ of epoch 1"
    assert re.search(
        rf"SIGTERM: stopped {where}, which is not saved\. {UNWRITTEN}trains from the beginning, since there is no "
        rf"backup; exit code {UNSAVED}",
        outcome.log,
    ), outcome.log


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["event"] == kind]


@pytest.mark.cluster
@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.exhaustive)])
def test_all_workers_end_with_the_same_code(jobs: ForkedJobs, tmp_path: Path, rank: int) -> None:
    job = limited(True, strategy="workers", model="light, replicated")
    ended = jobs.run_workers([job.with_(kill=sigterm(4) if r == rank else None) for r in range(2)], tmp_path)
    log = "\n".join(run.log for run in ended)
    assert [run.code for run in ended] == [UNSAVED, UNSAVED], log
    assert re.search(rf"SIGTERM: stopped after .*, which is not saved\. {UNWRITTEN}trains from the beginning", log), log
    assert len(events(tmp_path, "unsaved")) == 2 and events(tmp_path, "preempted") == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder with room for the first backups of a job, but not for all."""
    with small_disks.small_disk(tmp_path / "backup", "400k"):
        yield tmp_path


@pytest.mark.mount
@pytest.mark.exhaustive
def test_a_full_disk(trials: Trials, small_disk: Path) -> None:
    first = trials.jobs.run(JOB.with_(kill=at(8)), small_disk)
    assert first.code == -signal.SIGKILL, first.log
    filler = small_disk / "backup" / "filler"
    small_disks.fill(filler)
    second = trials.jobs.run(JOB.with_(kill=sigterm(3)), small_disk)
    assert second.code == UNSAVED, second.log
    assert re.search(r"which is not saved\. .*No space left on device.* goes on from the last backup", second.log)
    filler.unlink()
    third = trials.jobs.run(JOB.with_(kill=sigterm(3)), small_disk)
    assert third.code == PREEMPTED, third.log
    fourth = trials.jobs.run(JOB, small_disk)
    assert fourth.code == 0, fourth.log
    assert differences(trials.jobs.run(JOB.reference, small_disk / "reference"), fourth) == []
