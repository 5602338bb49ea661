"""What users' callbacks keep: saved exactly whatever it is, or named in a warning; never lost in silence."""

from __future__ import annotations

import re

import keras
import numpy as np
import pytest

from tests.fault_tolerance.job import Job
from tests.fault_tolerance.own_callbacks import Keeper, Thing, carry
from tests.fault_tolerance.trials import KILLED, Case, Trials, at, interrupted
from tfdist.checkpoint import callback_state
from tfdist.checkpoint.callback_state import NotPlainError

JOB = Job(backup={"save_freq": 4, "asynchronous": False}).light.with_(callbacks=("keeper", "csv"))


@pytest.mark.nightly
@pytest.mark.slow
def test_everything_that_can_be_saved(trials: Trials) -> None:
    outcome = trials.outcome(interrupted("everything that can be saved", JOB, at(9), at(4)))
    assert outcome.codes == [KILLED, KILLED, 0]
    assert outcome.differences == []
    assert "not saved" not in outcome.log and "cannot be restored" not in outcome.log
    facts = outcome.runs[-1].result["fit 1: keeper/facts"]
    assert (facts["count"], facts["text"]) == ("Count(value=20)", repr(b"x" * 20))


FEWER = JOB.with_(callbacks=("plateau", "csv"))
MORE = JOB.with_(callbacks=("forgetful", "plateau", "csv"))


@pytest.mark.nightly
@pytest.mark.slow
def test_one_more_callback_after_a_restart(trials: Trials) -> None:
    """A user adds TensorBoard to a job that is started again: the job goes on."""
    outcome = trials.outcome(Case("one more", (FEWER.with_(kill=at(9)), MORE), reference=FEWER.reference))
    assert outcome.codes == [KILLED, 0]
    assert outcome.differences == []
    assert re.findall(r"UserWarning: (.* not saved.*)", outcome.log) == [
        "Forgetful: not saved: thing, things. After a kill the callback goes on without; if that matters, give it "
        "get_state(), which returns plain data, and set_state(state)."
    ]
    assert re.findall(r"UserWarning: (The backup is of a fit with other.*)", outcome.log) == [
        "The backup is of a fit with other callbacks. Not in the backup, and begin as new: Forgetful. In the backup "
        "only, and left out: none."
    ]


def entry_of(callback: keras.callbacks.Callback) -> dict:
    return callback_state.capture([callback], callback_state.settings([callback]), {})[0]


@pytest.mark.parametrize(
    ("saved", "now", "expected"),
    [
        ("a b", "b a", [1, 0]),
        ("b", "a b", [None, 0]),
        ("a", "b c", [0, None]),
        ("a a b", "a b a", [0, 2, 1]),
        ("e a", "a", [1]),
    ],
)
def test_entries_are_of_the_callbacks_that_were_saved(saved: str, now: str, expected: list) -> None:
    def made(names: str) -> list[keras.callbacks.Callback]:
        early = keras.callbacks.EarlyStopping
        return [early() if n == "e" else keras.callbacks.ModelCheckpoint(f"{n}.keras") for n in names.split()]

    entries = [entry_of(callback) for callback in made(saved)]
    callbacks = made(now)
    found = callback_state.matching(callbacks, callback_state.settings(callbacks), entries)
    places = {id(entry): i for i, entry in enumerate(entries)}
    assert [None if entry is None else places[id(entry)] for entry in found] == expected


def test_a_setting_that_was_changed_is_the_new_one() -> None:
    """A set of texts has another order in each process: that is no change."""
    one, other = Keeper(("a", "b")), Keeper(("b", "a"))
    one.count.value = 5
    third = Keeper(("d",))
    carry(one, Keeper(("a", "b")), other, third)
    assert (other.settings, other.count.value) == ({"a", "b"}, 5)
    assert third.settings == {"d"}


