"""Restarts that are played in one process: a fit dies by an exception, and all is made again, as by the same script."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.fault_tolerance.models import Damped
from tests.models import ready, warned
from tests.tiers import daily
from tfdist.checkpoint import backup_and_restore, training_state
from tfdist.checkpoint.lock import FolderInUseError
from tfdist.checkpoint.schedule import BackgroundWriter
from tfdist.checkpoint.store import CheckpointStore
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
        self._step, self.is_dead = step, False
        if when is not None:
            setattr(self, when, self._die)

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        if int(self.model.optimizer.iterations) == self._step:
            self._die()

    def _die(self, *_: Any, **__: Any) -> None:
        self.is_dead = True
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
    kind: Callable[[list], keras.Model] = keras.Sequential,
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


class Pieces(keras.utils.PyDataset):
    """Batches by their numbers, which Keras shuffles."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return X[4 * index : 4 * index + 4], Y[4 * index : 4 * index + 4]


def an_order_for_several_epochs(model: keras.Model, fit: Callable[..., Any]) -> None:
    fit(Pieces(), steps_per_epoch=2, epochs=9)


def a_look_before_the_first_epoch(model: keras.Model, fit: Callable[..., Any]) -> None:
    others = shuffled().batch(4)
    look = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: model.evaluate(X, Y, verbose=0))
    fit(X, Y, batch_size=4, validation_data=others, callbacks=[look])


class Noisy(keras.optimizers.SGD):
    """Adds random numbers to gradients."""

    def __init__(self) -> None:
        super().__init__(0.05)
        self.noise = keras.random.SeedGenerator(3)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        noise = keras.random.normal(gradient.shape, seed=self.noise)
        super().update_step(gradient + noise, variable, learning_rate)


def an_optimizer_that_draws(model: keras.Model, fit: Callable[..., Any]) -> None:
    ready(model, Noisy(), "mse")
    fit(X, Y, batch_size=4)


class Running(keras.losses.Loss):
    """An error beside its running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = keras.Variable(1.0, trainable=False)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        error = keras.ops.square(y_true - y_pred)
        self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(error))
        return error / keras.ops.stop_gradient(self.mean)


def a_loss_with_a_state(model: keras.Model, fit: Callable[..., Any]) -> None:
    ready(model, keras.optimizers.Adam(0.05), Running())
    fit(X, Y, batch_size=4)


SCRIPTS = {
    script.__name__.replace("_", " "): script
    for script in (
        cut_from_one_shuffle,
        two_fits,
        two_fits_behind_two_shuffles,
        part_of_a_validation,
        repeated_validation,
        an_order_for_several_epochs,
        an_optimizer_that_draws,
        a_loss_with_a_state,
        a_look_before_the_first_epoch,
    )
}


DAILY = (
    "cut from one shuffle",
    "two fits",
    "part of a validation",
    "an order for several epochs",
    "a loss with a state",
)


@pytest.mark.parametrize("name", daily(SCRIPTS, *DAILY))
def test_a_pipeline_with_several_readers(name: str, tmp_path: Path) -> None:
    """Each iterator draws from the seeds of the shuffle, whoever makes it."""
    assert restarted(SCRIPTS[name], tmp_path, Death(15)) == start(SCRIPTS[name], None)


class Noise(keras.layers.Layer):
    """Draws from a generator of TensorFlow."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = tf.random.Generator.from_seed(3)

    def call(self, x: Any) -> Any:
        return x + 0.1 * self.generator.normal(tf.shape(x))


class Ramp(keras.regularizers.Regularizer):
    """Grows with each step."""

    def __init__(self) -> None:
        self.strength = tf.Variable(0.0)

    def __call__(self, x: Any) -> Any:
        return self.strength.assign_add(0.01) * tf.reduce_sum(tf.square(x))


