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
    def build() -> keras.Model:
        compiling = {"run_eagerly": options.pop("run_eagerly", False)}
        model = Keeping(*arguments, **options)
        model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", **compiling)
        return model

    return build


def moving_mean(kept: keras.Variable, x: Any) -> None:
    kept.assign(0.9 * kept + ops.mean(x, 0) / 10)


def running_total(kept: keras.Variable, x: Any) -> None:
    kept.assign_add(ops.sum(x, 0))


def total_of_batch(kept: keras.Variable, x: Any) -> None:
    kept.assign(ops.sum(x, 0))


def mean_in_two_steps(kept: keras.Variable, x: Any) -> None:
    kept.assign(0.9 * kept)
    kept.assign_add((ops.mean(x, axis=0) + kept) / 10)


def queue(kept: keras.Variable, x: Any) -> None:
    kept.assign(ops.concatenate([x, kept], 0)[:12])


def gathered_queue(kept: keras.Variable, x: Any) -> None:
    queue(kept, tf.distribute.get_replica_context().all_gather(x, axis=0))


def largest(kept: keras.Variable, x: Any) -> None:
    kept.assign(ops.maximum(kept, ops.max(x, 0)))


def variance(kept: keras.Variable, x: Any) -> None:
    kept.assign(0.9 * kept + 0.1 * ops.mean(ops.square(x - ops.mean(x, 0)), 0))


def read_after(kept: keras.Variable, x: Any) -> None:
    moving_mean(kept, x)
    tf.print(kept.value, output_stream="file:///dev/null")


def of_first_row(kept: keras.Variable, x: Any) -> None:
    kept.assign(ops.mean(x[:1], 0))


def of_softmax_over_rows(kept: keras.Variable, x: Any) -> None:
    kept.assign(ops.mean(tf.nn.softmax(x, axis=0), 0))


def of_other_axes(kept: keras.Variable, x: Any) -> None:
    """Means over rows of what is made of each by itself."""
    first = ops.mean(ops.relu(x[:, :4]) * x[..., 4:], axis=0)
    second = tf.reduce_mean(ops.reshape(ops.stack([x[:, :4], x[:, 4:]], 1), (-1, 4)), 0)
    kept.assign(0.5 * kept + tf.concat([first, second], 0))


def positives(kept: keras.Variable, x: Any) -> None:
    kept.assign(kept + ops.sum(ops.cast(x[:, 0] > 0, "int32")))


def last_rows(kept: keras.Variable, x: Any) -> None:
    kept.assign(ops.cast(tf.shape(x)[0] + ops.cast(x[0, 0] > 99, "int32"), kept.dtype))


def warned(strategy: tf.distribute.Strategy, build: Callable, data: Any = None) -> tuple[keras.Model, list[str]]:
    """A model that was trained twice, and what was warned of."""
    with strategy.scope():
        model = build()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            model.fit(data if data is not None else batches(*rows(24), 8), verbose=0)
    return model, [str(w.message) for w in found if str(w.message).startswith("Received: variable ")]


def copies(model: keras.Model) -> list[np.ndarray]:
    return [part.numpy() for part in model.kept.value.values]


@pytest.mark.parametrize("in_call", [False, True], ids=["after the optimizer", "in the forward pass"])
@pytest.mark.parametrize(
    ("update", "state"),
    [
        pytest.param(moving_mean, {}, id="none", marks=pytest.mark.exhaustive),
        pytest.param(mean_in_two_steps, {}, id="two writes", marks=pytest.mark.exhaustive),
        pytest.param(of_other_axes, {}, id="of other axes", marks=pytest.mark.exhaustive),
        pytest.param(moving_mean, {"aggregation": "mean"}, id="mean", marks=pytest.mark.exhaustive),
        pytest.param(running_total, {"aggregation": "sum"}, id="added to a sum"),
        pytest.param(total_of_batch, {"aggregation": "sum"}, id="assigned to a sum", marks=pytest.mark.exhaustive),
    ],
)
def test_equals_one_process_with_batches_that_do_not_divide(mirrored, update, state, in_call):
    """The last batch has one row: the second replica computes on a stand-in."""
    build = building((8,), update, in_call, **state)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Received: variable")
        assert_transparent(mirrored, build, rows(21), batch_size=4)


def test_a_weight_that_is_assigned_a_mean(mirrored):
    build = building((8,), moving_mean, trainable=True)
    assert_transparent(mirrored, build, rows(21), batch_size=4)


