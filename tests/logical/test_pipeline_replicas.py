"""Several pipelines side by side: one set of weights, each pipeline with its part of every batch."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.features import reference
from tests.logical.test_pipeline_models import pairwise
from tests.models import ready
from tfdist.strategies.pipeline import engine
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
    return ready(
        keras.Model(inputs, layers.Dense(3)(third)),
        keras.optimizers.AdamW(0.01, global_clipnorm=0.5),
        "mse",
        metrics=["mae"],
    )


def assert_equals_one_device(strategy: tfdist.PipelineStrategy) -> None:
    """The last of the batches of 16 has 5 rows, for 4 micro-batches."""
    with reference.only_fit(), reference.remembered("pipelines side by side", reference.folder()):
        assert_transparent(strategy, build, (X, Y), batch_size=16)


@pytest.mark.nightly
def test_two_pipelines_equal_one_device() -> None:
    assert_equals_one_device(tfdist.PipelineStrategy(DEVICES, num_microbatches=2, memory="recompute"))


def test_a_step_that_needs_the_whole_batch() -> None:
    strategy = tfdist.PipelineStrategy([d for row in DEVICES for d in row], replicas=2, num_microbatches=2)
    assert strategy.devices == tfdist.PipelineStrategy(DEVICES).devices
    with reference.only_fit():
        assert_transparent(strategy, pairwise, (X, Y), batch_size=16)


def test_without_the_second_pipeline_it_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "added", lambda first, second: second if first is None else first)
    strategy = tfdist.PipelineStrategy(DEVICES, num_microbatches=2)
    with pytest.raises(AssertionError, match="does not equal one process"):
        assert_equals_one_device(strategy)


def test_statistics_are_averaged() -> None:
    strategy = tfdist.PipelineStrategy(DEVICES, num_microbatches=1)
    with strategy.scope():
        inputs = keras.Input((8,))
        normalization = layers.BatchNormalization(momentum=0.5)
        model = ready(keras.Model(inputs, layers.Dense(3)(layers.Dense(8)(normalization(inputs)))), "sgd", "mse")
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
        model = ready(Masks(inputs, layers.Activation("linear")(layers.Dropout(0.5)(inputs))), "sgd", "mse")
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
