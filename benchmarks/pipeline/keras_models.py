"""The models for Keras."""

from __future__ import annotations

import keras
import tensorflow as tf

from benchmarks.pipeline.shapes import LEARNING_RATE, DenseStack, Shape, TransformerStack


def compiled(shape: Shape) -> keras.Model:
    """A model, for the strategy whose scope one is in."""
    keras.utils.set_random_seed(1)
    inputs = outputs = keras.Input(shape.batch_shape[1:])
    match shape:
        case DenseStack():
            for _ in range(shape.layers):
                outputs = keras.layers.Dense(shape.width, "relu")(outputs)
        case TransformerStack():
            for _ in range(shape.blocks):
                outputs = _block(shape, outputs)
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(LEARNING_RATE), "mse", jit_compile=False)
    return model


def repeated_batch(shape: Shape) -> tf.data.Dataset:
    """Making a batch costs nothing: it is always the same."""
    batch = tf.random.stateless_uniform(shape.batch_shape, seed=(0, 1))
    options = tf.data.Options()
    options.autotune.enabled = False
    return tf.data.Dataset.from_tensors((batch, batch)).repeat().with_options(options)


def _block(shape: TransformerStack, x: keras.KerasTensor) -> keras.KerasTensor:
    attention = keras.layers.MultiHeadAttention(shape.heads, shape.width // shape.heads)
    x = keras.layers.LayerNormalization(epsilon=1e-5)(x + attention(x, x))
    hidden = keras.layers.Dense(shape.hidden, "relu")(x)
    return keras.layers.LayerNormalization(epsilon=1e-5)(x + keras.layers.Dense(shape.width)(hidden))