def test_a_weight_that_is_assigned_what_is_no_mean(mirrored):
    model, (message,) = warned(mirrored, building((8,), largest, trainable=True))
    assert "not for queues of rows, counts or maxima" in message
    np.testing.assert_array_equal(*copies(model))


@pytest.mark.parametrize(
    "state", [{}, pytest.param({"aggregation": "mean"}, marks=pytest.mark.exhaustive)], ids=["none", "mean"]
)
def test_equals_one_process_eagerly(mirrored, state):
    build = building((8,), moving_mean, **state)

    def eager() -> keras.Model:
        model = build()
        model.run_eagerly = True
        return model

    assert_transparent(mirrored, eager, rows(12), batch_size=4, epochs=1)


@pytest.mark.exhaustive
def test_whole_numbers_eagerly(mirrored):
    build = building((), positives, dtype="int32")

    def eager() -> keras.Model:
        model = build()
        model.run_eagerly = True
        return model

    model, _ = warned(mirrored, eager)
    assert copies(model)[0] == copies(model)[1] > 0


def test_negative_control(mirrored, monkeypatch):
    monkeypatch.setattr("tfdist.steps.layer_state.ReplicaState.bring_together", lambda self: None)
    with pytest.raises(AssertionError, match=r"does not equal one process(.|\n)*kept"):
        assert_transparent(mirrored, building((8,), moving_mean), rows(12), batch_size=4, epochs=1)


@pytest.mark.exhaustive
def test_the_first_replicas_value(mirrored):
    model, messages = warned(mirrored, building((12, 8), queue, aggregation="only_first_replica"))
    first, second = copies(model)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first[:4], rows(24)[0][16:20])
    assert not messages


@pytest.mark.parametrize(
    ("shape", "update"),
    [
        ((12, 8), queue),
        *(pytest.param((8,), update, marks=pytest.mark.exhaustive) for update in (running_total, largest, variance)),
    ],
)
def test_what_cannot_equal_one_process_is_warned_of_once(mirrored, shape, update):
    model, (message,) = warned(mirrored, building(shape, update))
    assert message.startswith(f"Received: variable '{model.kept.path}', which each replica updates from its own rows")
    assert "not for queues of rows" in message
    assert "all_gather" in message
    np.testing.assert_array_equal(*copies(model))


def test_what_is_read_in_the_same_step_is_warned_of(mirrored):
    _, (message,) = warned(mirrored, building((8,), read_after))
    assert "but in the same step each replica has read its own" in message


@pytest.mark.exhaustive
def test_numbers_that_are_whole_stay_so(mirrored):
    data = batches(*rows(23), 8)
    model, (message,) = warned(mirrored, building((), last_rows, dtype="int32"), data)
    assert "The first replica's value is kept at the end of the step" in message
    assert [int(copy) for copy in copies(model)] == [4, 4]


def test_rows_of_all_replicas(mirrored):
    model, messages = warned(mirrored, building((12, 8), gathered_queue))
    assert not messages
    np.testing.assert_array_equal(*copies(model))
    expected = rows(24)[0][[*range(16, 24), *range(8, 12)]]
    np.testing.assert_array_equal(copies(model)[0], expected)


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("eager", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_variable_of_tensorflow(mirrored, trainable, eager):
    class Plain(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.out = layers.Dense(1)
            self.centre = [tf.Variable(tf.zeros(8), trainable=trainable, name="centre")]

        def call(self, x: Any) -> Any:
            return self.out(x)

        def train_step(self, data: tuple) -> dict:
            logs = super().train_step(data)
            self.centre[0].assign(tf.reduce_mean(data[0], 0))
            return logs

    with mirrored.scope():
        model = Plain()
        model.compile("sgd", "mse", run_eagerly=eager)
    model.fit(batches(*rows(24), 8), verbose=0)
    for part in model.centre[0].values:
        np.testing.assert_allclose(part, rows(24)[0][16:].mean(0), atol=1e-6)


class Teacher(keras.Model):
    """What follows the student, and how closely, depends on the optimizer's counter."""

    def __init__(self, follows: bool) -> None:
        super().__init__()
        self.follows = follows
        self.student, self.teacher = layers.Dense(50), layers.Dense(50, trainable=False)

    def call(self, x: Any) -> Any:
        return self.student(x) + ops.stop_gradient(self.teacher(x))

    def train_step(self, data: tuple) -> dict:
        logs = super().train_step(data)
        if self.follows:
            near = 1 - 1 / (1 + ops.cast(self.optimizer.iterations, "float32"))
            for slow, fast in zip(self.teacher.weights, self.student.weights, strict=True):
                slow.assign(near * slow + (1 - near) * fast)
        return logs


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("sharded", marks=pytest.mark.exhaustive)])
def test_what_replicas_compute_alike_is_not_sent(mirrored, optimizer):
    """A momentum encoder is as large as what it follows."""
    sent = []
    for follows in (False, True):

        def build(follows: bool = follows) -> keras.Model:
            model = Teacher(follows)
            own = tfdist.ShardedOptimizer(keras.optimizers.Adam()) if optimizer == "sharded" else optimizer
            model.compile(own, "mse")
            model.kept = model.teacher
            return model

        model, messages = warned(mirrored, build)
        assert not messages
        for variable in model.teacher.weights:
            np.testing.assert_array_equal(*(part.numpy() for part in variable.value.values))
        sent.append(mirrored._sums_of_step[model])
    assert sent[0] == sent[1]