class Helper:
    """A network with an optimizer and a metric, in an object of the script's own."""

    def __init__(self) -> None:
        self.net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        self.optimizer, self.mean = keras.optimizers.Adam(0.01), keras.metrics.Mean()

    def train(self, x: Any, y: Any) -> Any:
        """Trains the network for a step; returns what it makes of the rows."""
        with tf.GradientTape() as tape:
            made = self.net(x)
            loss = tf.reduce_mean(tf.square(made - y))
        self.optimizer.apply(tape.gradient(loss, self.net.trainable_variables), self.net.trainable_variables)
        self.mean.update_state(loss)
        return made * self.mean.result()


class Helped(keras.Sequential):
    """Is trained towards what a helper makes."""

    def __init__(self, layers: list) -> None:
        super().__init__(layers)
        self.helper = Helper()

    def train_step(self, data: Any) -> Any:
        x, y = data
        return super().train_step((x, y + self.helper.train(x, y)))


class Doubled(keras.Model):
    """Its second optimizer is built in the first step, as are those of a CycleGAN."""

    def __init__(self, layers: list) -> None:
        super().__init__()
        self.parts = [keras.layers.Dense(1), keras.layers.Dense(1)]
        self.second = keras.optimizers.Adam(0.02)

    def call(self, x: Any) -> Any:
        return self.parts[0](x) + self.parts[1](x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        for part, optimizer in zip(self.parts, (self.optimizer, self.second), strict=True):
            optimizer.apply(tape.gradient(loss, part.trainable_variables), part.trainable_variables)
        return {"loss": loss}


class Halves(keras.optimizers.schedules.LearningRateSchedule):
    """A rate that a callback changes."""

    def __init__(self) -> None:
        self.factor = keras.Variable(1.0, trainable=False)

    def __call__(self, step: Any) -> Any:
        return 0.1 * self.factor


class Wary(keras.optimizers.SGD):
    """Goes by all gradients so far."""

    def __init__(self) -> None:
        super().__init__(0.1)
        self.total = tf.Variable(0.0)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        total = self.total.assign_add(tf.reduce_mean(tf.abs(gradient)))
        super().update_step(gradient / (1.0 + total), variable, learning_rate)


def with_a_recurrent(layer: Callable[[], Any]) -> Callable[[list], keras.Model]:
    inputs = [keras.Input(batch_shape=(4, 3)), keras.layers.Reshape((1, 3))]
    return lambda layers: keras.Sequential([*inputs, layer(), layers[-1]])


def stacked() -> Any:
    cells = [keras.layers.LSTMCell(2), keras.layers.GRUCell(2)]
    return keras.layers.Bidirectional(keras.layers.RNN(keras.layers.StackedRNNCells(cells), stateful=True))


# Models with variables that Keras does not list among theirs.
UNLISTED: dict[str, Callable[[list], keras.Model]] = {
    "a recurrent layer": with_a_recurrent(lambda: keras.layers.LSTM(2, stateful=True, unroll=True)),
    "stacked cells both ways": with_a_recurrent(stacked),
    "a module": lambda layers: keras.Sequential([layers[0], Damped(), layers[-1]]),
    "a generator": lambda layers: keras.Sequential([layers[0], Noise(), layers[-1]]),
    "a regulariser": lambda layers: keras.Sequential([layers[0], keras.layers.Dense(1, kernel_regularizer=Ramp())]),
    "a helper": Helped,
    "a schedule": keras.Sequential,
    "an optimizer": keras.Sequential,
}
OPTIMIZERS = {"a schedule": lambda: keras.optimizers.Adam(Halves()), "an optimizer": Wary}


def of_unlisted(name: str) -> Script:
    def script(model: keras.Model, fit: Callable[..., Any]) -> None:
        ready(model, OPTIMIZERS.get(name, keras.optimizers.Adam)(), "mse")
        schedule = getattr(model.optimizer, "_learning_rate", None)
        halves = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: schedule.factor.assign(0.5 * schedule.factor)
        )
        fit(X, Y, batch_size=4, callbacks=[halves] if name == "a schedule" else [])

    return script


