"""State that models keep beside weights and metrics: brought together as variables say, or as well as it can be."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdist
from tests.features.reference import only_fit
from tests.features.table import batches, rows
from tests.logical.conftest import DEVICES
from tests.models import assert_arrays, in_scope, ready, warned
from tests.tiers import daily
from tfdist.inspection.model_state import parts_of_variable
from tfdist.testing import assert_transparent


class Keeping(keras.Model):
    """A model with one more variable, which its step updates after the optimizer, or its layers in the forward pass."""

    def __init__(self, shape: tuple, update: Callable, in_call: bool = False, **state: Any) -> None:
        super().__init__()
        self.out, self.update, self.in_call = layers.Dense(1, activation="sigmoid"), update, in_call
        self.kept = self.add_weight(shape=shape, name="kept", **{"initializer": "zeros", "trainable": False, **state})

    def call(self, x: Any, training: bool = False) -> Any:
        if self.in_call and training:
            self.update(self.kept, x)
        return self.out(x)

    def train_step(self, data: tuple) -> dict:
        logs = super().train_step(data)
        if not self.in_call:
            self.update(self.kept, data[0])
        return logs


def building(*arguments: Any, **options: Any) -> Callable[[], keras.Model]:
    return lambda: ready(Keeping(*arguments, **options), keras.optimizers.SGD(0.1), "binary_crossentropy")


def moving_mean(kept: keras.Variable, x: Any) -> None:
    kept.assign(0.9 * kept + ops.mean(x, 0) / 10)


def mean_of_a_sum(kept: keras.Variable, x: Any) -> None:
    kept.assign(0.9 * kept + 0.1 * ops.sum(x, 0) / ops.cast(tf.shape(x)[0], "float32"))


def running_total(kept: keras.Variable, x: Any) -> None:
    kept.assign_add(ops.sum(x, 0))


def queue(kept: keras.Variable, x: Any) -> None:
    kept.assign(ops.concatenate([x, kept], 0)[:12])


def gathered_queue(kept: keras.Variable, x: Any) -> None:
    queue(kept, tf.distribute.get_replica_context().all_gather(x, axis=0))


def whole_number(kept: keras.Variable, x: Any) -> None:
    kept.assign(kept + ops.cast(10 * ops.mean(x, 0), "int32"))


def read_after(kept: keras.Variable, x: Any) -> None:
    moving_mean(kept, x)
    tf.print(kept.value, output_stream="file:///dev/null")


def of_other_axes(kept: keras.Variable, x: Any) -> None:
    """Means over rows of what is made of each by itself."""
    first = ops.mean(ops.relu(x[:, :4]) * x[..., 4:], axis=0)
    second = tf.reduce_mean(ops.reshape(ops.stack([x[:, :4], x[:, 4:]], 1), (-1, 4)), 0)
    kept.assign(0.5 * kept + tf.concat([first, second], 0))


class Centre(layers.Layer):
    """Moves towards a mean, or another function, over all rows of its inputs."""

    def __init__(self, of_rows: Callable) -> None:
        super().__init__()
        self.of_rows = of_rows

    def build(self, shape: Any) -> None:
        self.kept = self.add_weight(shape=(), initializer="zeros", trainable=False, name="kept")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.kept.assign(0.9 * self.kept + 0.1 * self.of_rows(x))
        return x


# Loops over time and random numbers, of which a single operation does not tell that rows stay apart.
BY_ROW: dict[str, Callable[[], list]] = {
    "GRU": lambda: [layers.GRU(3, return_sequences=True)],
    "masked, both directions": lambda: [layers.Masking(), layers.Bidirectional(layers.LSTM(3))],
    "TimeDistributed": lambda: [layers.TimeDistributed(layers.Dense(3))],
    "BatchNormalization": lambda: [layers.Conv1D(3, 1), layers.BatchNormalization(), layers.Activation("relu")],
    "Dropout": lambda: [layers.Dropout(0.0), layers.GaussianNoise(0.0)],
}


def behind(make: Callable[[], list], of_rows: Callable) -> Callable[[], keras.Model]:
    parts = lambda: [keras.Input((4, 2)), *make(), Centre(of_rows), layers.Flatten(), layers.Dense(1)]  # noqa: E731
    return lambda: ready(keras.Sequential(parts()), keras.optimizers.SGD(0.1), "mse")


def trained(strategy: tf.distribute.Strategy, build: Callable) -> tuple[keras.Model, list[str]]:
    """A model that was trained twice, and what was warned of."""
    model = in_scope(strategy, build)
    return model, warned(lambda: [model.fit(batches(*rows(24), 8), verbose=0) for _ in range(2)], "Received: variable ")


def copies(model: keras.Model) -> list[np.ndarray]:
    return [part.numpy() for part in model.kept.value.values]


@pytest.mark.parametrize(
    ("update", "state"),
    daily(
        [
            pytest.param(moving_mean, {}, id="none"),
            pytest.param(moving_mean, {"trainable": True}, id="a weight"),
            pytest.param(moving_mean, {"aggregation": "mean", "in_call": True}, id="mean, in the forward pass"),
            pytest.param(of_other_axes, {}, id="of other axes"),
            pytest.param(mean_of_a_sum, {}, id="a sum over the number of rows"),
            pytest.param(running_total, {"aggregation": "sum", "in_call": True}, id="added to a sum"),
        ],
        "a weight",
        "added to a sum",
    ),
)
def test_equals_one_process_with_batches_that_do_not_divide(mirrored, update, state):
    """The last batch has one row: the second replica computes on a stand-in."""
    with warnings.catch_warnings(), only_fit():
        warnings.filterwarnings("error", message="Received: variable")
        assert_transparent(mirrored, building((8,), update, **state), rows(21), batch_size=4)


class Redraws(Keeping):
    """Keeps random numbers, of which each replica draws others."""

    def __init__(self, **state: Any) -> None:
        super().__init__((8,), self.redraw, **state)
        self.seeds = keras.random.SeedGenerator(3)

    def redraw(self, kept: keras.Variable, x: Any) -> None:
        kept.assign(0.5 * kept + keras.random.normal((8,), seed=self.seeds))


@pytest.mark.parametrize(
    "state",
    daily(
        [
            pytest.param({}, id="none"),
            pytest.param({"trainable": True}, id="a weight"),
            pytest.param({"aggregation": "only_first_replica"}, id="the first one's"),
        ],
        "none",
        "a weight",
    ),
)
def test_random_numbers_that_are_kept_are_those_of_one_process(mirrored, state):
    with warnings.catch_warnings(), only_fit():
        warnings.filterwarnings("error", message="Received: variable")
        assert_transparent(
            mirrored, lambda: ready(Redraws(**state), keras.optimizers.SGD(0.1), "mse"), rows(21), batch_size=8
        )


@pytest.mark.nightly
@pytest.mark.parametrize("name", BY_ROW)
def test_a_mean_behind_layers_that_keep_rows_apart_is_exact(mirrored, name):
    x, y = rows(21)
    with warnings.catch_warnings(), only_fit():
        warnings.filterwarnings("error", message="Received: variable")
        assert_transparent(mirrored, behind(BY_ROW[name], ops.mean), (x.reshape(-1, 4, 2), y), batch_size=4)


@pytest.mark.nightly
def test_a_maximum_behind_them_is_warned_of(mirrored):
    model = in_scope(mirrored, behind(BY_ROW["GRU"], ops.max))
    x, y = rows(8)
    (message,) = warned(lambda: model.fit(x.reshape(-1, 4, 2), y, batch_size=8, verbose=0), "Received: variable ")
    assert "linear in means over the rows" in message


def test_negative_control(mirrored, monkeypatch):
    monkeypatch.setattr("tfdist.strategies.data_parallel.state.ReplicaState.synchronize", lambda self: None)
    with pytest.raises(AssertionError, match=r"does not equal one process(.|\n)*kept"), only_fit():
        assert_transparent(mirrored, building((8,), moving_mean), rows(12), batch_size=4, epochs=1)


@pytest.mark.nightly
def test_the_first_replicas_value(mirrored):
    model, messages = trained(mirrored, building((12, 8), queue, aggregation="only_first_replica"))
    first, second = copies(model)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first[:4], rows(24)[0][16:20])
    assert not messages


@pytest.mark.parametrize(
    ("update", "shape", "state"),
    [(queue, (12, 8), {}), (whole_number, (8,), {"dtype": "int32"}), *daily([(running_total, (8,), {})])],
)
def test_what_cannot_equal_one_process_is_warned_of_once(mirrored, update, shape, state):
    model, (message,) = trained(mirrored, building(shape, update, **state))
    assert message.startswith(f"Received: variable '{model.kept.path}', which each replica updates from its own rows")
    assert "not for queues of rows" in message
    assert "all_gather" in message
    np.testing.assert_array_equal(*copies(model))


def test_what_is_read_in_the_same_step_is_warned_of(mirrored):
    _, (message,) = trained(mirrored, building((8,), read_after))
    assert "but in the same step each replica has read its own" in message


def test_rows_of_all_replicas(mirrored):
    model, messages = trained(mirrored, building((12, 8), gathered_queue))
    assert not messages
    np.testing.assert_array_equal(*copies(model))
    expected = rows(24)[0][[*range(16, 24), *range(8, 12)]]
    np.testing.assert_array_equal(copies(model)[0], expected)


def test_a_variable_of_tensorflow(mirrored):
    class Plain(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.out = layers.Dense(1)
            self.centre = [tf.Variable(tf.zeros(8), trainable=False, name="centre")]

        def call(self, x: Any) -> Any:
            return self.out(x)

        def train_step(self, data: tuple) -> dict:
            logs = super().train_step(data)
            self.centre[0].assign(tf.reduce_mean(data[0], 0))
            return logs

    model = in_scope(mirrored, lambda: ready(Plain(), "sgd", "mse"))
    model.fit(batches(*rows(24), 8), verbose=0)
    for part in model.centre[0].values:
        np.testing.assert_allclose(part, rows(24)[0][16:].mean(0), atol=1e-6)


def test_a_weight_that_is_assigned_in_a_branch(mirrored):
    """As in initialization that depends on the first batch."""

    def in_branch(kept: keras.Variable, x: Any) -> None:
        tf.cond(tf.reduce_sum(kept) == 0, lambda: kept.assign(ops.mean(x, 0)), lambda: kept.value + 0)

    model, _ = trained(mirrored, building((8,), in_branch, trainable=True))
    for copy in copies(model):
        np.testing.assert_allclose(copy, rows(24)[0][:8].mean(0), atol=1e-6)


def test_a_sum_in_a_branch_is_refused(mirrored):
    def in_branch(kept: keras.Variable, x: Any) -> None:
        tf.cond(x[0, 0] > 0, lambda: kept.assign_add(ops.sum(x, 0)), lambda: kept.value + 0)

    with pytest.raises(
        NotImplementedError, match=r"with aggregation='sum', assigned in a branch, a loop or a function"
    ):
        trained(mirrored, building((8,), in_branch, aggregation="sum"))


def test_a_sum_in_a_block_that_is_recomputed_is_refused(mirrored):
    class Counted(layers.Layer):
        def build(self, shape: tuple) -> None:
            self.kept = self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation="sum", name="kept")

        def call(self, x: Any, training: bool = False) -> Any:
            self.kept.assign_add(ops.sum(x))
            return x

    def build() -> keras.Model:
        hidden = [layers.Dense(4, "relu") for _ in range(3)]
        return ready(keras.Sequential([keras.Input((8,)), Counted(), *hidden, layers.Dense(1)]), "sgd", "mse")

    strategy = tfdist.MirroredStrategy(list(mirrored.extended.worker_devices), memory="recompute")
    with pytest.raises(NotImplementedError, match=r"kept' with aggregation='sum', to which a layer adds that a memory"):
        trained(strategy, build)


class Notes:
    """An object of the user's own, which is no layer."""


