"""Losses of probabilities near 0 and 1: they use the logits that Keras attaches, wherever these were made."""

from __future__ import annotations

import functools
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


def expected(build: Callable[[], keras.Model], data: Any) -> dict[str, np.ndarray]:
    """What two steps of one process leave."""
    _, left = after_one_step(tf.distribute.get_strategy(), build, data, 2)
    assert left["history 0"].max() > CLIPPED, "the model is not saturated"
    return left


def gap_to(
    right: dict[str, np.ndarray], build: Callable[[], keras.Model], data: Any, strategy: tfdist.PipelineStrategy
) -> float:
    """The largest difference after two steps; relative to what is larger than 1."""
    _, received = after_one_step(strategy, build, data, 2)
    found = differences(right, received)
    return max(found[name] / max(1.0, np.abs(value).max()) for name, value in right.items())


def gap(build: Callable[[], keras.Model], data: Any, strategy: tfdist.PipelineStrategy) -> float:
    """The largest difference to one process."""
    return gap_to(expected(build, data), build, data, strategy)


KINDS = {
    "softmax": ("softmax", "categorical_crossentropy", ONE_HOT),
    "softmax of classes": ("softmax", "sparse_categorical_crossentropy", CLASSES),
    "sigmoid": ("sigmoid", "binary_crossentropy", ONE_HOT),
}


@functools.cache
def expected_of(kind: str) -> dict[str, np.ndarray]:
    *arguments, targets = KINDS[kind]
    return expected(classifier(*arguments), (X, targets))


def gap_of(kind: str, strategy: tfdist.PipelineStrategy) -> float:
    """The same for one of these, which several tests compare with."""
    *arguments, targets = KINDS[kind]
    return gap_to(expected_of(kind), classifier(*arguments), (X, targets), strategy)


# Every kind and every schedule once; the last one has several outputs in `test_two_outputs`.
_DAILY = (("softmax", "gpipe"), ("sigmoid", "eager-1f1b"))


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        *_DAILY,
        *(
            pytest.param("softmax", schedule, marks=pytest.mark.exhaustive)
            for schedule in SCHEDULES
            if ("softmax", schedule) not in _DAILY
        ),
    ],
)
def test_equal_to_one_process(kind, schedule):
    assert gap_of(kind, pipeline(schedule=schedule)) < 1e-6


@pytest.mark.parametrize("memory", [pytest.param("none", marks=pytest.mark.exhaustive), "recompute"])
def test_activation_alone_in_the_last_stage(memory):
    assert gap_of("softmax", pipeline(3, cuts=["first", "logits"], memory=memory)) < 1e-6


@pytest.mark.exhaustive
def test_layers_that_hand_on_what_they_are_given():
    """In a stage of their own: the logits come from the stage before."""
    build = classifier("sigmoid", "binary_crossentropy", layers.Identity, lambda: layers.Dropout(0.0))
    assert gap(build, (X, ONE_HOT), pipeline(3, cuts=["first", "activation"])) < 1e-6


@pytest.mark.parametrize(
    ("schedule", "cuts"),
    [("1f1b", ["both"]), ("interleaved", ["first", "both", "logits"])],
)
@pytest.mark.exhaustive
def test_two_outputs(schedule, cuts):
    data = X, {"early": ONE_HOT, "late": CLASSES}
    assert gap(two_outputs, data, pipeline(schedule=schedule, cuts=cuts)) < 1e-6


def test_loss_in_a_layer():
    def build() -> keras.Model:
        model = classifier("sigmoid", "mse", Endpoint)()
        model.compile(keras.optimizers.SGD(0.001), None)
        return model

    assert gap(build, (X, ONE_HOT), pipeline(cuts=["activation"])) < 1e-6


@pytest.mark.exhaustive
def test_masked_steps_whose_loss_is_computed_of_the_whole_batch():
    """The model is called as a function, as in a training step of one's own."""

    def masked() -> keras.Model:
        inputs = keras.Input((4, 8))
        x = layers.Dense(16, "tanh", name="first")(layers.Masking()(inputs))
        model = keras.Model(inputs, layers.Activation("softmax")(logits_of(layers.Dense(16)(x))))
        model.compile(keras.optimizers.SGD(0.001), "categorical_crossentropy")
        return model

    steps = numbers(19, 4, 8)
    steps[:9, 2:] = 0.0
    assert gap(masked, (steps, np.eye(3, dtype="float32")[np.arange(76) % 3].reshape(19, 4, 3)), pipeline()) < 1e-6


def test_a_training_step_of_ones_own():
    class Own(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            return super().train_step(data)

    def own() -> keras.Model:
        plain = classifier("sigmoid", "binary_crossentropy")()
        model = Own(plain.inputs, plain.outputs)
        model.compile(keras.optimizers.SGD(0.001, momentum=0.9), "binary_crossentropy", metrics=["binary_crossentropy"])
        return model

    assert gap_to(expected_of("sigmoid"), own, (X, ONE_HOT), pipeline()) < 1e-6


def test_evaluation():
    *arguments, targets = KINDS["softmax"]
    losses = []
    for strategy in (tf.distribute.get_strategy(), pipeline()):
        with strategy.scope():
            keras.utils.set_random_seed(7)
            model = classifier(*arguments)()
        losses.append(model.evaluate(X, targets, verbose=0))
    np.testing.assert_allclose(*losses, rtol=1e-6)
    assert losses[0][0] > CLIPPED


@pytest.mark.parametrize("kind", KINDS)
def test_negative_control_without_logits(monkeypatch, kind):
    monkeypatch.setattr("tfdist.layer_graph.chunk.value_of", lambda tensor: value_of(tensor)._replace(logits=None))
    assert gap_of(kind, pipeline()) > 0.01