@pytest.mark.parametrize("name", daily(UNLISTED, "a recurrent layer", "a generator", "a helper"))
def test_variables_that_keras_does_not_list(name: str, tmp_path: Path) -> None:
    script, kind = of_unlisted(name), UNLISTED[name]
    assert restarted(script, tmp_path, Death(15), kind=kind) == start(script, None, kind=kind)


def test_an_optimizer_that_the_first_step_builds(tmp_path: Path) -> None:
    def script(model: keras.Model, fit: Callable[..., Any]) -> Any:
        fit(X, Y, batch_size=4)
        return [np.asarray(variable).tolist() for variable in model.second.variables]

    found = restarted(script, tmp_path, Death(15), kind=Doubled)
    assert found == start(script, None, kind=Doubled)
    assert len(found["result"]) == 2 + 4


def test_a_backup_without_unlisted_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier versions have made such ones: a fit goes on with all else."""
    script, kind = of_unlisted("a module"), UNLISTED["a module"]
    with monkeypatch.context() as earlier, pytest.raises(DeathError):
        earlier.setattr(training_state, "_unlisted", lambda model: [])
        start(script, tmp_path, Death(15), kind=kind)
    steps: list[int] = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(batch))
    with pytest.warns(
        UserWarning, match="Received: a backup without Variable:0, which .* stay as the program has made"
    ):
        start(
            lambda model, fit: script(model, lambda *a, **o: fit(*a, **{**o, "callbacks": [count]})),
            tmp_path,
            kind=kind,
        )
    assert len(steps) == 24 - 14


def test_a_variable_that_no_attribute_leads_to(tmp_path: Path) -> None:
    mean = tf.Variable(0.0, name="of_the_script")

    def error(y: Any, p: Any) -> Any:
        found = tf.reduce_mean(tf.square(y - p), -1)
        return found / (1.0 + mean.assign(0.9 * mean + 0.1 * tf.reduce_mean(found)))

    def script(model: keras.Model, fit: Callable[..., Any]) -> None:
        fit(X, Y, batch_size=4, epochs=1)
        ready(model, "adam", error)
        fit(X, Y, batch_size=4, epochs=2)

    (text,) = warned(lambda: start(script, tmp_path), "a step that changes ")
    assert text.startswith("Received: a step that changes of_the_script:0, which neither the model refers to, ")


class Annealed(keras.Sequential):
    """A number that its user changes while it trains."""

    def __init__(self, layers: list) -> None:
        super().__init__(layers)
        self.beta, self.unchanged = 0.0, 1.0

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        return super().compute_loss(*args, **options) + self.beta * tf.reduce_sum(tf.abs(self.weights[0]))


def test_a_number_of_the_model_that_changes(tmp_path: Path) -> None:
    def script(model: keras.Model, fit: Callable[..., Any]) -> None:
        ready(model, "adam", "mse", run_eagerly=True)
        more = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: setattr(model, "beta", 0.1 * epoch))
        fit(X, Y, batch_size=12, callbacks=[more])

    (text,) = warned(lambda: start(script, tmp_path, kind=Annealed), "which a step or a callback changes")
    assert text.startswith("Received: Annealed.beta, which a step or a callback changes. ")


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


@pytest.mark.parametrize("when", ["on_train_batch_end", "on_epoch_end"])
def test_seeds_that_are_first_used_between_two_backups(when: str, tmp_path: Path, received: list[int]) -> None:
    def script(model: keras.Model, fit: Callable[..., Any]) -> float:
        def draw(number: int, logs: dict | None) -> None:
            steps = int(model.optimizer.iterations)
            if steps > 4:
                keras.random.uniform([])
            if steps == 6:
                signal.raise_signal(signal.SIGUSR1)

        fit(X, Y, batch_size=4, epochs=2, callbacks=[keras.callbacks.LambdaCallback(**{when: draw})])
        return float(keras.random.uniform([]))

    with pytest.raises(SystemExit):
        start(script, tmp_path, preemption_signal=signal.SIGUSR1)
    assert start(script, tmp_path) == start(script, None)


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


def tried_again(death: Death, *steps: int, data: Callable[[], tuple] = lambda: (X, Y)) -> Script:
    """A fit that dies at some steps, and is tried again by the same objects, in the same process."""
    slower = Slower()

    def script(model: keras.Model, fit: Callable[..., Any]) -> int:
        for death._step in [*steps, None]:
            with contextlib.nullcontext() if death._step is None else pytest.raises(DeathError):
                rows = data()
                fit(*rows, epochs=2, callbacks=[slower], **{"batch_size": 4} if len(rows) > 1 else {})
        return slower.step

    return script


@pytest.mark.parametrize("steps", [[7], [10, 11]])
def test_a_failed_fit_that_is_tried_again(steps: list[int], tmp_path: Path) -> None:
    """What the fit has changed of an argument is not the user's change. Two may die in one epoch."""
    death = Death()
    found = start(tried_again(death, *steps), tmp_path, death, save_freq=3)
    assert found == start(tried_again(death), None)


