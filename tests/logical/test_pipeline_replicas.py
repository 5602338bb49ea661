"""Several pipelines side by side: one set of weights, each pipeline with its part of every batch."""

from __future__ import annotations

from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.features import reference
from tfdist.strategies.pipeline import replicas
from tfdist.testing import assert_transparent

pytestmark = pytest.mark.usefixtures("four_devices")

DEVICES = [["CPU:0", "CPU:1"], ["CPU:2", "CPU:3"]]
RNG = np.random.default_rng(3)
X = RNG.normal(size=(37, 8)).astype("float32")
Y = RNG.normal(size=(37, 3)).astype("float32")


def build() -> keras.Model:
    inputs = keras.Input((8,))
    first = layers.Dense(8, activation="relu", kernel_regularizer="l2")(inputs)
    second = layers.Dense(8, activation="tanh", activity_regularizer="l2")(first)
    shared = layers.Dense(8)
    third = shared(layers.Add()([first, shared(second)]))
    model = keras.Model(inputs, layers.Dense(3)(third))
    model.compile(keras.optimizers.AdamW(0.01, global_clipnorm=0.5), "mse", metrics=["mae"])
    return model


class Pairwise(keras.Model):
    """Compares each row with each other one: the loss needs the whole batch."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            loss = tf.reduce_mean((p - y) ** 2) + tf.reduce_mean((p[:, None] - p[None]) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def build_pairwise() -> keras.Model:
    inputs = keras.Input((8,))
    hidden = layers.Dense(8, activation="relu")(layers.Dense(8, activation="relu")(inputs))
    model = Pairwise(inputs, layers.Dense(3)(hidden))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def assert_equals_one_device(strategy: tfdist.PipelineStrategy) -> None:
    """The last of the batches of 16 has 5 rows, for 4 micro-batches."""
    with reference.remembered("pipelines side by side", reference.folder()):
        assert_transparent(strategy, build, (X, Y), batch_size=16)


@pytest.mark.exhaustive
def test_each_pipeline_computes_on_its_own_devices() -> None:
    strategy = tfdist.PipelineStrategy(DEVICES, num_microbatches=2)
    with strategy.scope():
        model = build()
    model.fit(X, Y, batch_size=16, verbose=0)
    # Variables and slots exist once.
    devices = {v.value.device[-5:] for v in (*model.variables, *model.optimizer.variables)}
    assert devices == {"CPU:0", "CPU:1"}
    assert len(model.optimizer.variables) == 2 + 2 * len(model.trainable_variables)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> dict:
        return strategy.run(model.train_step, args=((x, y),))

    graph = step.get_concrete_function(tf.constant(X[:16]), tf.constant(Y[:16])).graph.as_graph_def()
    called = [(node.attr["f"].func.name, node.device) for node in graph.node if node.op == "PartitionedCall"]
    bodies = {f.signature.name: {node.device for node in f.node_def} for f in graph.library.function}
    # What has no device runs where it is called.
    used = Counter(device[-5:] for name, device in called if bodies[name] == {""})
    # A forward and a backward pass for each of two micro-batches, and the loss on the last stage.
    assert used == {"CPU:0": 4, "CPU:1": 6, "CPU:2": 4, "CPU:3": 6}


@pytest.mark.parametrize(
    ("schedule", "memory"),
    [
        ("auto", "recompute"),
        pytest.param("auto", "none", marks=pytest.mark.exhaustive),
        pytest.param("gpipe", "none", marks=pytest.mark.exhaustive),
    ],
)
def test_two_pipelines_equal_one_device(schedule: str, memory: str) -> None:
    assert_equals_one_device(tfdist.PipelineStrategy(DEVICES, num_microbatches=2, schedule=schedule, memory=memory))


def test_a_step_that_needs_the_whole_batch() -> None:
    strategy = tfdist.PipelineStrategy([d for row in DEVICES for d in row], replicas=2, num_microbatches=2)
    assert strategy.devices == tfdist.PipelineStrategy(DEVICES).devices
    with reference.only_fit():
        assert_transparent(strategy, build_pairwise, (X, Y), batch_size=16)


def test_without_the_second_pipeline_it_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "added", lambda first, second: first)
    strategy = tfdist.PipelineStrategy(DEVICES, num_microbatches=2)
    with pytest.raises(AssertionError, match="does not equal one process"):
        assert_equals_one_device(strategy)


def test_statistics_are_averaged() -> None:
    strategy = tfdist.PipelineStrategy(DEVICES, num_microbatches=1)
    with strategy.scope():
        inputs = keras.Input((8,))
        normalization = layers.BatchNormalization(momentum=0.5)
        model = keras.Model(inputs, layers.Dense(3)(layers.Dense(8)(normalization(inputs))))
        model.compile("sgd", "mse")
    x = X[:16]
    model.train_on_batch(x, Y[:16])
    halves = x[:8], x[8:]
    mean = 0.5 * np.mean([half.mean(0) for half in halves], 0)
    variance = 0.5 + 0.5 * np.mean([half.var(0) for half in halves], 0)
    np.testing.assert_allclose(normalization.moving_mean, mean, atol=1e-6)
    np.testing.assert_allclose(normalization.moving_variance, variance, atol=1e-6)


def test_pipelines_draw_different_masks() -> None:
    strategy = tfdist.PipelineStrategy(DEVICES, num_microbatches=1)
    with strategy.scope():
        inputs = keras.Input((64,))
        model = Masks(inputs, layers.Activation("linear")(layers.Dropout(0.5)(inputs)))
        model.compile("sgd", "mse")
    ones = np.ones((8, 64))
    logs = model.train_on_batch(ones, ones, return_dict=True)
    first, second = np.split(np.asarray(logs["kept"]), 2)
    assert 0.3 < first.mean() < 0.7
    assert 0.3 < (first == second).mean() < 0.7


class Masks(keras.Model):
    """Tells what Dropout has kept."""

    def train_step(self, data):
        return {"kept": tf.cast(self(data[0], training=True) > 0, tf.float32)}


def test_unequal_pipelines_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Expected: equally many devices, one a stage"):
        tfdist.PipelineStrategy([["CPU:0", "CPU:1"], ["CPU:2"]])
    with pytest.raises(ValueError, match=r"Received: 3 devices for replicas=2. Expected: a multiple of the number"):
        tfdist.PipelineStrategy(["CPU:0", "CPU:1", "CPU:2"], replicas=2)
