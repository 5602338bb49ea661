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
from tests.models import in_scope, ready, warned
from tests.tiers import daily
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


@pytest.mark.nightly
@pytest.mark.parametrize("name", BY_ROW)
def test_a_mean_behind_layers_that_keep_rows_apart_is_exact(mirrored, name):
    x, y = rows(21)
    with warnings.catch_warnings(), only_fit():
        warnings.filterwarnings("error", message="Received: variable")
        assert_transparent(mirrored, behind(BY_ROW[name], ops.mean), (x.reshape(-1, 4, 2), y), batch_size=4)


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


@pytest.mark.parametrize(("update", "shape"), [(queue, (12, 8)), *daily([(running_total, (8,))])])
def test_what_cannot_equal_one_process_is_warned_of_once(mirrored, update, shape):
    model, (message,) = trained(mirrored, building(shape, update))
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


class KeepsCodes(keras.Model):
    """Keeps tensors on `self`, which its loss reads; between them, replicas meet in BatchNormalization."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [layers.Dense(6, "tanh"), layers.Dense(6, "tanh")]
        self.norms = [layers.BatchNormalization(), layers.BatchNormalization()]
        self.out, self.code, self.codes, self.total = layers.Dense(1), None, [], 0.0

    def call(self, x: Any, training: bool = False) -> Any:
        self.codes, self.total = [], 0.0
        for hidden, norm in zip(self.hidden, self.norms, strict=True):
            x = self.code = hidden(x)
            self.codes.append(x)
            self.total = self.total + ops.mean(x**2)
            x = norm(x, training=training)
        return self.out(x)

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *args: Any, **kwargs: Any) -> Any:
        penalties = 0.3 * ops.mean(ops.abs(self.codes[0])) + 0.2 * ops.mean(self.code**2) + 0.1 * self.total
        return super().compute_loss(x, y, y_pred, *args, **kwargs) + penalties


@pytest.mark.usefixtures("four_devices")
@pytest.mark.parametrize("eagerly", [pytest.param(False, id="graph"), pytest.param(True, id="eager")])
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
def test_what_call_keeps_on_self_is_of_each_replica(strategy, eagerly):
    with only_fit():
        assert_transparent(
            strategy,
            lambda: ready(KeepsCodes(), keras.optimizers.SGD(0.1), "mse", run_eagerly=eagerly),
            rows(23),
            batch_size=9,
            epochs=1,
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


class Counts(keras.Model):
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
            mirrored, lambda: ready(Counts(), "sgd"), rows(27), batch_size=8, epochs=1, tolerance=1e-3
        )
    assert sum(name.startswith("history") for name in gaps) == len(RIGHT)