def test_a_method_that_is_called_set_state_alone() -> None:
    class Phases(keras.callbacks.Callback):
        state, count = "warm", 0

        def set_state(self, state: str) -> None:
            self.state = state
            self.count += 1

    one, other = Phases(), Phases()
    one.set_state("cold")
    carry(one, Phases(), other)
    assert (other.state, other.count) == ("cold", 1)


def test_an_object_that_is_missing_is_named() -> None:
    class Late(keras.callbacks.Callback):
        mean = None

    one, other = Late(), Late()
    one.mean = keras.metrics.Mean()
    with pytest.warns(UserWarning) as caught:
        carry(one, other, other)
    assert [str(warning.message) for warning in caught] == [
        "Late.mean is in the backup and cannot be restored: this process has no such object in its place. Expected: "
        "one like that which was saved, before the first epoch begins; or give it get_state() and set_state(state)."
    ]


def test_what_methods_keep_in_an_argument_or_in_the_class() -> None:
    class Best(keras.callbacks.Callback):
        losses: list[float] = []  # noqa: RUF012
        counts = np.zeros(2)
        unit: dict[str, int] = {"s": 1}  # noqa: RUF012

        def __init__(self, rows: np.ndarray, drawn: list, weights: list | None = None) -> None:
            super().__init__()
            self.rows, self.drawn, self.weights = rows, drawn, weights

        def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
            self.weights = [np.full(2, float(epoch))]
            self.drawn.append(np.ones(1))
            self.losses.append(0.5)
            self.counts[1] += 1

    one, other = (Best(np.ones(3), [np.zeros(1)]) for _ in range(2))
    began = callback_state.begin([one], "folder")
    one.on_epoch_end(3)
    arrays: dict[str, np.ndarray] = {}
    entries = callback_state.capture([one], [began[0].settings], arrays, (), began)
    assert [name for name, _ in entries[0]["state"]["dict"]] == ["losses", "counts", "drawn", "weights"]
    # In another process the class is as the program has made it.
    losses, counts = Best.losses, Best.counts
    losses.clear()
    counts[:] = 0
    callback_state.restore([other], callback_state.settings([other]), entries, arrays)
    assert (losses, counts.tolist()) == ([0.5], [0.0, 1.0])
    assert ([a.tolist() for a in other.drawn], other.weights[0].tolist()) == ([[0.0], [1.0]], [3.0, 3.0])


def test_what_callbacks_that_only_write_know_of_the_fit() -> None:
    class Board(keras.callbacks.TensorBoard):
        def __init__(self) -> None:
            super().__init__("logs")
            self.seen, self.thing = 0, Thing()

    one, other = Board(), Board()
    one.seen = one._global_train_batch = 5
    carry(one, other, other)
    assert (other.seen, other._global_train_batch) == (5, 0)
    assert entry_of(one)["unsaved"] == ["thing"]


def test_get_state_returns_what_cannot_be_saved() -> None:
    class Wrong(keras.callbacks.Callback):
        def get_state(self) -> dict:
            return {"function": len}

    with pytest.raises(NotPlainError) as caught:
        callback_state.capture([Wrong()], [{}], {})
    assert str(caught.value) == (
        "Wrong.get_state() returned what cannot be saved. Received: a builtin_function_or_method. Expected: numbers, "
        "text, bytes, dates, paths, arrays, tensors, and containers of them. Convert it."
    )


def test_arrays_that_the_user_has_passed_are_not_saved() -> None:
    class Validation(keras.callbacks.Callback):
        def __init__(self, data: tuple) -> None:
            super().__init__()
            self.data, self.own = data, np.ones(2)

    arrays: dict[str, np.ndarray] = {}
    (entry,) = callback_state.capture([Validation((np.zeros(9), np.zeros(9)))], [{}], arrays)
    assert [name for name, _ in entry["state"]["dict"]] == ["own"]
    assert list(arrays) == ["callbacks/0/own/0"]
