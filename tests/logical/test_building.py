"""What a user is told while a model is built for its first batch."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import tensorflow as tf

from tests.models import in_scope, ready

X, Y = np.ones((4, 8), "float32"), np.ones((4, 1), "float32")


class Warns(keras.layers.Dense):
    def build(self, input_shape):
        super().build(input_shape)
        warnings.warn("these inputs are unusual", UserWarning, stacklevel=1)


class NoCall(keras.Model):
    """Its step uses its parts, as those of GANs do."""

    def __init__(self):
        super().__init__()
        self.part = Warns(1)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.part(x) - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.part.trainable_variables), self.part.trainable_variables)
        return {"loss": loss}


def warned(strategy: tf.distribute.Strategy, build: type) -> list[warnings.WarningMessage]:
    model = in_scope(strategy, lambda: ready(build(), "sgd", "mse"))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.fit(X, Y, batch_size=4, verbose=0)
    return found


def test_a_layers_own_warning_is_shown_with_its_place(mirrored):
    found = [one for one in warned(mirrored, lambda: keras.Sequential([Warns(1)])) if "unusual" in str(one.message)]
    assert [one.filename for one in found] == [__file__]


def test_of_a_model_without_call_only_what_its_layers_say(mirrored):
    """Keras warns that such a model cannot be built; it is, by its step."""
    found = warned(mirrored, NoCall)
    assert {str(one.message) for one in found} == {"these inputs are unusual"}, [str(one.message) for one in found]
