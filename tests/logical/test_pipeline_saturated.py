"""Losses of probabilities near 0 and 1: they use the logits that Keras attaches, wherever these were made."""

from __future__ import annotations

import functools
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.logical.pipelines import after_one_step, labelled, pipeline
from tests.models import ready
from tests.tiers import daily
from tfdist.layer_graph.chunk import value_of
from tfdist.testing import differences

pytestmark = pytest.mark.usefixtures("four_devices")

# What a loss of probabilities that are clipped at 1e-7 cannot exceed.
CLIPPED = 16.2
X, CLASSES = labelled(19)
ONE_HOT = np.eye(3, dtype="float32")[CLASSES]


def classifier() -> keras.Model:
    """Its logits are about from -200 to 200."""
    inputs = keras.Input((8,))
    x = layers.Dense(16, name="first")(layers.Dense(16, "tanh")(inputs))
    logits = layers.Rescaling(120.0, name="logits")(layers.Dense(3, kernel_initializer="he_normal")(x))
    loss = "categorical_crossentropy"
    model = keras.Model(inputs, layers.Activation("softmax")(logits))
    return ready(model, keras.optimizers.SGD(0.001, momentum=0.9), loss, metrics=[loss])


class Endpoint(layers.Layer):
    """Computes the loss itself, of what an earlier layer has made."""

    def call(self, probabilities: tf.Tensor) -> tf.Tensor:
        wrong = tf.cast(probabilities < 0.5, tf.float32)
        self.add_loss(tf.reduce_mean(keras.losses.binary_crossentropy(wrong, probabilities)))
        return probabilities * 2.0


def with_endpoint() -> keras.Model:
    plain = classifier()
    probabilities = layers.Activation("sigmoid", name="activation")(plain.get_layer("logits").output)
    return ready(keras.Model(plain.inputs, Endpoint()(probabilities)), keras.optimizers.SGD(0.001))


@functools.cache
def expected(build: Callable[[], keras.Model]) -> dict[str, np.ndarray]:
    """What two steps of one process leave."""
    _, left = after_one_step(tf.distribute.get_strategy(), build, (X, ONE_HOT), 2)
    assert left["history 0"].max() > CLIPPED, "the model is not saturated"
    return left


def gap(strategy: tfdist.PipelineStrategy, build: Callable[[], keras.Model] = classifier) -> float:
    """The largest difference to one process; relative to what is larger than 1."""
    right = expected(build)
    found = differences(right, after_one_step(strategy, build, (X, ONE_HOT), 2)[1])
    return max(found[name] / max(1.0, np.abs(value).max()) for name, value in right.items())


@pytest.mark.parametrize("schedule", daily(["gpipe", "interleaved"], "gpipe"))
def test_equal_to_one_process(schedule):
    assert gap(pipeline(schedule=schedule)) < 1e-6


@pytest.mark.nightly
def test_activation_alone_in_the_last_stage():
    assert gap(pipeline(3, cuts=["first", "logits"], memory="recompute")) < 1e-6


def test_loss_in_a_layer():
    assert gap(pipeline(cuts=["activation"]), with_endpoint) < 1e-6


def test_negative_control_without_logits(monkeypatch):
    monkeypatch.setattr("tfdist.layer_graph.chunk.value_of", lambda tensor: value_of(tensor)._replace(logits=None))
    assert gap(pipeline()) > 0.01
