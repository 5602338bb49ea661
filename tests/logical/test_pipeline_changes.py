"""Models that change, or share layers, between calls of fit: a pipeline must not go on with what it has traced."""

from __future__ import annotations

import types
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.logical.pipelines import numbers, pipeline
from tfdist.layer_graph.graph import functional_of
from tfdist.strategies.pipeline.validation import why_not_decomposable

pytestmark = pytest.mark.usefixtures("four_devices")

X, Y = numbers(24, 8), numbers(24, 3, seed=2)


def build() -> keras.Model:
    inputs = keras.Input((8,))
    hidden = layers.Dense(8, activation="tanh", name="first")(inputs)
    hidden = layers.Dense(8, activation="tanh", name="second")(hidden)
    model = keras.Model(inputs, layers.Dense(3, name="last")(hidden))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def both(use: Callable[[keras.Model], object]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What `use` makes of a model's weights on one device, and in a pipeline."""
    results = []
    for strategy in (tf.distribute.get_strategy(), pipeline()):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = build()
            use(model)
        results.append([np.asarray(w) for w in model.get_weights()])
    return results[0], results[1]


def fit(model: keras.Model, **more) -> None:
    model.fit(X, Y, batch_size=8, verbose=0, shuffle=False, **more)


def assert_equal(use: Callable[[keras.Model], object]) -> None:
    plain, pipelined = both(use)
    for expected, received in zip(plain, pipelined, strict=True):
        np.testing.assert_allclose(received, expected, atol=1e-6)


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

    assert_equal(use)


def test_models_that_share_layers() -> None:
    def use(model: keras.Model) -> None:
        features = keras.Model(model.inputs, model.get_layer("second").output)
        fit(model)
        first = features.predict(X, verbose=0)
        fit(model)
        assert not np.allclose(features.predict(X, verbose=0), first)
        np.testing.assert_allclose(features.predict(X, verbose=0), features(X), atol=1e-6)

    assert_equal(use)


def test_adapters_are_trained() -> None:
    def use(model: keras.Model) -> None:
        fit(model)
        model.get_layer("second").enable_lora(2)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        fit(model)

    assert_equal(use)


@pytest.mark.exhaustive
def test_a_loss_of_the_instance() -> None:
    def use(model: keras.Model) -> None:
        model.compute_loss = lambda x, y, y_pred, sample_weight, training=True: tf.reduce_mean(tf.abs(y_pred - y) ** 3)
        fit(model)

    assert_equal(use)


def test_a_step_of_the_instance() -> None:
    def train_step(self: keras.Model, data: tuple) -> dict:
        with tf.GradientTape() as tape:
            loss = tf.reduce_max((self(data[0], training=True) - data[1]) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}

    def use(model: keras.Model) -> None:
        model.train_step = types.MethodType(train_step, model)
        fit(model)

    assert_equal(use)


class OverRows(keras.losses.MeanSquaredError):
    """Divides by what only the whole batch knows, though it is called a mean squared error."""

    def call(self, y_true, y_pred):
        return super().call(y_true, y_pred) / tf.reduce_max(tf.abs(y_true))


def test_what_needs_the_whole_batch() -> None:
    model = build()
    functional = functional_of(model)
    assert why_not_decomposable(model, functional) is None
    model.compile("sgd", OverRows())
    assert why_not_decomposable(model, functional) == "the loss 'mean_squared_error' may look at several rows at once"
    model.compute_loss = lambda **_: 0.0
    assert why_not_decomposable(model, functional) == "the model has a compute_loss of its own"
    model.train_step = lambda data: {}
    assert why_not_decomposable(model, functional) == "the model has a train_step of its own"


@pytest.mark.exhaustive
def test_a_subclass_of_a_loss_of_keras() -> None:
    def use(model: keras.Model) -> None:
        model.compile(keras.optimizers.SGD(0.1), OverRows())
        fit(model)

    assert_equal(use)


@pytest.mark.exhaustive
def test_small_batches_for_validation() -> None:
    def use(model: keras.Model) -> None:
        fit(model, validation_data=(X[:5], Y[:5]), validation_batch_size=2)
        assert model.evaluate(X[:5], Y[:5], batch_size=2, verbose=0) > 0

    assert_equal(use)


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
        model = Penalized(inputs, layers.Dense(1)(layers.Dense(4, activation="tanh")(inputs)))
        model.compile("sgd", "mse")
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
        model = keras.Sequential([keras.Input((8,)), Spectral(), layers.Dense(3)])
        model.compile("sgd", "mse")
        recurrent = keras.Sequential(
            [keras.Input((4, 2), batch_size=8), layers.LSTM(3, stateful=True), layers.Dense(1)]
        )
        recurrent.compile("sgd", "mse")
        sparse = keras.Model(i := keras.Input((8,), sparse=True), layers.Dense(3)(layers.Dense(4)(i)))
    with pytest.raises(ValueError, match="a layer assigns to its trainable variable"):
        fit(model)
    with pytest.raises(ValueError, match="with stateful=True, which keeps a state for each row of a batch"):
        recurrent.fit(np.ones((8, 4, 2)), np.ones((8, 1)), batch_size=8, verbose=0)
    with pytest.raises(ValueError, match="of sparse or ragged tensors, which are not cut into micro-batches"):
        sparse.predict(tf.sparse.from_dense(np.eye(8, dtype="float32")), verbose=0)
    with pytest.raises(ValueError, match=r"Received: devices='CPU:0'. Expected: a list with a device for each stage"):
        tfdist.PipelineStrategy("CPU:0")
