"""Kills at chosen and random moments: what is started again ends as what was not interrupted, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fault_tolerance.job import CALLBACKS, Job
from tests.fault_tolerance.test_store_damage import FILES, flip_first_bit
from tests.fault_tolerance.trials import KILLED, Case, Trials, at, interrupted
from tests.tiers import daily

pytestmark = pytest.mark.slow

# 15 batches an epoch, 5 executions of 3 steps.
EVERY_STEP = Job(backup={"save_freq": 1, "asynchronous": False})
LIGHT = Job(backup={"save_freq": 4}).light
EPOCHS = LIGHT.with_(backup={})


def of_model(name: str, model: str, **options: Any) -> Case:
    options = {"epochs": 4, "callbacks": ("csv", "plateau"), "validation": "", "backup": {"save_freq": 4}, **options}
    return interrupted(name, Job(model=model, **options), at(9))


CASES = [
    interrupted("in the middle of an epoch, saved at every step", EVERY_STEP, at(9)),
    interrupted("at a boundary, after the save", Job(backup={"asynchronous": False}), at(2, "after the save")),
    interrupted("after the last epoch", Job(backup={"asynchronous": False}), at(1, "on_train_end")),
    interrupted("while writing a manifest", EPOCHS, {"when": "writing", "stage": "manifest", "number": 2}),
    interrupted("saved by time", LIGHT.with_(backup={"save_freq": "0.01s"}), at(13)),
    interrupted("again and again", EVERY_STEP.light, *[at(2)] * 4),
    interrupted("executions that do not divide an epoch", LIGHT.with_(steps_per_execution=4), at(6)),
    interrupted("in several fits", LIGHT.with_(epochs=2, fits=3), {**at(7), "fit": 2}, {**at(4), "fit": 3}),
    interrupted(
        "columns of a CSVLogger",
        LIGHT.with_(callbacks=("plateau", "csv"), validation="arrays", fit={"validation_freq": 2}),
        at(7),
    ),
    interrupted("initial_epoch", LIGHT.with_(epochs=6, fit={"initial_epoch": 2}), at(8), at(3)),
    Case("more epochs after a kill", (LIGHT.with_(epochs=3, kill=at(12)), LIGHT.with_(epochs=5))),
    of_model("weights on the host", "deep", strategy="host offload", callbacks=("csv",)),
    of_model("dynamic loss scale", "float16"),
    of_model("accumulated gradients", "accumulation"),
    of_model("two optimizers in a step of its own", "two optimizers", callbacks=("csv",)),
    of_model("unlisted variables of two devices", "damped", strategy="mirrored", callbacks=("csv",)),
    of_model("two devices", "replicated", strategy="mirrored", callbacks=CALLBACKS, validation="arrays", epochs=7),
    of_model("compressed by PowerSGD", "matrices", strategy="mirrored", compression="PowerSGD"),
    of_model("compressed by TopK", "matrices", strategy="mirrored", compression="TopK"),
]
# How many executions are saved when the process dies, where that is certain.
DONE = {"in the middle of an epoch, saved at every step": 8, "at a boundary, after the save": 10}


# One for each strategy of one process. test_store_kills.py kills while a backup is written.
DAILY = ("in the middle of an epoch, saved at every step", "two devices", "weights on the host")


@pytest.mark.parametrize("case", daily(CASES, *DAILY), ids=str)
def test_kill(case: Case, trials: Trials) -> None:
    outcome = trials.outcome(case)
    expected = [KILLED if job.kill else 0 for job in case.jobs]
    assert outcome.codes == expected
    assert outcome.differences == []
    total = outcome.reference.result["steps of this process"]
    if case.name in DONE:
        assert outcome.steps[-1] == total - DONE[case.name], "only what was not saved is done again"


def damage_the_newest(folder: Path) -> None:
    flip_first_bit(max((folder / "backup").glob("checkpoint-*")) / FILES[0])


# test_store_damage.py has the other damages and files.
@pytest.mark.nightly
def test_newest_is_damaged(trials: Trials) -> None:
    """The good one before is used, and nothing else is lost."""
    job = EVERY_STEP.light.with_(epochs=3)
    outcome = trials.outcome(interrupted("the newest is damaged", job, at(9), between=damage_the_newest))
    assert outcome.codes == [KILLED, 0]
    # Saved after each of 8 executions; the fifth one is the end of the first epoch.
    assert outcome.log.count("UserWarning: The checkpoint ") == 1
    assert "backup/checkpoint-00000008 is damaged: " in outcome.log
    assert "checkpoint-00000007 is used instead" in outcome.log
    assert outcome.steps[1] == 15 - 7
    assert outcome.differences == []


def test_a_finished_fit_returns_at_once_with_all_of_its_history(trials: Trials) -> None:
    several = LIGHT.with_(fits=2, epochs=2)
    outcome = trials.outcome(Case("several fits", (several, several)))
    assert (outcome.codes, outcome.steps[1]) == ([0, 0], 0)
    assert outcome.differences == []
    assert outcome.log.count("The fit is finished: ") == 2


def test_the_reference_is_worth_comparing(trials: Trials) -> None:
    """Its callbacks act: the rate changes, training stops early, the best weights are not the last."""
    result = trials.outcome(CASES[1]).reference.result
    rates, losses = result["fit 1: history/learning_rate"], result["fit 1: history/val_loss"]
    assert len(set(rates)) >= 2
    assert result["fit 1: early/stopped_epoch"] == len(losses) - 1 < Job().epochs - 1
    assert result["fit 1: early/best_epoch"] < len(losses) - 1
    assert result["fit 1: csv"].count(b"\n") == len(losses) + 1
    assert result["fit 1: observer/batches"] == 5 * len(losses)
    rows = result["fit 1: observer/rows"]
    epochs = [rows[i : i + 58] for i in range(0, len(rows), 58)]
    assert len(epochs) == len(losses)
    assert all(sorted(epoch) == list(range(58)) for epoch in epochs)


@pytest.mark.nightly
def test_the_references_have_the_state_that_they_are_for(trials: Trials) -> None:
    by_name = {case.name: trials.outcome(case).reference.result for case in CASES[-6:]}
    scale = [v for name, v in by_name["dynamic loss scale"].items() if "scale" in name and "optimizer" in name]
    assert any(float(value) > 2.0**15 for value in scale)
    assert any("accum" in name for name in by_name["accumulated gradients"])
    for method, kinds in {"PowerSGD": ("rest", "factor"), "TopK": ("rest", "velocity")}.items():
        kept = {name: value for name, value in by_name[f"compressed by {method}"].items() if "compression/" in name}
        assert {name.split("/")[2] for name in kept} == set(kinds)
        assert all(value.any() for value in kept.values())
    assert any(name.startswith("fit 1: optimizer/1/") for name in by_name["two optimizers in a step of its own"])
