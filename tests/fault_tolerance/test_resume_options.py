"""Kills under all options of the callback and of `fit`, and several fits in a script."""

from __future__ import annotations

import pytest

from tests.fault_tolerance.job import Job
from tests.fault_tolerance.trials import KILLED, Case, Trials, at, interrupted
from tests.tiers import daily

pytestmark = pytest.mark.slow

LIGHT = Job(backup={"save_freq": 4}).light
SCHEDULED = LIGHT.with_(callbacks=("schedule", "csv"))
CASES = [
    interrupted("saved once a second", LIGHT.with_(backup={"save_freq": "1s"}), at(13)),
    interrupted("saved more rarely than a run ends", LIGHT.with_(backup={"save_freq": 1000}), at(13)),
    interrupted("keeping one", LIGHT.with_(backup={"save_freq": 1, "max_to_keep": 1}), at(8), at(5)),
    interrupted("one step an execution", LIGHT.with_(steps_per_execution=1), at(23), at(12)),
    interrupted("executions that do not divide an epoch", LIGHT.with_(steps_per_execution=4), at(6)),
    interrupted("in every epoch", LIGHT.with_(backup={}), at(7), at(7), at(7)),
    interrupted("in several fits", LIGHT.with_(epochs=2, fits=3), {**at(7), "fit": 2}, {**at(4), "fit": 3}),
    interrupted("initial_epoch", LIGHT.with_(epochs=6, fit={"initial_epoch": 2}), at(8), at(3)),
    interrupted("with LearningRateScheduler", SCHEDULED, at(8), at(3)),
    interrupted(
        "with LearningRateScheduler, at a boundary", SCHEDULED.with_(backup={}), at(2, "after the save"), at(8)
    ),
    interrupted("with a progress bar", LIGHT.with_(fit={"verbose": 1}), at(8)),
    interrupted("with a ProgbarLogger", LIGHT.with_(callbacks=("progress bar", "csv")), at(8)),
    interrupted("with no other callback", LIGHT.with_(callbacks=()), at(8)),
    Case("with more epochs afterwards", (LIGHT.with_(epochs=3), LIGHT.with_(epochs=5))),
    Case("with more epochs after a kill", (LIGHT.with_(epochs=3, kill=at(12)), LIGHT.with_(epochs=5))),
]


@pytest.mark.parametrize("case", daily(CASES, "with more epochs after a kill"), ids=str)
def test_kill(case: Case, trials: Trials) -> None:
    outcome = trials.outcome(case)
    assert outcome.codes == [KILLED if job.kill else 0 for job in case.jobs]
    assert outcome.differences == []
