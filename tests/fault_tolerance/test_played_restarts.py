"""Restarts that are played in one process: a fit dies by an exception, and all is made again, as by the same script."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.models import ready
from tests.tiers import daily
from tfdist.checkpoint import backup_and_restore, training_state
from tfdist.supervision.exit_codes import PREEMPTED

X = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
Y = X[:, :1] - X[:, 1:2]


class DeathError(Exception):
    """In place of a kill."""


class Death(keras.callbacks.Callback):
    """Ends the script before a step, or when a method is called.

    Args:
        step: of the model's optimizer.
        when: name of a method of callbacks, whose first call is the end.
    """

    def __init__(self, step: int | None = None, when: str | None = None) -> None:
        super().__init__()
        self._step = step
        if when is not None:
            setattr(self, when, self._die)

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        if int(self.model.optimizer.iterations) == self._step:
            self._die()

    def _die(self, *_: Any, **__: Any) -> None:
        raise DeathError

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        pass


Script = Callable[[keras.Model, Callable[..., Any]], Any]


class OwnLogs(keras.Sequential):
    """Its step logs what is no metric."""

    def train_step(self, data: Any) -> dict[str, Any]:
        super().train_step(data)
        x, y = data
        return {"error": tf.reduce_mean(tf.abs(y - self(x)))}


def start(
    script: Script,
    folder: Path | None,
    death: Death | None = None,
    kind: type[keras.Sequential] = keras.Sequential,
    **options: Any,
) -> dict[str, Any]:
    """Runs a script that makes its model, its data and its callbacks; with a folder, the fits have a backup in it."""
    backup_and_restore._finished.clear()
    keras.utils.set_random_seed(1)
    model = kind([keras.Input((3,)), keras.layers.Dropout(0.2), keras.layers.Dense(1)])
    ready(model, keras.optimizers.Adam(0.05), "mse")
    options = {"save_freq": 2, "delete_checkpoint": False, "asynchronous": False, **options}
    seen: dict[str, Any] = {}

    def fit(*data: Any, callbacks: Any = (), **arguments: Any) -> Any:
        backup = [] if folder is None else [tfdist.callbacks.BackupAndRestore(folder, **options)]
        callbacks = [death or Death(), *callbacks, *backup]
        history = model.fit(*data, callbacks=callbacks, verbose=0, **{"epochs": 4, **arguments})
        seen[f"history {len(seen)}"] = history.history
        return history

    seen["result"] = script(model, fit)
    seen["weights"] = [weight.tolist() for weight in model.get_weights()]
    seen["random"] = [random.random(), float(np.random.rand()), float(tf.random.uniform([]))]
    return seen


def restarted(script: Script, folder: Path, death: Death, **options: Any) -> dict[str, Any]:
    """What a script ends with that dies, and is started again."""
    with pytest.raises(DeathError):
        start(script, folder, death, **options)
    return start(script, folder, **options)


def shuffled(**options: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(24, seed=2, **options)


def cut_from_one_shuffle(model: keras.Model, fit: Callable[..., Any]) -> None:
    rows = shuffled()
    fit(rows.skip(8).batch(4), validation_data=rows.take(8).batch(4))


def two_fits(model: keras.Model, fit: Callable[..., Any]) -> Any:
    """As a network that is tuned after its head was trained."""
    rows, others = shuffled().batch(4), shuffled().take(13).batch(4)
    for _ in range(2):
        fit(rows, validation_data=others, epochs=2)
    return model.evaluate(others, verbose=0)


def two_fits_behind_two_shuffles(model: keras.Model, fit: Callable[..., Any]) -> None:
    rows = shuffled().map(lambda x, y: (x, y)).shuffle(5, seed=3).batch(4)
    fit(rows, epochs=2)
    fit(rows, epochs=2)


def part_of_a_validation(model: keras.Model, fit: Callable[..., Any]) -> None:
    fit(X, Y, batch_size=4, validation_data=shuffled().batch(4), validation_steps=2)


def repeated_validation(model: keras.Model, fit: Callable[..., Any]) -> None:
    """A validation of 14 rows draws twice: there are 12."""
    fit(X, Y, batch_size=4, validation_data=shuffled().take(12).repeat().batch(2), validation_steps=7)


SCRIPTS = {
    script.__name__.replace("_", " "): script
    for script in (
        cut_from_one_shuffle,
        two_fits,
        two_fits_behind_two_shuffles,
        part_of_a_validation,
        repeated_validation,
    )
}


@pytest.mark.parametrize("name", daily(SCRIPTS, "cut from one shuffle", "two fits", "part of a validation"))
def test_a_pipeline_with_several_readers(name: str, tmp_path: Path) -> None:
    """Each iterator draws from the seeds of the shuffle, whoever makes it."""
    assert restarted(SCRIPTS[name], tmp_path, Death(15)) == start(SCRIPTS[name], None)


class AtTheEnd(keras.callbacks.Callback):
    """Does something at the end of a fit that a restart must not do again, and may not leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_train_end(self, logs: dict | None = None) -> None:
        self.losses.append(logs["loss"])
        self.model.set_weights([weight * random.random() for weight in self.model.get_weights()])