def test_what_a_failed_fit_is_still_writing_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one does not take it for a rest that a killed process has left."""
    death, goes_on = Death(), threading.Event()
    put, make, wait = CheckpointStore._put_tensors, CheckpointStore.__init__, BackgroundWriter.wait

    def put_late(*arguments: Any) -> Any:
        assert goes_on.wait(60)
        return put(*arguments)

    def make_it(*arguments: Any, **options: Any) -> None:
        make(*arguments, **options)
        note()

    def wait_for_it(writer: BackgroundWriter) -> None:
        note()
        wait(writer)

    def note() -> None:
        if death.is_dead:
            goes_on.set()

    monkeypatch.setattr(CheckpointStore, "_put_tensors", put_late)
    monkeypatch.setattr(CheckpointStore, "__init__", make_it)
    monkeypatch.setattr(BackgroundWriter, "wait", wait_for_it)
    found = start(tried_again(death, 5), tmp_path, death, save_freq=4, asynchronous=True)
    assert found == start(tried_again(death), None)


def test_a_shuffle_that_a_failed_fit_has_read(tmp_path: Path) -> None:
    """It cannot draw again: that is said. One that is made anew can."""
    words, rows, found = "a fit of this process has read which has failed", shuffled().batch(4), []
    death = Death()
    for data, number in ((lambda: (rows,), 1), (lambda: (shuffled().batch(4),), 0)):
        folder = tmp_path / str(number)
        script = tried_again(death, 9, data=data)
        texts = warned(lambda folder=folder, script=script: found.append(start(script, folder, death)), words)
        assert len(texts) == number
    alone = start(tried_again(death, data=lambda: (shuffled().batch(4),)), None)
    assert [one == alone for one in found] == [False, True]


@pytest.mark.parametrize("save_freq", [2, "epoch"])
def test_another_batch_size_of_data_of_unknown_length(save_freq: Any, tmp_path: Path) -> None:
    """Within an epoch it is refused: other rows would follow. The next epochs have as many batches as there are."""

    def script_of(size: int) -> Script:
        def script(model: keras.Model, fit: Callable[..., Any]) -> int:
            fit(tf.data.Dataset.from_tensor_slices((X, Y)).filter(lambda x, y: True).batch(size))
            return int(model.optimizer.iterations)

        return script

    with pytest.raises(DeathError):
        start(script_of(4), tmp_path, Death(9), save_freq=save_freq)
    if save_freq == "epoch":
        assert (
            start(script_of(2), tmp_path, save_freq=save_freq)["result"] == 7 + 3 * 13
        )  # Keras counts the step that finds no data
    else:
        with pytest.raises(ValueError, match=r"rows of a batch: \[2\]\. Expected, as saved: \[4\]\."):
            start(script_of(2), tmp_path, save_freq=save_freq)


def of_arrays(order: slice, folder: str) -> tuple:
    return X[order], Y[order]


def of_slices(order: slice, folder: str) -> tuple:
    return (tf.data.Dataset.from_tensor_slices((X[order], Y[order])).batch(4),)


def of_files(order: slice, folder: str) -> tuple:
    names = [f"{folder}/{i}.png" for i in range(24)][order]
    return (tf.data.Dataset.from_tensor_slices(names).map(lambda name: (tf.ones([3]), tf.ones([1]))).batch(4),)


@pytest.mark.parametrize("data", [of_arrays, of_slices, of_files])
def test_other_rows_than_before_are_told_of(data: Callable[[slice, str], tuple], tmp_path: Path) -> None:
    """As a program has them that shuffles or splits them without a seed; a folder may have another name."""

    def script_of(*arguments: Any) -> Script:
        return lambda model, fit: fit(*data(*arguments))

    same, reverse = slice(None), slice(None, None, -1)
    with pytest.raises(DeathError):
        start(script_of(same, "one"), tmp_path, Death(3))
    words = "that are others than when the backup was made"
    for order, number in ((same, 0), (reverse, 1)):
        texts = warned(lambda order=order: died(script_of(order, "two"), tmp_path), words)
        assert len(texts) == number


def died(script: Script, folder: Path) -> None:
    with pytest.raises(DeathError):
        start(script, folder, Death(when="on_train_batch_begin"))


class Late(keras.callbacks.Callback):
    """Lets another callback see the later epochs."""

    def __init__(self, held: list[keras.callbacks.Callback]) -> None:
        super().__init__()
        self.held = held

    def on_train_begin(self, logs: dict | None = None) -> None:
        for one in self.held:
            one.set_model(self.model)
            one.on_train_begin(logs)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        for one in self.held if epoch else ():
            one.on_epoch_end(epoch, logs)


def test_callbacks_that_a_callback_holds(tmp_path: Path) -> None:
    def script(model: keras.Model, fit: Callable[..., Any]) -> int:
        early = keras.callbacks.EarlyStopping("loss", min_delta=9, patience=3)
        fit(X, Y, batch_size=4, epochs=9, callbacks=[Late([early])])
        return early.stopped_epoch

    found = restarted(script, tmp_path, Death(21))
    assert found == start(script, None)
    assert found["result"] == 4


def test_a_folder_with_backups_of_later_fits(tmp_path: Path) -> None:
    """A fit that has ended, and deleted its own, is trained again; one that is left out gives its place to another."""

    def script(model: keras.Model, fit: Callable[..., Any]) -> None:
        for _ in range(2):
            fit(X, Y, batch_size=8, epochs=2)

    with pytest.raises(DeathError):
        start(script, tmp_path, Death(9), delete_checkpoint=True)
    found: list[dict[str, Any]] = []
    texts = warned(
        lambda: found.append(start(script, tmp_path, delete_checkpoint=True)), "of later ones there: fit-2. It begins"
    )
    assert len(texts) == 1
    assert found == [start(script, None)]


class Freezes(keras.callbacks.Callback):
    """Freezes a layer, as Keras' documentation says."""

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        if epoch == 1:
            self.model.layers[0].trainable = False
            self.model.make_train_function(force=True)


