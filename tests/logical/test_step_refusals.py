"""Steps and optimizers that tfdist would not know are refused, and say so."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

from tests.features.table import rows


def test_a_step_that_is_no_method(mirrored):
    with mirrored.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
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
        model = Net([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        elsewhere.append(keras.optimizers.SGD())
        elsewhere[0].build(model.trainable_variables)
    with pytest.raises(RuntimeError, match=r"which is not an attribute of the model.*Expected: `self.my_optimizer = "):
        model.fit(*rows(16), verbose=0)