def with_an_end(model: keras.Model, fit: Callable[..., Any]) -> list[float]:
    end = AtTheEnd()
    fit(X, Y, batch_size=8, epochs=2, callbacks=[end])
    return end.losses


def test_the_end_of_a_finished_fit(tmp_path: Path) -> None:
    alone = start(with_an_end, None)
    assert restarted(with_an_end, tmp_path, Death(when="on_train_end")) == alone
    assert start(with_an_end, tmp_path) == start(with_an_end, tmp_path) == alone


class Sends(keras.callbacks.Callback):
    """Sends this process a signal before a step, or at the end of a fit."""

    def __init__(self, step: int | None = None) -> None:
        super().__init__()
        self.step = step

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        if int(self.model.optimizer.iterations) == self.step:
            signal.raise_signal(signal.SIGUSR1)

    def on_train_end(self, logs: dict | None = None) -> None:
        if self.step is None:
            signal.raise_signal(signal.SIGUSR1)


@pytest.fixture
def received() -> Any:
    """What a program of its own notes of SIGUSR1."""
    noted: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: noted.append(number))
    yield noted
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_in_the_last_step_of_an_epoch(tmp_path: Path, received: list[int]) -> None:
    """Keras takes the logs of the epoch from its last step, which the next process does not make again."""

    def script(model: keras.Model, fit: Callable[..., Any]) -> None:
        fit(X, Y, batch_size=8, epochs=3, callbacks=[Sends(5)])

    with pytest.raises(SystemExit):
        start(script, tmp_path, kind=OwnLogs, preemption_signal=signal.SIGUSR1)
    assert start(script, tmp_path, kind=OwnLogs) == start(script, None, kind=OwnLogs)


def test_a_signal_at_the_end_of_a_fit(tmp_path: Path, received: list[int]) -> None:
    def script(model: keras.Model, fit: Callable[..., Any]) -> None:
        fit(X, Y, batch_size=8, epochs=2, callbacks=[Sends()])

    alone = start(script, None)
    received.clear()
    for options in ({}, {}, {"delete_checkpoint": True}):  # the second one finds a finished fit
        with pytest.raises(SystemExit) as left:
            start(script, tmp_path, preemption_signal=signal.SIGUSR1, **options)
        assert (left.value.code, received) == (PREEMPTED, [])
    assert start(script, tmp_path, preemption_signal=None) == alone


def test_a_signal_after_the_end_is_passed_on(
    tmp_path: Path, received: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_state, "forget", lambda model: signal.raise_signal(signal.SIGUSR1))
    start(lambda model, fit: fit(X, Y), tmp_path, preemption_signal=signal.SIGUSR1)
    assert received == [signal.SIGUSR1]


class Rows(keras.callbacks.CSVLogger):
    """Counts what it writes."""

    count = 0

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self.count += 1
        super().on_epoch_end(epoch, logs)


def test_callbacks_that_only_write(tmp_path: Path) -> None:
    class Saver(getattr(keras.callbacks, "OrbaxCheckpoint", keras.callbacks.Callback)):
        """Notes what it saves; the package of Orbax need not be there."""

        def __init__(self) -> None:
            super(keras.callbacks.OrbaxCheckpoint, self).__init__("loss", "max")
            self.save_freq, self.save_best_only, self._multihost_initialized = "epoch", True, False
            self.saved: list[int] = []

        def _save_checkpoint(self, step: int, logs: dict | None = None) -> None:
            self.saved.append(step)

    def script_in(folder: Path) -> Script:
        def script(model: keras.Model, fit: Callable[..., Any]) -> tuple[Any, ...]:
            folder.mkdir(exist_ok=True)
            rows, savers = Rows(folder / "log.csv"), [Saver()] if hasattr(keras.callbacks, "OrbaxCheckpoint") else []
            callbacks = [keras.callbacks.ReduceLROnPlateau("loss"), rows, *savers]
            fit(X, Y, batch_size=8, validation_data=(X, Y), validation_freq=2, callbacks=callbacks)
            return rows.count, [saver.saved for saver in savers], (folder / "log.csv").read_text()

        return script

    found = restarted(script_in(tmp_path / "dies"), tmp_path / "backup", Death(4))
    assert found == start(script_in(tmp_path / "alone"), None)
    assert found["result"][0] == 4


class Slower(keras.callbacks.Callback):
    """Lets the rate fall with its own count of steps, which is an argument."""

    def __init__(self, step: int = 0) -> None:
        super().__init__()
        self.step = step

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        self.step += 1
        self.model.optimizer.learning_rate = 0.1 / self.step


def test_a_failed_fit_that_is_tried_again(tmp_path: Path) -> None:
    """By the same objects, in the same process: what the fit has changed of an argument is not the user's change."""
    slower, death = Slower(), Death(7)

    def script(model: keras.Model, fit: Callable[..., Any]) -> int:
        def attempt(callbacks: Any) -> None:
            fit(X, Y, batch_size=4, epochs=2, callbacks=callbacks)

        if death._step is not None:
            with pytest.raises(DeathError):
                attempt([slower])
            death._step = None
        attempt([slower])
        return slower.step

    found = start(script, tmp_path, death, save_freq=3)
    slower = Slower()
    assert found == start(script, None)