class KeepsCodes(keras.Model):
    """Keeps tensors on `self` or elsewhere for its loss; between them, replicas meet in BatchNormalization."""

    def __init__(self, notes: Any = None) -> None:
        super().__init__()
        self.hidden = [layers.Dense(6, "tanh"), layers.Dense(6, "tanh")]
        self.norms = [layers.BatchNormalization(), layers.BatchNormalization()]
        self.out, self.code, self.codes, self.total = layers.Dense(1), None, [], 0.0
        self.notes = {"those": notes}

    def call(self, x: Any, training: bool = False) -> Any:
        kept = self.notes["those"] or self
        kept.codes, kept.total = [], 0.0
        for hidden, norm in zip(self.hidden, self.norms, strict=True):
            x = kept.code = hidden(x)
            kept.codes.append(x)
            kept.total = kept.total + ops.mean(x**2)
            x = norm(x, training=training)
        return self.out(x)

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *args: Any, **kwargs: Any) -> Any:
        kept = self.notes["those"] or self
        penalties = 0.3 * ops.mean(ops.abs(kept.codes[0])) + 0.2 * ops.mean(kept.code**2) + 0.1 * kept.total
        return super().compute_loss(x, y, y_pred, *args, **kwargs) + penalties


@pytest.mark.usefixtures("four_devices")
@pytest.mark.parametrize(
    "notes", daily([pytest.param(lambda: None, id="on self"), pytest.param(Notes, id="elsewhere")], "elsewhere")
)
@pytest.mark.parametrize("eagerly", daily([pytest.param(False, id="graph"), pytest.param(True, id="eager")], "graph"))
@pytest.mark.parametrize(
    "strategy",
    daily(
        [
            pytest.param(lambda: tfdist.MirroredStrategy(DEVICES), id="mirrored"),
            pytest.param(tfdist.FullyShardedStrategy, id="parts of weights"),
        ],
        "mirrored",
    ),
)
def test_what_call_keeps_on_self_is_of_each_replica(strategy, eagerly, notes):
    with only_fit():
        assert_transparent(
            strategy,
            lambda: ready(KeepsCodes(notes()), keras.optimizers.SGD(0.1), "mse", run_eagerly=eagerly),
            rows(23),
            batch_size=9,
            epochs=1,
        )


