"""The statistics of the global batch: gradients of gradients, and what a mask leaves out."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.features.reference import only_fit
from tests.models import ready
from tfdist.strategies.data_parallel import batch_norm
from tfdist.testing import assert_transparent


class Smooth(keras.Model):
    """Its loss has a penalty of the slope, as that of a WGAN-GP."""

    def __init__(self):
        super().__init__(dtype="float64")
        self.first = layers.Dense(4, activation="softplus", dtype="float64")
        self.norm = layers.BatchNormalization(dtype="float64")
        self.last = layers.Dense(1, dtype="float64")

    def call(self, x, training=False):
        return self.last(self.norm(self.first(x), training=training) ** 2)

    def train_step(self, data):
        x, y = (tf.cast(part, tf.float64) for part in data)
        with tf.GradientTape() as tape:
            with tf.GradientTape() as of_inputs:
                of_inputs.watch(x)
                received = self(x, training=True)
                total = tf.reduce_sum(received)
            slope = of_inputs.gradient(total, x)
            loss = tf.reduce_mean((received - y) ** 2) + 0.01 * tf.reduce_mean(slope**2)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def gaps(strategy, rows: int) -> dict[str, float]:
    random = np.random.default_rng(0)
    data = random.normal(size=(rows, 3, 2)), random.normal(size=(rows, 3, 1))
    with only_fit():
        return assert_transparent(
            strategy,
            lambda: ready(Smooth(), keras.optimizers.SGD(0.001)),
            data,
            batch_size=8,
            epochs=1,
            shuffle=False,
            tolerance=1e-6,
        )


@pytest.mark.nightly
def test_penalty_of_the_slope(mirrored):
    """Of 17 rows the last batch has one, and one replica has none."""
    of_weights = [gap for name, gap in gaps(mirrored, 17).items() if name.startswith("weight")]
    assert len(of_weights) == 8
    assert max(of_weights) < 1e-12


def test_without_the_other_replicas(mirrored, monkeypatch):
    monkeypatch.setattr(batch_norm, "_with_gradient_of_all_losses", lambda gradient: gradient)
    with pytest.raises(AssertionError, match=r"does not equal one process(.|\n)*weight 0"):
        gaps(mirrored, 8)


class Masked(keras.Model):
    def __init__(self):
        super().__init__()
        self.norm, self.last = layers.BatchNormalization(center=False, scale=False), layers.Dense(1)

    def call(self, x, training=False):
        mask = tf.math.is_finite(x[..., 0])
        x = self.norm(x, training=training, mask=mask)
        return self.last(tf.where(mask[..., None], x, tf.zeros_like(x)))


def test_nan_at_masked_positions(mirrored):
    x = np.random.default_rng(0).normal(size=(16, 3, 2)).astype("float32")
    x[::5, 1] = np.nan
    with only_fit():
        found = assert_transparent(
            mirrored, lambda: ready(Masked(), "sgd", "mse"), (x, np.ones((16, 3, 1))), batch_size=8, epochs=1
        )
    assert {"weight 0", "weight 1"} <= found.keys()  # the moving statistics
    assert max(found.values()) < 1e-5


def test_what_layers_add_to_the_loss_before_replicas_exchange_something(mirrored):
    """Replicas take turns there, in the middle of a forward pass, and share the layers."""

    def build() -> keras.Model:
        penalised = layers.Dense(4, activity_regularizer=keras.regularizers.L2(0.5))
        hidden = [penalised, layers.BatchNormalization(), layers.Dense(4, "relu")]
        return ready(keras.Sequential([keras.Input((8,)), *hidden, layers.Dense(8)]), keras.optimizers.SGD(0.05), "mse")

    x = np.random.default_rng(0).normal(size=(25, 8)).astype("float32")
    with only_fit():
        assert_transparent(mirrored, build, (x, x), batch_size=8, epochs=2)