def test_a_weight_that_is_assigned_in_a_branch(mirrored):
    """As in initialization that depends on the first batch."""

    def in_branch(kept: keras.Variable, x: Any) -> None:
        tf.cond(tf.reduce_sum(kept) == 0, lambda: kept.assign(ops.mean(x, 0)), lambda: kept.value + 0)

    model, _ = warned(mirrored, building((8,), in_branch, trainable=True))
    for copy in copies(model):
        np.testing.assert_allclose(copy, rows(24)[0][:8].mean(0), atol=1e-6)


@pytest.mark.exhaustive
def test_what_was_read_before_the_average(mirrored):
    class Early(Keeping):
        def __init__(self) -> None:
            super().__init__((8,), moving_mean)
            self.copied = self.add_weight(shape=(8,), trainable=False, name="copied")

        def train_step(self, data: tuple) -> dict:
            moving_mean(self.kept, data[0])
            early = tf.identity(self.kept.value)
            logs = keras.Model.train_step(self, data)
            self.copied.assign(early)
            return logs

    def build() -> keras.Model:
        model = Early()
        model.compile("sgd", "mse")
        return model

    model, _ = warned(mirrored, build)
    np.testing.assert_array_equal(*(part.numpy() for part in model.copied.value.values))


@pytest.mark.parametrize("aggregation", [pytest.param("none", marks=pytest.mark.exhaustive), "sum"])
def test_what_is_only_read_in_a_function(mirrored, aggregation):
    def reading(kept: keras.Variable, x: Any) -> None:
        tf.function(lambda y: tf.reduce_sum(y * kept.value))(x)
        tf.map_fn(lambda row: tf.reduce_sum(row * kept.value), x)

    _, messages = warned(mirrored, building((8,), reading, in_call=True, aggregation=aggregation))
    assert not messages


class OwnNormalization(layers.BatchNormalization):
    """One of a user's own, of Keras' class."""


@pytest.mark.parametrize(
    ("layer", "memory"),
    [
        pytest.param(OwnNormalization, None, marks=pytest.mark.exhaustive),
        # What was made first then reads what was made later.
        (layers.BatchNormalization, "recompute"),
    ],
)
def test_statistics_of_a_replicas_own_rows(mirrored, layer, memory):
    """Keras' own layers need no `aggregation`."""
    devices = list(mirrored.extended.worker_devices)
    strategy = tfdist.MirroredStrategy(devices, batch_norm="local", memory=memory)

    def build() -> keras.Model:
        hidden = [layers.Dense(4, "relu") for _ in range(3)]
        model = keras.Sequential([keras.Input((8,)), layer(), *hidden, layers.Dense(1)])
        model.compile("sgd", "mse")
        model.kept = model.layers[0].moving_mean
        return model

    model, messages = warned(strategy, build)
    assert not messages
    np.testing.assert_array_equal(*copies(model))


def test_a_sum_in_a_branch_is_refused(mirrored):
    def in_branch(kept: keras.Variable, x: Any) -> None:
        tf.cond(x[0, 0] > 0, lambda: kept.assign_add(ops.sum(x, 0)), lambda: kept.value + 0)

    with pytest.raises(
        NotImplementedError, match=r"with aggregation='sum', assigned in a branch, a loop or a function"
    ):
        warned(mirrored, building((8,), in_branch, aggregation="sum"))