class Counts:
    """Counts its steps, doubles the loss of every second one, and keeps all losses."""

    steps = 0

    def train_step(self, data: Any) -> dict:
        x, y, *_ = data
        self.steps += 1
        factor = 2.0 if self.steps % 2 == 0 else 1.0
        with tf.GradientTape() as tape:
            loss = factor * self.compute_loss(x, y, self.predicted(x))
            scaled = self.optimizer.scale_loss(loss)
        self.last = loss
        self.notes.steps += 1
        self.kept.append({"loss": loss})
        self.optimizer.apply(tape.gradient(scaled, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


class CountsOnSelf(Counts, keras.Sequential):
    def predicted(self, x: Any) -> Any:
        return self(x, training=True)


class CountsWithoutCall(Counts, keras.Model):
    """As many GANs are written: its step has to be traced before, to build it."""

    def __init__(self, parts: list) -> None:
        super().__init__()
        self.parts = parts[1:]

    def predicted(self, x: Any) -> Any:
        first, norm, last = self.parts
        return last(norm(first(x), training=True))


@pytest.mark.parametrize("kind", [CountsOnSelf, CountsWithoutCall])
def test_an_eager_step_counts_once(mirrored, kind):
    """Not once for each replica; and what it keeps are numbers, not those of a trial."""

    def train(strategy: tf.distribute.Strategy) -> tuple[list[np.ndarray], keras.Model]:
        keras.utils.set_random_seed(1)
        hidden = [layers.Dense(4, "tanh"), layers.BatchNormalization(), layers.Dense(1)]
        with strategy.scope():
            model = kind([keras.Input((8,)), *hidden])
            model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
        model.kept, model.notes = [], Notes()
        model.notes.steps = 0
        x, y = rows(21)
        model.train_on_batch(x[:8], y[:8])
        assert np.isfinite(float(model.last))
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        return model.get_weights(), model

    expected, _ = train(tf.distribute.get_strategy())
    found, model = train(mirrored)
    assert_arrays(found, expected, 1e-5)
    assert model.steps == model.notes.steps == len(model.kept) == 4
    assert all(np.isfinite(float(one["loss"])) for one in model.kept)


class CentredError(keras.losses.Loss):
    """A loss that keeps a moving mean of the targets."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = keras.Variable(0.0, trainable=False)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        self.centre.assign(0.5 * self.centre + 0.5 * ops.mean(y_true))
        return ops.mean((y_true - y_pred) ** 2, -1)


class Scaler(tf.Module):
    """What TensorFlow calls a module: Keras does not see its variables."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = tf.Variable(tf.zeros(8), trainable=False)

    def note(self, x: Any) -> None:
        self.mean.assign(0.5 * self.mean + 0.5 * tf.reduce_mean(x, 0))


class UsesOthers(keras.Model):
    """Its state is that of objects which are no layers; one of them has a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = layers.Dense(4, "tanh"), layers.Dense(1)
        self.scaler, self.others = Scaler(), Notes()
        self.others.norm = layers.BatchNormalization()
        self.others.norm.build((None, 4))
        self.others.error = keras.metrics.RootMeanSquaredError()

    def call(self, x: Any, training: bool = False) -> Any:
        return self.out(self.others.norm(self.hidden(x), training=training))

    def train_step(self, data: Any) -> dict:
        logs = super().train_step(data)
        self.scaler.note(data[0])
        self.others.error.update_state(data[1], self(data[0]))
        return {"loss": logs["loss"], "error": self.others.error.result()}


@pytest.mark.parametrize("eagerly", [pytest.param(False, id="graph"), pytest.param(True, id="eager")])
def test_state_of_objects_that_are_no_layers(mirrored, eagerly):
    def train(strategy: tf.distribute.Strategy) -> tuple[dict, list[list[np.ndarray]]]:
        keras.utils.set_random_seed(1)
        with strategy.scope():
            loss = CentredError()
            model = ready(UsesOthers(), keras.optimizers.SGD(0.1), loss, run_eagerly=eagerly)
        history = model.fit(*rows(21), batch_size=4, shuffle=False, verbose=0).history
        others = [loss.centre, model.scaler.mean, *model.others.norm.non_trainable_variables]
        variables = [*model.trainable_variables, *others]
        return history, [[np.asarray(part) for part in parts_of_variable(variable)] for variable in variables]

    history, expected = train(tf.distribute.get_strategy())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Received: variable")
        logs, found = train(mirrored)
    assert logs["error"] == pytest.approx(history["error"], abs=1e-5)
    for parts, (own,) in zip(found, expected, strict=True):
        assert_arrays(parts, [own] * 2, 1e-5)


class RatesOfLosses(keras.Sequential):
    """Sets the learning rate by the loss."""

    def train_step(self, data: Any) -> dict:
        x, y = data
        self.optimizer.learning_rate.assign(0.01 + 0.1 * self.compute_loss(x, y, self(x)))
        return super().train_step(data)


@pytest.mark.parametrize("eagerly", daily([pytest.param(False, id="graph"), pytest.param(True, id="eager")], "graph"))
def test_a_learning_rate_that_a_step_sets(mirrored, eagerly):
    parts = lambda: [keras.Input((8,)), layers.Dense(4, "tanh"), layers.Dense(1)]  # noqa: E731
    with only_fit():
        assert_transparent(
            mirrored,
            lambda: ready(RatesOfLosses(parts()), keras.optimizers.SGD(0.1), "mse", run_eagerly=eagerly),
            rows(21),
            batch_size=8,
        )


RIGHT = {
    "float": lambda right, received, x: tf.reduce_sum(tf.cast(right, tf.float32)),
    "whole": lambda right, received, x: tf.reduce_sum(tf.cast(right, tf.int32)),
    "cast": lambda right, received, x: tf.cast(tf.reduce_sum(tf.cast(right, tf.int32)), tf.float32),
    "keras": lambda right, received, x: ops.sum(ops.cast(ops.argmax(received, -1) == 0, "float32")),
    "rows": lambda right, received, x: tf.cast(tf.shape(x)[0], tf.float32),
    "squares": lambda right, received, x: tf.reduce_sum(received**2),
    "mean": lambda right, received, x: tf.reduce_mean(received**2),
    "each": lambda right, received, x: tf.cast(right, tf.float32),
    "steps": lambda right, received, x: 1.0,
}


class CountsRight(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)
        self.sums = {name: keras.metrics.Sum(name=name) for name in RIGHT}

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            received = self(x, training=True)
            loss = tf.reduce_mean(received**2)
        weights = self.dense.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        right = tf.argmax(received, -1) == 0
        for name, value in RIGHT.items():
            self.sums[name].update_state(value(right, received, x))
        return {name: metric.result() for name, metric in self.sums.items()}


@pytest.mark.nightly
def test_sums_that_a_step_counts(mirrored):
    with only_fit():
        gaps = assert_transparent(
            mirrored, lambda: ready(CountsRight(), "sgd"), rows(27), batch_size=8, epochs=1, tolerance=1e-3
        )
    assert sum(name.startswith("history") for name in gaps) == len(RIGHT)
