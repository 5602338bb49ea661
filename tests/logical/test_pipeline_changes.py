"""Models that change, or share layers, between calls of fit: a pipeline must not go on with what it has traced."""

from __future__ import annotations

import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.logical.pipelines import assert_same, both, numbers, pipeline
from tests.models import ready

pytestmark = pytest.mark.usefixtures("four_devices")

X, Y = numbers(24, 8), numbers(24, 3, seed=2)


def build() -> keras.Model:
    inputs = keras.Input((8,))
    hidden = layers.Dense(8, activation="tanh", name="first")(inputs)
    hidden = layers.Dense(8, activation="tanh", name="second")(hidden)
    return ready(keras.Model(inputs, layers.Dense(3, name="last")(hidden)), keras.optimizers.SGD(0.1), "mse")


def fit(model: keras.Model, **more) -> None:
    model.fit(X, Y, batch_size=8, verbose=0, shuffle=False, **more)


def test_a_layer_that_is_thawed_is_trained_with_another_loss() -> None:
    before = []

    def use(model: keras.Model) -> None:
        model.get_layer("first").trainable = False
        model.compile(keras.optimizers.SGD(0.1), "mse")
        fit(model)
        before.append(np.asarray(model.get_layer("first").kernel))
        model.get_layer("first").trainable = True
        model.compile(keras.optimizers.SGD(0.1), "mae")
        fit(model)
        assert not np.allclose(model.get_layer("first").kernel, before[-1])

    assert_same(*both(use, build))


def test_models_that_share_layers() -> None:
    def use(model: keras.Model) -> None:
        features = keras.Model(model.inputs, model.get_layer("second").output)
        fit(model)
        first = features.predict(X, verbose=0)
        fit(model)
        assert not np.allclose(features.predict(X, verbose=0), first)
        np.testing.assert_allclose(features.predict(X, verbose=0), features(X), atol=1e-6)

    assert_same(*both(use, build))


class Criticized(keras.Model):
    """Its step calls a model that is no part of its graph of layers."""

    def __init__(self, inputs, outputs, critic):
        super().__init__(inputs, outputs)
        self.critic = critic

    def train_step(self, data):
        with tf.GradientTape() as tape:
            made = self(data[0], training=True)
            loss = tf.reduce_mean((made - data[1]) ** 2) + tf.reduce_mean(self.critic(made, training=True) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def criticized() -> keras.Model:
    made = build()
    inputs = keras.Input((3,))
    critic = keras.Model(inputs, layers.Dense(1)(layers.Dense(8, "tanh")(inputs)))
    return ready(Criticized(made.input, made.output, critic), keras.optimizers.SGD(0.1))


@pytest.mark.parametrize("is_first", [False, True])
def test_a_model_beside_the_stages_that_is_called_by_itself(is_first: bool) -> None:
    def use(model: keras.Model) -> list:
        seen = [model.critic.predict(Y, verbose=0)] if is_first else []
        for _ in range(2):
            fit(model)
            seen.append(model.critic.predict(Y, verbose=0))
        assert not np.allclose(*seen[-2:])
        return seen

    assert_same(*both(use, criticized))


class Headed(keras.Model):
    """Has a layer that is no part of its graph of layers."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.head = layers.Dense(2, kernel_regularizer="l2")
        self.head.build((None, 4))


def test_a_penalty_on_weights_that_no_stage_uses() -> None:
    def headed() -> keras.Model:
        made = build()
        return ready(Headed(made.input, made.output), keras.optimizers.SGD(0.1), "mse")

    def use(model: keras.Model) -> list:
        return [model.fit(X, Y, batch_size=8, epochs=2, verbose=0).history["loss"]]

    assert_same(*both(use, headed))


def test_a_penalty_of_several_elements() -> None:
    """Keras adds them up."""

    def penalized() -> keras.Model:
        inputs = keras.Input((8,))
        x = layers.Dense(8, "tanh", kernel_regularizer=lambda weight: 0.1 * weight**2)(inputs)
        x = layers.Dense(8, "tanh", bias_regularizer=lambda weight: 0.1 * weight**2)(x)
        return ready(keras.Model(inputs, layers.Dense(3)(x)), keras.optimizers.SGD(0.1), "mse")

    def use(model: keras.Model) -> list:
        return [model.fit(X, Y, batch_size=8, epochs=2, verbose=0).history["loss"]]

    assert_same(*both(use, penalized))


def test_a_step_of_the_instance() -> None:
    def train_step(self: keras.Model, data: tuple) -> dict:
        with tf.GradientTape() as tape:
            loss = tf.reduce_max((self(data[0], training=True) - data[1]) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}

    def use(model: keras.Model) -> None:
        model.train_step = types.MethodType(train_step, model)
        fit(model)

    assert_same(*both(use, build))


class Penalized(keras.Model):
    """A gradient penalty, as in WGAN-GP."""

    def train_step(self, data):
        x = tf.convert_to_tensor(data[0])
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = self(x, training=True)
            loss = tf.reduce_mean(inner.gradient(y, x) ** 2)
        self.optimizer.apply(outer.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def test_gradients_of_gradients_are_refused() -> None:
    with pipeline().scope():
        inputs = keras.Input((8,))
        model = ready(Penalized(inputs, layers.Dense(1)(layers.Dense(4, activation="tanh")(inputs))), "sgd", "mse")
    with pytest.raises(NotImplementedError, match="Received: a gradient of gradients"):
        fit(model)


class Spectral(layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 4))

    def call(self, x):
        self.kernel.assign(self.kernel * 0.5)
        return x @ self.kernel


def test_what_cannot_be_right_is_refused() -> None:
    with pipeline().scope():
        model = ready(keras.Sequential([keras.Input((8,)), Spectral(), layers.Dense(3)]), "sgd", "mse")
        recurrent = ready(
            keras.Sequential([keras.Input((4, 2), batch_size=8), layers.LSTM(3, stateful=True), layers.Dense(1)]),
            "sgd",
            "mse",
        )
        sparse = keras.Model(i := keras.Input((8,), sparse=True), layers.Dense(3)(layers.Dense(4)(i)))
    with pytest.raises(ValueError, match="a layer assigns to its trainable variable"):
        fit(model)
    with pytest.raises(ValueError, match="with stateful=True, which keeps a state for each row of a batch"):
        recurrent.fit(np.ones((8, 4, 2)), np.ones((8, 1)), batch_size=8, verbose=0)
    with pytest.raises(ValueError, match="of sparse or ragged tensors, which are not cut into micro-batches"):
        sparse.predict(tf.sparse.from_dense(np.eye(8, dtype="float32")), verbose=0)
    with pytest.raises(ValueError, match=r"Received: devices='CPU:0'. Expected: a list with a device for each stage"):
        tfdist.PipelineStrategy("CPU:0")
