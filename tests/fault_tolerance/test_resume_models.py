"""All kinds of state that a model in training may have."""

from __future__ import annotations

import pytest

from tests.fault_tolerance.job import CALLBACKS, Job
from tests.fault_tolerance.trials import KILLED, Case, Trials, at, interrupted

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

KILL = at(9)


def resumed(name: str, model: str, **options) -> Case:
    options = {"epochs": 4, "callbacks": ("csv", "plateau"), "validation": "", "backup": {"save_freq": 4}, **options}
    return interrupted(name, Job(model=model, **options), KILL)


CASES = [
    resumed("dynamic loss scale", "float16"),
    resumed("accumulated gradients", "accumulation"),
    resumed("moving average of weights", "EMA"),
    resumed("two optimizers in a step of its own", "two optimizers", callbacks=("csv",), validation="arrays"),
    resumed("built by its step", "without call", callbacks=("csv",)),
    resumed("two devices, built by its step", "without call", strategy="mirrored", callbacks=("csv",)),
    resumed("built by its first batch", "built late", callbacks=("csv",)),
    resumed("compiled by XLA", "compiled by XLA"),
    resumed("two devices", "replicated", strategy="mirrored", callbacks=CALLBACKS, validation="arrays", epochs=7),
    resumed("compressed by PowerSGD", "matrices", strategy="mirrored", compression="PowerSGD"),
    resumed("compressed by TopK", "matrices", strategy="mirrored", compression="TopK"),
    resumed("two devices, a dataset", "replicated", strategy="mirrored", data="shuffle"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kill(case: Case, trials: Trials) -> None:
    outcome = trials.outcome(case)
    assert outcome.codes == [KILLED, 0]
    assert outcome.differences == []


def test_the_references_have_the_state_that_they_are_for(trials: Trials) -> None:
    by_name = {case.name: trials.outcome(case).reference.result for case in CASES}
    scale = [v for name, v in by_name["dynamic loss scale"].items() if "scale" in name and "optimizer" in name]
    assert any(float(value) > 2.0**15 for value in scale)
    assert any("accum" in name for name in by_name["accumulated gradients"])
    assert any("average" in name for name in by_name["moving average of weights"])
    for method, kinds in {"PowerSGD": ("rest", "factor"), "TopK": ("rest", "velocity")}.items():
        kept = {name: value for name, value in by_name[f"compressed by {method}"].items() if "compression/" in name}
        assert {name.split("/")[2] for name in kept} == set(kinds)
        assert all(value.any() for value in kept.values())
    assert any(name.startswith("fit 1: optimizer/1/") for name in by_name["two optimizers in a step of its own"])
