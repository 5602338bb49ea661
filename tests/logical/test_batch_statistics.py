"""The statistics of the global batch: gradients of gradients, and what a mask leaves out."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.features.reference import only_fit
from tfdist.steps import batch_normalization
from tfdist.testing import assert_transparent


class Smooth(keras.Model):
    """Its loss has a penalty of the slope, as that of a WGAN-GP.

    Args:
        masked: whether some positions count in no statistics.
    """

    def __init__(self, masked: bool):
        super().__init__(dtype="float64")
        self.masked = masked
        self.first = layers.Dense(4, activation="softplus", dtype="float64")
        self.norm = layers.BatchNormalization(dtype="float64")
        self.last = layers.Dense(1, dtype="float64")

    def call(self, x, training=False):
        mask = x[..., 0] > -1 if self.masked else None
        return self.last(self.norm(self.first(x), training=training, mask=mask) ** 2)

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


def gaps(strategy, masked: bool, rows: int = 16) -> dict[str, float]:
    def build() -> keras.Model:
        model = Smooth(masked)
        model.compile(keras.optimizers.SGD(0.001))
        return model

    random = np.random.default_rng(0)
    data = random.normal(size=(rows, 3, 2)), random.normal(size=(rows, 3, 1))
    with only_fit():
        return assert_transparent(strategy, build, data, batch_size=8, epochs=1, shuffle=False, tolerance=1e-6)


# With a mask, Keras adds 1e-7 to the number of positions. Of 17 rows the last batch has one, and one replica has none.
@pytest.mark.parametrize(
    ("masked", "rows", "tolerance"),
    [
        pytest.param(False, 16, 1e-12, marks=pytest.mark.exhaustive),
        pytest.param(True, 16, 1e-7, marks=pytest.mark.exhaustive),
        (False, 17, 1e-12),
    ],
)
def test_penalty_of_the_slope(mirrored, masked, rows, tolerance):
    of_weights = [gap for name, gap in gaps(mirrored, masked, rows).items() if name.startswith("weight")]
    assert len(of_weights) == 8
    assert max(of_weights) < tolerance


def test_without_the_other_replicas(mirrored, monkeypatch):
    monkeypatch.setattr(batch_normalization, "_of_all_losses", lambda gradient: gradient)
    with pytest.raises(AssertionError, match=r"does not equal one process(.|\n)*weight 0"):
        gaps(mirrored, masked=False)


class Masked(keras.Model):
    def __init__(self):
        super().__init__()
        self.norm, self.last = layers.BatchNormalization(center=False, scale=False), layers.Dense(1)

    def call(self, x, training=False):
        mask = tf.math.is_finite(x[..., 0])
        x = self.norm(x, training=training, mask=mask)
        return self.last(tf.where(mask[..., None], x, tf.zeros_like(x)))


def test_nan_at_masked_positions(mirrored):
    def build() -> keras.Model:
        model = Masked()
        model.compile("sgd", "mse")
        return model

    x = np.random.default_rng(0).normal(size=(16, 3, 2)).astype("float32")
    x[::5, 1] = np.nan
    with only_fit():
        found = assert_transparent(mirrored, build, (x, np.ones((16, 3, 1))), batch_size=8, epochs=1)
    assert {"weight 0", "weight 1"} <= found.keys()  # the moving statistics
    assert max(found.values()) < 1e-5


class Gathers(layers.Layer):
    """Adds to the loss between two exchanges of the replicas."""

    def call(self, x):
        self.add_loss(keras.ops.mean(keras.ops.square(x)) / 4)
        context = tf.distribute.get_replica_context()
        if context is not None and context.num_replicas_in_sync > 1:
            context.all_gather(x, axis=0)
        self.add_loss(keras.ops.mean(keras.ops.abs(x)) / 4)
        return x


@pytest.mark.parametrize("exchange", [layers.BatchNormalization, pytest.param(Gathers, marks=pytest.mark.exhaustive)])
def test_what_layers_add_to_the_loss_before_replicas_exchange_something(mirrored, exchange):
    """Replicas take turns there, in the middle of a forward pass, and share the layers."""

    def build() -> keras.Model:
        penalised = layers.Dense(4, activity_regularizer=keras.regularizers.L2(0.5))
        model = keras.Sequential([keras.Input((8,)), penalised, exchange(), layers.Dense(4, "relu"), layers.Dense(8)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    x = np.random.default_rng(0).normal(size=(25, 8)).astype("float32")
    assert max(assert_transparent(mirrored, build, (x, x), batch_size=8, epochs=2).values()) < 1e-5


@pytest.mark.parametrize(
    ("dtype", "mean", "tolerance"), [("float32", 1e3, 1e-4), ("float64", 1e3, 1e-12), ("float64", 1e8, 1e-7)]
)
def test_data_far_from_zero(mirrored, dtype, mean, tolerance):
    x = np.random.default_rng(1).standard_normal((24, 3)).astype(dtype) + np.asarray(mean, dtype)
    with mirrored.scope():
        layer = keras.layers.BatchNormalization(momentum=0.0, dtype=dtype)
        model = keras.Sequential([keras.Input((3,), dtype=dtype), layer])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    # Not arrays: Keras would make them float32.
    model.fit(tf.data.Dataset.from_tensors((x, np.zeros_like(x))), shuffle=False, verbose=0)
    np.testing.assert_allclose(layer.moving_variance, np.var(x, 0, dtype="float64"), rtol=tolerance)
