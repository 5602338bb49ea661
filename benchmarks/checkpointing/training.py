"""What all programs of this benchmark train."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from benchmarks.data_parallel.models import CLASSES, Dense, ModelShape
from benchmarks.data_parallel.models import make_batch as random_batch

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

BATCH = 256
LEARNING_RATE = 1e-4
MODEL = ModelShape("MLP", (784,), (Dense(1264), Dense(1264), Dense(CLASSES, relu=False)))


def state_bytes(parameters: int) -> int:
    """Size of float32 weights with Adam's two slots.

    Example:
        >>> state_bytes(1_000_000)
        12000000
    """
    return 3 * 4 * parameters


def make_batch() -> tuple[np.ndarray, np.ndarray]:
    """The global batch that every step is made with."""
    return random_batch(MODEL, BATCH)


def compiled_model() -> keras.Model:
    """The model for Keras, with Adam."""
    import keras

    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(layer.units, "relu" if layer.relu else None) for layer in MODEL.layers]
    model = keras.Sequential([keras.Input(MODEL.input_shape), *layers])
    model.compile(
        optimizer=keras.optimizers.Adam(LEARNING_RATE),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,
    )
    return model


def repeated_batch() -> tf.data.Dataset:
    """The dataset for Keras: making a batch costs nothing."""
    import tensorflow as tf

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    # There is nothing to tune, and an iterator with a tuner may take seconds to go, in the middle of the next fit.
    options.autotune.enabled = False
    return tf.data.Dataset.from_tensors(make_batch()).repeat().with_options(options)
