"""The file of a CSVLogger: one row for each epoch, of all fits that write to it, however often they are started."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fault_tolerance.job import Job
from tests.fault_tolerance.trials import KILLED, Case, Trials, at, interrupted
from tests.tiers import daily

pytestmark = pytest.mark.slow

BY_STEPS = {"save_freq": 4, "asynchronous": False}
RARELY = {"save_freq": 1000}


def fits(name: str, *kills: dict[str, Any], starts: int = 1, **changes: Any) -> Case:
    job = Job().light.with_(**{"callbacks": ("one csv",), "fits": 3, "epochs": 2, "backup": BY_STEPS, **changes})
    case = interrupted(name, job, *kills)
    return Case(case.name, case.jobs + (job,) * (starts - 1))


def in_fit(fit: int, number: int, when: str = "on_train_batch_begin") -> dict[str, Any]:
    return {**at(number, when), "fit": fit}


CASES = [
    fits("all are finished", starts=3),
    fits("killed in the second fit", in_fit(2, 7), starts=2),
    fits("killed before its first backup", in_fit(2, 2, "on_epoch_begin"), backup=RARELY, starts=2),
    fits("killed in each", in_fit(1, 7), in_fit(2, 7), in_fit(3, 7)),
    fits("a file for each fit", in_fit(2, 7), callbacks=("csv",), starts=2),
]


@pytest.mark.parametrize("case", daily(CASES, "killed in the second fit"), ids=str)
def test_rows(case: Case, trials: Trials) -> None:
    outcome = trials.outcome(case)
    assert outcome.codes == [KILLED if job.kill else 0 for job in case.jobs]
    last = outcome.runs[-1].result["fit 3: csv"]
    assert last == outcome.reference.result["fit 3: csv"]
    epochs = [row.split(b",")[0] for row in last.splitlines()]
    assert epochs == [b"epoch", *[b"0", b"1"] * (1 if case.jobs[0].callbacks == ("csv",) else 3)]
