"""Losses of probabilities near 0 and 1: they use the logits that Keras attaches, wherever these were made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.logical.pipelines import after_one_step, labelled, numbers, pipeline
from tfdist.layer_graph.values import value_of
from tfdist.testing import differences

pytestmark = pytest.mark.usefixtures("four_devices")

SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "interleaved")
# What a loss of probabilities that are clipped at 1e-7 cannot exceed.
CLIPPED = 16.2
X, CLASSES = labelled(19)
ONE_HOT = np.eye(3, dtype="float32")[CLASSES]


def logits_of(x: Any, name: str = "logits") -> Any:
    """About from -200 to 200."""
    return layers.Rescaling(120.0, name=name)(layers.Dense(3, kernel_initializer="he_normal")(x))


def classifier(activation: str, loss: str, *after: Callable[[], layers.Layer]) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        inputs = keras.Input((8,))
        x = layers.Dense(16, name="first")(layers.Dense(16, "tanh")(inputs))
        x = layers.Activation(activation, name="activation")(logits_of(x))
        for make in after:
            x = make()(x)
        model = keras.Model(inputs, x)
        model.compile(keras.optimizers.SGD(0.001, momentum=0.9), loss, metrics=[loss])
        return model

    return build


def two_outputs() -> keras.Model:
    """One of an earlier stage, which a later one uses, too, but not its logits; one of the last stage."""
    inputs = keras.Input((8,))
    x = layers.Dense(16, "tanh", name="first")(inputs)
    early = layers.Activation("sigmoid", name="early")(logits_of(x, "of_early"))
    x = layers.Dense(16)(layers.Concatenate(name="both")([x, early]))
    late = layers.Activation("softmax", name="late")(logits_of(layers.Dense(16)(x)))
    model = keras.Model(inputs, {"early": early, "late": late})
    losses = {"early": "binary_crossentropy", "late": "sparse_categorical_crossentropy"}
    model.compile(keras.optimizers.SGD(0.001), losses, loss_weights={"early": 0.5, "late": 1.0})
    return model


class Endpoint(layers.Layer):
    """Computes the loss itself, of what an earlier layer has made."""

    def call(self, probabilities: tf.Tensor) -> tf.Tensor:
        wrong = tf.cast(probabilities < 0.5, tf.float32)
        self.add_loss(tf.reduce_mean(keras.losses.binary_crossentropy(wrong, probabilities)))
        return probabilities * 2.0


def gap(build: Callable[[], keras.Model], data: Any, strategy: tfdist.PipelineStrategy) -> float:
    """The largest difference to one process after two steps; relative to what is larger than 1."""
    _, expected = after_one_step(tf.distribute.get_strategy(), build, data, 2)
    assert expected["history 0"].max() > CLIPPED, "the model is not saturated"
    _, received = after_one_step(strategy, build, data, 2)
    found = differences(expected, received)
    return max(found[name] / max(1.0, np.abs(value).max()) for name, value in expected.items())


KINDS = {
    "softmax": ("softmax", "categorical_crossentropy", ONE_HOT),
    "softmax of classes": ("softmax", "sparse_categorical_crossentropy", CLASSES),
    "sigmoid": ("sigmoid", "binary_crossentropy", ONE_HOT),
}


@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_one_process(kind):
    *arguments, targets = KINDS[kind]
    for schedule in SCHEDULES:
        assert gap(classifier(*arguments), (X, targets), pipeline(schedule=schedule)) < 1e-6


@pytest.mark.parametrize("recompute", [False, True])
def test_activation_alone_in_the_last_stage(recompute):
    build = classifier("softmax", "categorical_crossentropy")
    strategy = pipeline(3, cuts=["first", "logits"], recompute=recompute)
    assert gap(build, (X, ONE_HOT), strategy) < 1e-6


def test_layers_that_hand_on_what_they_are_given():
    """In a stage of their own: the logits come from the stage before."""
    build = classifier("sigmoid", "binary_crossentropy", layers.Identity, lambda: layers.Dropout(0.0))
    assert gap(build, (X, ONE_HOT), pipeline(3, cuts=["first", "activation"])) < 1e-6


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_outputs(schedule):
    data = X, {"early": ONE_HOT, "late": CLASSES}
    cuts = ["first", "both", "logits"] if schedule == "interleaved" else ["both"]
    assert gap(two_outputs, data, pipeline(schedule=schedule, cuts=cuts)) < 1e-6


def test_loss_in_a_layer():
    def build() -> keras.Model:
        model = classifier("sigmoid", "mse", Endpoint)()
        model.compile(keras.optimizers.SGD(0.001), None)
        return model

    assert gap(build, (X, ONE_HOT), pipeline(cuts=["activation"])) < 1e-6


def test_steps_whose_loss_is_computed_of_the_whole_batch():
    """A masked model, and a training step of one's own: both call the model as a function."""

    def masked() -> keras.Model:
        inputs = keras.Input((4, 8))
        x = layers.Dense(16, "tanh", name="first")(layers.Masking()(inputs))
        model = keras.Model(inputs, layers.Activation("softmax")(logits_of(layers.Dense(16)(x))))
        model.compile(keras.optimizers.SGD(0.001), "categorical_crossentropy")
        return model

    class Own(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            return super().train_step(data)

    def own() -> keras.Model:
        plain = classifier("sigmoid", "binary_crossentropy")()
        model = Own(plain.inputs, plain.outputs)
        model.compile(keras.optimizers.SGD(0.001), "binary_crossentropy")
        return model

    steps = numbers(19, 4, 8)
    steps[:9, 2:] = 0.0
    assert gap(masked, (steps, np.eye(3, dtype="float32")[np.arange(76) % 3].reshape(19, 4, 3)), pipeline()) < 1e-6
    assert gap(own, (X, ONE_HOT), pipeline()) < 1e-6


def test_evaluation():
    *arguments, targets = KINDS["softmax"]
    losses = []
    for strategy in (tf.distribute.get_strategy(), pipeline()):
        model, _ = after_one_step(strategy, classifier(*arguments), (X, targets))
        losses.append(model.evaluate(X, targets, verbose=0))
    np.testing.assert_allclose(*losses, rtol=1e-6)
    assert losses[0][0] > CLIPPED


def test_negative_control_without_logits(monkeypatch):
    monkeypatch.setattr("tfdist.layer_graph.chunk.value_of", lambda tensor: value_of(tensor)._replace(logits=None))
    for kind, (*arguments, targets) in KINDS.items():
        assert gap(classifier(*arguments), (X, targets), pipeline()) > 0.01, kind
