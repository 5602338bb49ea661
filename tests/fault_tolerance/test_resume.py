"""Kills at chosen and random moments: what is started again ends as what was not interrupted, bit by bit."""

from __future__ import annotations

import random

import pytest

from tests.fault_tolerance.job import Job
from tests.fault_tolerance.trials import KILLED, Case, Trials, at, interrupted
from tests.tiers import daily

pytestmark = pytest.mark.slow

# 15 batches an epoch, 5 executions of 3 steps.
EVERY_STEP = Job(backup={"save_freq": 1, "asynchronous": False})
SOMETIMES = Job(backup={"save_freq": 7})
EPOCHS = Job(backup={})


CASES = [
    interrupted("at the first step", SOMETIMES, at(1)),
    interrupted("in the middle of an epoch", SOMETIMES, at(9)),
    interrupted("in the middle of an epoch, saved at every step", EVERY_STEP, at(9)),
    interrupted("at the first step of an epoch", EVERY_STEP, at(6)),
    interrupted("after the last step of an epoch", EVERY_STEP, at(10, "on_train_batch_end")),
    interrupted("at the last step", SOMETIMES, at(25)),
    interrupted("before an epoch", EPOCHS, at(3, "on_epoch_begin")),
    interrupted("in validation", EPOCHS, at(10, "on_test_batch_begin")),
    interrupted("in the first validation", EVERY_STEP, at(2, "on_test_batch_begin")),
    interrupted("after validation", EPOCHS, at(2, "on_test_end")),
    interrupted("at a boundary, before the save", EPOCHS, at(2, "on_epoch_end")),
    interrupted("at a boundary, after the save", Job(backup={"asynchronous": False}), at(2, "after the save")),
    interrupted("at a boundary, with the save", EPOCHS, at(2, "after the save")),
    interrupted("at the end of the last epoch", EPOCHS, at(5, "on_epoch_end")),
    interrupted("after the last epoch", Job(backup={"asynchronous": False}), at(1, "on_train_end")),
    interrupted("while writing tensors", EPOCHS, {"when": "writing", "stage": "tensors", "number": 2}),
    interrupted("while writing within an epoch", SOMETIMES, {"when": "writing", "stage": "tensors", "number": 3}),
    interrupted("while writing a manifest", EPOCHS, {"when": "writing", "stage": "manifest", "number": 2}),
    interrupted("while writing the first", EPOCHS, {"when": "writing", "stage": "tensors", "number": 1}),
    interrupted("saved by time", Job(backup={"save_freq": "0.01s"}), at(13)),
    interrupted("again and again", EVERY_STEP, *[at(2)] * 4),
]


# test_store_kills.py kills while a backup is written.
DAILY = (
    "in the middle of an epoch",
    "in the middle of an epoch, saved at every step",
    "again and again",
)


@pytest.mark.parametrize("case", daily(CASES, *DAILY), ids=str)
def test_kill(case: Case, trials: Trials) -> None:
    outcome = trials.outcome(case)
    expected = [KILLED if job.kill else 0 for job in case.jobs]
    assert outcome.codes == expected
    assert outcome.differences == []


def test_the_reference_is_worth_comparing(trials: Trials) -> None:
    """Its callbacks act: the rate changes, training stops early, the best weights are not the last."""
    result = trials.outcome(CASES[0]).reference.result
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


@pytest.mark.exhaustive
def test_only_what_was_not_saved_is_done_again(trials: Trials) -> None:
    by_name = {case.name: case for case in CASES}
    steps = {
        name: trials.outcome(by_name[name]).runs[-1].result["steps of this process"]
        for name in (
            "in the middle of an epoch",
            "in the middle of an epoch, saved at every step",
            "at a boundary, after the save",
            "after the last epoch",
        )
    }
    total = trials.outcome(CASES[0]).reference.result["steps of this process"]
    assert steps["in the middle of an epoch, saved at every step"] == total - 8
    assert steps["at a boundary, after the save"] == total - 10
    assert steps["after the last epoch"] == 0
    # Saved after 9 and 18 steps; the second one may not have been written when the process died at step 24.
    assert steps["in the middle of an epoch"] in (total - 3, total - 6)


RANDOM = random.SystemRandom().randrange(2**32)


def test_random_kills(trials: Trials) -> None:
    print(f"seed {RANDOM}")
    generator = random.Random(RANDOM)
    job = Job(backup={"save_freq": 1})
    case = interrupted("random", job, *({"when": "some time", "number": generator.uniform(0, 0.3)} for _ in range(5)))
    outcome = trials.outcome(case)
    # One that got to its end before it was to be killed has nothing left to do, as those after it.
    assert outcome.codes[0] == KILLED and set(outcome.codes) <= {KILLED, 0}
    assert outcome.codes[-1] == 0
    assert outcome.differences == []
