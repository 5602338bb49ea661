"""SIGTERM where nothing can be saved: the exit code and the last line say so, and the last good backup stays."""

from __future__ import annotations

import re
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fault_tolerance.job import Job
from tests.fault_tolerance.test_preemption import sigterm
from tests.fault_tolerance.trials import Case, Trials, at
from tfdist.checkpoint import backup_and_restore
from tfdist.supervision.exit_codes import UNSAVED
from tfdist.supervision.progress import SAVED

pytestmark = pytest.mark.slow

JOB = Job(backup={"save_freq": 4, "asynchronous": False}).light.with_(epochs=3)
UNWRITTEN = r"The checkpoint \S+ cannot be written: .*File too large.* A new start "


def limited(asynchronous: bool, **changes: Any) -> Job:
    return JOB.with_(backup={**JOB.backup, "asynchronous": asynchronous}, hook="small files only", **changes)


LIMITED = Case("limited", (JOB.with_(kill=at(8)), limited(True, kill=sigterm(3)), JOB))


@pytest.mark.nightly
def test_it_says_what_is_lost(trials: Trials) -> None:
    outcome = trials.outcome(LIMITED)
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


def test_it_says_that_there_is_no_backup(trials: Trials) -> None:
    outcome = trials.outcome(Case("nothing at all", (limited(False, kill=sigterm(3)),)))
    assert outcome.codes == [UNSAVED]
    assert re.search(
        rf"SIGTERM: stopped after step \d+ of epoch 1, which is not saved\. {UNWRITTEN}trains from the beginning; "
        rf"exit code {UNSAVED}",
        outcome.log,
    ), outcome.log


def test_data_without_a_position_cannot_be_saved_within_an_epoch(trials: Trials) -> None:
    job = Job(backup={}, data="from_generator").light
    outcome = trials.outcome(Case("from a generator", (job.with_(kill=sigterm(9)), job)))
    assert outcome.codes == [UNSAVED, 0]
    assert re.search(
        r"SIGTERM: stopped after step \d+ of epoch 2, which is not saved\. The data have no position within an epoch: "
        r"it runs Python code .* A new start goes on from the last backup, checkpoint-0000000\d, of epoch 1; exit "
        r"code 74",
        outcome.runs[0].log,
    ), outcome.runs[0].log
    assert outcome.differences == []


def test_who_has_saved_says_so_before_it_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the grace period may end meanwhile; the launcher then knows that all is saved."""

    class WaitsError(Exception):
        pass

    def wait(*arguments: Any) -> None:
        raise WaitsError

    said: list[str] = []
    reporter = SimpleNamespace(report=lambda phase, step: said.append(phase))
    monkeypatch.setattr(backup_and_restore.ProgressWriter, "from_environment", lambda: reporter)
    backup = object.__new__(backup_and_restore.FitBackup)
    backup._place, backup._peers = backup_and_restore._Place(), SimpleNamespace(gather=wait)
    for writes, failure, expected in ((False, None, []), (True, "a full disk", []), (True, None, [SAVED])):
        backup._is_chief = writes
        with pytest.raises(WaitsError):
            backup._leave("after step 1", "is saved", failure)
        assert said == expected
