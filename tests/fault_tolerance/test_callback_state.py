"""What users' callbacks keep: saved exactly whatever it is, or named in a warning; never lost in silence."""

from __future__ import annotations

import re

import keras
import numpy as np
import pytest

from tests.fault_tolerance.job import Job
from tests.fault_tolerance.own_callbacks import Keeper
from tests.fault_tolerance.trials import KILLED, Case, Trials, about, at, interrupted
from tfdist.checkpoint import callback_state
from tfdist.checkpoint.plain_data import NotPlainError

JOB = Job(backup={"save_freq": 4, "asynchronous": False}).light.with_(callbacks=("keeper", "csv"))
KEPT = interrupted("everything that can be saved", JOB, at(9), at(4))


@pytest.mark.slow
@pytest.mark.parametrize("case", [KEPT], ids=str)
def test_everything_that_can_be_saved(case: Case, trials: Trials) -> None:
    outcome = trials.outcome(case)
    assert outcome.codes == [KILLED, KILLED, 0]
    assert outcome.differences == []
    assert "not saved" not in outcome.log and "cannot be restored" not in outcome.log
    facts = outcome.runs[-1].result["fit 1: keeper/facts"]
    assert (facts["count"], facts["text"]) == ("Count(value=20)", repr(b"x" * 20))


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case("without Keeper", (*KEPT.jobs[:-1], JOB.with_(leave_out="Keeper")))], ids=str)
def test_that_it_is_noticed(case: Case, trials: Trials) -> None:
    assert about(trials.outcome(case).differences) == {"keeper"}


LOST = interrupted("what cannot be saved", JOB.with_(callbacks=("forgetful",)), at(9))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("case", [LOST], ids=str)
def test_what_cannot_be_saved_is_named_once(case: Case, trials: Trials) -> None:
    outcome = trials.outcome(case)
    assert outcome.codes == [KILLED, 0]
    for run in outcome.runs:
        assert re.findall(r"UserWarning: (.* not saved.*)", run.log) == [
            "Forgetful: .thing, .things are not saved. After a kill the callback goes on without; if that matters, "
            "give it get_state(), which returns plain data, and set_state(state)."
        ]


FEWER = JOB.with_(callbacks=("plateau", "csv"))
MORE = JOB.with_(callbacks=("forgetful", "plateau", "csv"))
OTHERS = [
    (
        Case("one more", (FEWER.with_(kill=at(9)), MORE), reference=FEWER.reference),
        "Forgetful: not in the backup, and begins as new.",
    ),
    (
        Case("one less", (MORE.with_(kill=at(9)), FEWER), reference=FEWER.reference),
        "Forgetful: in the backup, but not in this fit; its state is left out.",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "told"), OTHERS, ids=lambda value: str(value).split(":")[0])
def test_other_callbacks_after_a_restart(case: Case, told: str, trials: Trials) -> None:
    """Whoever adds TensorBoard to a job that is started again, or removes what was for debugging, goes on."""
    outcome = trials.outcome(case)
    assert outcome.codes == [KILLED, 0]
    assert outcome.differences == []
    assert re.findall(r"UserWarning: (The backup is of a fit with other.*)", outcome.log) == [
        f"The backup is of a fit with other callbacks. {told} All else goes on as it was saved."
    ]


def entry_of(callback: keras.callbacks.Callback) -> dict:
    return callback_state.capture([callback], callback_state.settings([callback]), {})[0]


@pytest.mark.parametrize(
    ("saved", "now", "expected"),
    [
        ("a b", "a b", [0, 1]),
        ("a b", "b a", [1, 0]),
        ("a b", "b", [1]),
        ("b", "a b", [None, 0]),
        ("a", "b", [0]),
        ("a", "b c", [0, None]),
        ("a a b", "a b a", [0, 2, 1]),
        ("e a", "a", [1]),
        ("a", "e a", [None, 0]),
        ("", "a", [None]),
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
    one.settings.add("c")
    arrays: dict[str, np.ndarray] = {}
    entries = callback_state.capture([one], callback_state.settings([Keeper(("a", "b"))]), arrays)
    callback_state.restore([other], callback_state.settings([other]), entries, arrays)
    assert other.settings == {"a", "b", "c"}
    third = Keeper(("d",))
    callback_state.restore([third], callback_state.settings([third]), entries, arrays)
    assert third.settings == {"d"}


def test_an_object_that_is_missing_is_named() -> None:
    class Late(keras.callbacks.Callback):
        mean = None

    one, other = Late(), Late()
    one.mean = keras.metrics.Mean()
    arrays: dict[str, np.ndarray] = {}
    entries = callback_state.capture([one], [{}], arrays)
    with pytest.warns(UserWarning) as caught:
        callback_state.restore([other], [{}], entries, arrays)
    assert [str(warning.message) for warning in caught] == [
        "Late.mean is in the backup and cannot be restored: this process has no such object in its place. Expected: "
        "one like that which was saved, before the first epoch begins; or give it get_state() and set_state(state)."
    ]


def test_get_state_returns_what_cannot_be_saved() -> None:
    class Wrong(keras.callbacks.Callback):
        def get_state(self) -> dict:
            return {"function": len}

    with pytest.raises(NotPlainError) as caught:
        callback_state.capture([Wrong()], [{}], {})
    assert str(caught.value) == (
        "Wrong.get_state() returned what cannot be saved. Received: a builtin_function_or_method. Expected: numbers, "
        "text, bytes, dates, paths, arrays, tensors, and containers or dataclasses of them. Convert it."
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