def two_layers(layers: list) -> keras.Model:
    return keras.Sequential([layers[0], keras.layers.Dense(4), *layers[1:]])


@pytest.mark.parametrize("save_freq", daily([2, "epoch"], "2"))
def test_a_layer_that_a_callback_has_frozen(save_freq: Any, tmp_path: Path) -> None:
    def script(model: keras.Model, fit: Callable[..., Any]) -> list[bool]:
        fit(X, Y, batch_size=4, callbacks=[Freezes()])
        fit(X, Y, batch_size=4, epochs=1)
        return [layer.trainable for layer in model.layers]

    found = restarted(script, tmp_path, Death(15), kind=two_layers, save_freq=save_freq)
    assert found == start(script, None, kind=two_layers)
    assert found["result"] == [False, True, True]
    assert start(script, tmp_path, kind=two_layers) == found


class Teacher(keras.callbacks.Callback):
    """Keeps means of the weights in a model that it was given and in one of its own, and trains a critic."""

    def __init__(self, teacher: keras.Model, critic: keras.Model, judges: list[keras.Model]) -> None:
        super().__init__()
        self.teacher, self.critic, self.judges = teacher, critic, judges

    def on_train_begin(self, logs: dict | None = None) -> None:
        self.own = keras.models.clone_model(self.model)
        self.own.set_weights(self.model.get_weights())

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        for model in (self.teacher, self.own):
            for slow, fast in zip(model.weights, self.model.weights, strict=True):
                slow.assign(0.9 * slow + 0.1 * fast)
        self.critic.train_on_batch(X, Y)


