"""Does the comparison notice what is not restored? One piece of state is left out, and the results must differ."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fault_tolerance.job import Job
from tests.fault_tolerance.trials import KILLED, Case, Trials, about, at
from tests.tiers import daily

pytestmark = pytest.mark.slow

# In the fourth epoch; the best one was the third.
KILL = at(18)
AT_A_BOUNDARY = {"when": "writing", "stage": "tensors", "number": 3}
BY_STEPS = {"save_freq": 4, "asynchronous": False}
COMPRESSED = {"model": "matrices", "strategy": "mirrored", "compression": "PowerSGD"}


def without(name: str, *expected: str, kill: dict[str, Any] = KILL, **options: Any) -> Any:
    job = Job(backup=BY_STEPS).light.with_(**{"callbacks": ("csv", "plateau"), **options})
    return pytest.param(Case(f"without {name}", (job.with_(kill=kill), job.with_(leave_out=name))), expected, id=name)


@pytest.mark.parametrize(
    ("case", "expected"),
    daily(
        [
            without("optimizer", "weights", "optimizer"),
            without("metrics", "history"),
            without("rests", "weights", "compression", **COMPRESSED),
            without("Keeper", "keeper", callbacks=("keeper", "csv")),
            without("random numbers", "observer", "weights", data="PyDataset", epochs=5),
            without("batches", "observer", "weights", data="shuffle"),
            without("CSV", "csv", kill=AT_A_BOUNDARY, backup={"asynchronous": False}),
            without("validations", "history", data="shuffle", validation="shuffle"),
        ],
        "batches",
    ),
)
def test_left_out_state_is_noticed(case: Case, expected: tuple[str, ...], trials: Trials) -> None:
    outcome = trials.outcome(case)
    assert outcome.codes == [KILLED, 0]
    assert set(expected) <= about(outcome.differences)


@pytest.mark.parametrize(("case", "expected"), [without("nothing")])
def test_nothing_left_out(case: Case, expected: tuple[str, ...], trials: Trials) -> None:
    outcome = trials.outcome(case)
    assert outcome.codes == [KILLED, 0]
    assert outcome.differences == []