def test_a_sum_in_a_block_that_is_recomputed_is_refused(mirrored):
    class Counted(layers.Layer):
        def build(self, shape: tuple) -> None:
            self.kept = self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation="sum", name="kept")

        def call(self, x: Any, training: bool = False) -> Any:
            self.kept.assign_add(ops.sum(x))
            return x

    def build() -> keras.Model:
        hidden = [layers.Dense(4, "relu") for _ in range(3)]
        model = keras.Sequential([keras.Input((8,)), Counted(), *hidden, layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    strategy = tfdist.MirroredStrategy(list(mirrored.extended.worker_devices), memory="recompute")
    with pytest.raises(NotImplementedError, match=r"kept' with aggregation='sum', to which a layer adds that a memory"):
        warned(strategy, build)


def test_a_mean_that_is_computed_on_another_replicas_device(mirrored):
    def elsewhere(kept: keras.Variable, x: Any) -> None:
        with tf.device(mirrored.extended.worker_devices[0]):
            mean = tf.reduce_mean(x, 0)
        kept.assign(mean)

    model, messages = warned(mirrored, building((8,), elsewhere))
    assert not messages
    for copy in copies(model):
        np.testing.assert_allclose(copy, rows(24)[0][16:].mean(0), atol=1e-6)


@pytest.mark.exhaustive
def test_what_one_replica_assigns_eagerly(mirrored):
    """Replicas meet, although one has nothing to say; what it had before then counts as much, in both fits."""

    def sometimes(kept: keras.Variable, x: Any) -> None:
        if float(x[0, 0]) == rows(24)[0][0, 0]:
            kept.assign(ops.mean(x, 0))

    model, _ = warned(mirrored, building((8,), sometimes, run_eagerly=True))
    for copy in copies(model):
        np.testing.assert_allclose(copy, 0.75 * rows(24)[0][:4].mean(0), atol=1e-6)


@pytest.mark.parametrize("kind", ["branch", pytest.param("function", marks=pytest.mark.exhaustive)])
def test_random_numbers_of_called_functions_are_a_replicas_own(mirrored, kind):
    def redrawn(kept: keras.Variable, x: Any) -> None:
        if kind == "branch":
            tf.cond(kept[0] > -99, lambda: kept.assign(tf.random.normal((8,))), lambda: kept.value + 0)
        else:
            kept.assign(tf.function(lambda: tf.random.normal((8,)))())

    model, (_,) = warned(mirrored, building((8,), redrawn))
    np.testing.assert_array_equal(*copies(model))


def test_a_sum_over_the_number_of_rows_is_a_mean(mirrored):
    def centre(kept: keras.Variable, x: Any) -> None:
        kept.assign(0.9 * kept + 0.1 * ops.sum(x, 0) / ops.cast(tf.shape(x)[0], "float32"))

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Received: variable")
        assert_transparent(mirrored, building((8,), centre), rows(21), batch_size=4)


@pytest.mark.exhaustive
def test_a_table_beside_a_constraint_is_not_sent_again(mirrored):
    """The gradients of a table are rows of it; weights with constraints are assigned by the optimizer."""

    class Table(layers.Layer):
        def build(self, shape: tuple) -> None:
            self.table = self.add_weight(shape=(10, 3), name="table")

        def call(self, x: Any) -> Any:
            return ops.mean(tf.gather(self.table.value, ops.cast(ops.abs(x), "int32")), 1)

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((8,)), Table(), layers.Dense(1, kernel_constraint="non_neg")])
        model.compile("sgd", "mse")
        return model

    model, messages = warned(mirrored, build)
    assert not messages
    _, *others = mirrored._sums_of_step[model]
    assert others == [None]


def test_a_mean_in_a_branch(mirrored):
    def in_branch(kept: keras.Variable, x: Any) -> None:
        tf.cond(x[0, 0] > -99, lambda: kept.assign(ops.mean(x, 0)), lambda: kept.value + 0)

    model, _ = warned(mirrored, building((8,), in_branch, aggregation="mean"))
    for copy in copies(model):
        np.testing.assert_allclose(copy, rows(24)[0][16:].mean(0), atol=1e-6)


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


def test_sums_that_a_step_counts(mirrored):
    def build() -> keras.Model:
        model = Counts()
        model.compile("sgd")
        return model

    with only_fit():
        gaps = assert_transparent(mirrored, build, rows(27), batch_size=8, epochs=1, tolerance=1e-3)
    assert sum(name.startswith("history") for name in gaps) == len(RIGHT)