def test_models_that_a_callback_trains(tmp_path: Path) -> None:
    def script(model: keras.Model, fit: Callable[..., Any]) -> list[Any]:
        teacher, critic, judge = (keras.models.clone_model(model) for _ in range(3))
        keeps = Teacher(teacher, ready(critic, "adam", "mse"), [judge])
        fit(X, Y, batch_size=4, callbacks=[keeps])
        return [weight.tolist() for one in (teacher, keeps.own, critic, judge) for weight in one.get_weights()]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = restarted(script, tmp_path, Death(15))
    assert found == start(script, None)
    entries = CheckpointStore(tmp_path, writer=False).newest().meta["callbacks"]
    saved = next(dict(entry["state"]["dict"]) for entry in entries if entry["class"] == "Teacher")
    assert {"teacher", "critic", "own"} <= set(saved)
    assert "judges" not in saved, "a model that stays as it was is not saved: it may be large"


def test_the_best_weights_of_a_bfloat16_model(tmp_path: Path) -> None:
    def narrow(layers: list) -> keras.Model:
        return keras.Sequential([layers[0], keras.layers.Dense(1, dtype="bfloat16")])

    def script(model: keras.Model, fit: Callable[..., Any]) -> int:
        early = keras.callbacks.EarlyStopping("loss", mode="max", patience=9, restore_best_weights=True)
        fit(X, Y, batch_size=4, callbacks=[early])
        return early.best_epoch

    found = restarted(script, tmp_path, Death(15), kind=narrow)
    assert found == start(script, None, kind=narrow)
    assert found["result"] == 0


class Augmented(Pieces):
    """Draws from a generator of its own, as tutorials do."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(5)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = super().__getitem__(index)
        return x + self.generator.normal(size=(4, 3)).astype("float32"), y


class ByLayers(Pieces):
    """Draws by layers of Keras."""

    def __init__(self) -> None:
        super().__init__()
        self.augment = keras.Sequential([keras.Input((3,)), keras.layers.GaussianNoise(0.5, seed=2)])

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = super().__getitem__(index)
        return np.asarray(self.augment(x, training=True)), y


class Flip:
    """One of the transformations of a package."""

    def __init__(self) -> None:
        self.generator = random.Random(4)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return x if self.generator.random() < 0.5 else -x


class ByObjects(Pieces):
    """Draws by objects that have generators."""

    def __init__(self) -> None:
        super().__init__()
        self.transformations = [Flip(), Flip()]

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = super().__getitem__(index)
        for transformation in self.transformations:
            x = transformation(x)
        return x, y


@pytest.mark.parametrize("kind", daily([Augmented, ByLayers, ByObjects], str(ByLayers)))
def test_a_dataset_with_a_generator_of_its_own(kind: Callable[[], Any], tmp_path: Path) -> None:
    """The backup draws nothing from it, and brings it back at the ends of epochs."""

    def script(model: keras.Model, fit: Callable[..., Any]) -> None:
        fit(kind())

    with pytest.warns(
        UserWarning, match=f"{kind.__name__}.__getitem__ draws from a generator that the dataset keeps; "
    ):
        found = restarted(script, tmp_path, Death(15))
    assert found == start(script, None)


def test_a_dataset_with_a_generator_of_the_script(tmp_path: Path) -> None:
    """It cannot be brought back: nothing is resumed within an epoch."""
    generator = np.random.default_rng(6)

    class OfTheScript(Pieces):
        def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
            x, y = super().__getitem__(index)
            return x + generator.normal(size=(4, 3)).astype("float32"), y

    def script(model: keras.Model, fit: Callable[..., Any]) -> None:
        fit(OfTheScript(), epochs=1)

    text = "saves at the ends of epochs only: OfTheScript.__getitem__ draws from a state to which no attribute leads; "
    assert len(warned(lambda: start(script, tmp_path), text)) == 1


class Tells(Pieces):
    """Knows how often it was read, and says so."""

    count = 0

    def on_epoch_end(self) -> None:
        self.count += 1

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = super().__getitem__(index)
        return x + self.count, y

    def get_state(self) -> int:
        return self.count


class Counted(Tells):
    """It can be told, too."""

    def set_state(self, state: int) -> None:
        self.count = state


def test_a_dataset_that_cannot_be_given_its_state(tmp_path: Path) -> None:
    text = "saves at the ends of epochs only: Tells changes in on_epoch_begin or on_epoch_end; give it get_state() and "
    assert len(warned(lambda: start(lambda model, fit: fit(Tells(), epochs=1), tmp_path), text)) == 1


class ByNumPy(Pieces):
    """Draws from NumPy's global state."""

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = super().__getitem__(index)
        return x + np.random.normal(size=(4, 3)).astype("float32"), y


