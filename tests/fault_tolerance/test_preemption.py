"""SIGTERM: one more step, one save, exit code 77; and nothing is done twice after it."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.fault_tolerance.job import Job
from tests.fault_tolerance.trials import Case, Trials, interrupted
from tests.tiers import daily
from tfdist.supervision.exit_codes import PREEMPTED

pytestmark = pytest.mark.slow


def sigterm(number: int, when: str = "on_train_batch_begin", which: int = signal.SIGTERM) -> dict[str, Any]:
    return {"when": when, "number": number, "signal_number": int(which)}


LIGHT = Job(backup={}).light


def two_backups(folder: Path) -> None:
    """The first epoch's, and the one of the signal."""
    assert len(list((folder / "backup").iterdir())) == 2


WITHIN = interrupted("within an epoch", LIGHT, sigterm(9), between=two_backups)
CASES = [
    (WITHIN, "SIGTERM: stopped after step 12 of epoch 2, which is saved; exit code 77"),
    (
        interrupted("in validation", LIGHT.with_(validation="arrays"), sigterm(4, "on_test_batch_begin")),
        "SIGTERM: stopped after epoch 2, which is saved; exit code 77",
    ),
    (
        interrupted("between epochs", LIGHT, sigterm(2, "on_epoch_end")),
        "SIGTERM: stopped after epoch 2, which is saved; exit code 77",
    ),
    (
        interrupted("at the end", LIGHT, sigterm(1, "on_train_end")),
        "SIGTERM: stopped at the end of the fit, which is complete; exit code 77",
    ),
    (
        interrupted(
            "another signal", LIGHT.with_(backup={"preemption_signal": int(signal.SIGUSR1)}), sigterm(9, which=10)
        ),
        "SIGUSR1: stopped after step 12 of epoch 2, which is saved; exit code 77",
    ),
]


@pytest.mark.parametrize(
    ("case", "said"),
    daily(CASES, "within an epoch"),
    ids=lambda value: str(value) if isinstance(value, Case) else "",
)
def test_no_step_is_lost(case: Case, said: str, trials: Trials) -> None:
    outcome = trials.outcome(case)
    assert outcome.codes == [PREEMPTED] * (len(case.jobs) - 1) + [0]
    assert said in outcome.runs[-2].log
    assert outcome.differences == []
    assert sum(outcome.steps) == outcome.reference.result["steps of this process"]


@pytest.mark.nightly
def test_after_a_fit_that_failed_the_signal_ends_the_process(trials: Trials) -> None:
    kill = {"when": "on_train_batch_begin", "number": 9, "signal_number": None}
    job = LIGHT.with_(hook="SIGTERM after a fit that failed")
    outcome = trials.outcome(Case("failed fit", (job.with_(kill=kill), job)))
    assert "fit has raised: the end of this fit" in outcome.runs[0].log
    assert outcome.codes == [-signal.SIGTERM, 0]
    assert outcome.differences == []


def test_a_fit_that_failed_is_gone_on_with_in_the_same_process(trials: Trials) -> None:
    kill = {"when": "on_train_batch_begin", "number": 9, "signal_number": None}
    job = LIGHT.with_(backup={"save_freq": 4}, hook="another fit after one that failed", kill=kill)
    outcome = trials.outcome(Case("another fit", (job,)))
    assert outcome.codes == [0]
    assert "fit has raised: the end of this fit" in outcome.log
    assert outcome.differences == []
