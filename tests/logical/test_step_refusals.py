"""Steps and optimizers that tfdist would not know are refused, and say so."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.features.table import rows
from tests.models import in_scope, ready


def test_a_step_that_is_no_method(mirrored):
    model = in_scope(
        mirrored, lambda: ready(keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)]), "sgd", "mse")
    )
    model.train_step = lambda data: {"loss": 0.0}
    with pytest.raises(
        ValueError, match=r"whose train_step is .*, not a method of its class.*Expected: a plain method"
    ):
        model.fit(*rows(16), verbose=0)


def test_an_optimizer_that_is_no_attribute_of_the_model(mirrored):
    elsewhere = []

    class Net(keras.Sequential):
        def train_step(self, data: tuple) -> dict:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self(data[0], training=True))
            elsewhere[0].apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    with mirrored.scope():
        model = ready(Net([keras.Input((8,)), keras.layers.Dense(1)]), "sgd", "mse")
        elsewhere.append(keras.optimizers.SGD())
        elsewhere[0].build(model.trainable_variables)
    with pytest.raises(RuntimeError, match=r"which is not an attribute of the model.*Expected: `self.my_optimizer = "):
        model.fit(*rows(16), verbose=0)


class Looping(keras.layers.Layer):
    """BatchNormalization of each time step."""

    def __init__(self) -> None:
        super().__init__()
        self.normalize = keras.layers.BatchNormalization()

    def build(self, shape: tuple) -> None:
        self.normalize.build((shape[0], shape[2]))

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        def once(step: tf.Tensor) -> tf.Tensor:
            return self.normalize(step, training=training)

        return tf.transpose(tf.map_fn(once, tf.transpose(x, [1, 0, 2])), [1, 0, 2])

    def compute_output_shape(self, shape: tuple) -> tuple:
        return shape


def normalizing() -> keras.Model:
    """A model of sequences whose BatchNormalization is somewhere."""
    return ready(keras.Sequential([keras.Input((3, 4)), Looping(), keras.layers.Dense(1)]), "sgd", "mse")


def sequences() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).random((22, 3, 4), "float32")
    return x, x.sum(2, keepdims=True)


def test_statistics_of_the_global_batch_in_a_loop(mirrored):
    model = in_scope(mirrored, normalizing)
    expected = r"Received: layer '.*' \(BatchNormalization\) in a loop or a branch(.|\n)*batch_norm='local'"
    with pytest.raises(NotImplementedError, match=expected):
        model.fit(*sequences(), batch_size=8, verbose=0)


def test_own_statistics_in_a_loop(mirrored):
    strategy = tfdist.MirroredStrategy(list(mirrored.extended.worker_devices), batch_norm="local")
    model = in_scope(strategy, normalizing)
    model.fit(*sequences(), batch_size=8, verbose=0)
    for variable in model.non_trainable_variables:
        np.testing.assert_array_equal(*(part.numpy() for part in variable.value.values))