@pytest.mark.parametrize("kind", daily([Augmented, Counted, ByNumPy], str(Augmented)))
def test_validation_data_with_a_state(kind: Callable[[], Any], tmp_path: Path) -> None:
    def script(model: keras.Model, fit: Callable[..., Any]) -> None:
        fit(X, Y, batch_size=4, validation_data=kind())

    assert restarted(script, tmp_path, Death(15)) == start(script, None)


class Slows:
    """A schedule that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int, rate: float) -> float:
        self.calls += 1
        return rate / self.calls


def test_an_argument_of_a_callback_that_changes(tmp_path: Path) -> None:
    def script(model: keras.Model, fit: Callable[..., Any]) -> None:
        fit(X, Y, callbacks=[keras.callbacks.LearningRateScheduler(Slows())])

    (text,) = warned(lambda: start(script, tmp_path), "not saved")
    assert text.startswith("LearningRateScheduler: not saved: schedule. After a kill the callback goes on without; ")


@pytest.mark.nightly
def test_a_validation_generator_is_told_of(tmp_path: Path) -> None:
    def rows() -> Any:
        while True:
            yield X, Y

    def script(model: keras.Model, fit: Callable[..., Any]) -> None:
        fit(X, Y, validation_data=rows(), validation_steps=1, epochs=2)

    words = "Received: validation data from a generator. After a kill it begins again, "
    assert len(warned(lambda: start(script, tmp_path), words)) == 1


def test_a_fit_within_a_fit_needs_a_folder_of_its_own(tmp_path: Path) -> None:
    def script(model: keras.Model, fit: Callable[..., Any]) -> None:
        other = ready(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]), "sgd", "mse")

        def probe(epoch: int, logs: dict) -> None:
            other.fit(X, Y, verbose=0, callbacks=[tfdist.callbacks.BackupAndRestore(tmp_path)])

        fit(X, Y, epochs=2, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=probe)])

    for _ in range(2):  # the failed one holds the folder no longer
        with pytest.raises(FolderInUseError, match="another fit of this process"):
            start(script, tmp_path)


def test_processes_of_a_callback_end_by_a_signal(tmp_path: Path) -> None:
    """A pool of processes, which are forked from within `fit`, waits until they do."""
    codes = []

    def forks(epoch: int, logs: dict) -> None:
        context = multiprocessing.get_context("fork")
        runs = context.Event()
        child = context.Process(target=lambda: (runs.set(), time.sleep(100)))
        child.start()
        # Python forgets a signal that comes before a fork has begun.
        assert runs.wait(60)
        child.terminate()
        child.join(60)
        codes.append(child.exitcode)
        child.kill()

    # That of the program; another test of this process may have set one.
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    start(
        lambda model, fit: fit(X, Y, epochs=1, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=forks)]), tmp_path
    )
    signal.signal(signal.SIGTERM, before)
    assert codes == [-signal.SIGTERM]
