"""Batch statistics of the global batch for `keras.layers.BatchNormalization`, in one collective a layer.

Keras' own `synchronized=True` sends three, ignores masks, and computes `E[x^2] - E[x]^2`, which cancels for data far
from zero. Here sums of `x - shift` travel together, where `shift` is the layer's moving mean: the same on every
replica, and close to the batch mean once training has begun.
"""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

from tfdist.strategies.keras_step import current_step


def global_moments(layer: keras.layers.BatchNormalization) -> Callable[..., tuple[tf.Tensor, tf.Tensor]]:
    """Returns a replacement for `layer._moments` that sees the rows of all replicas.

    The replacement takes `(inputs, mask)`, inputs of shape `(batch, ..., channels)` in float32 or wider and a boolean
    mask of shape `inputs.shape[:-1]` or `None`, and returns mean and variance of shape `(channels,)`.
    """

    def moments(inputs: tf.Tensor, mask: tf.Tensor | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        axes = layer._reduction_axes
        shape = [1] * inputs.shape.rank
        shape[layer.axis] = -1
        shift = tf.stop_gradient(tf.cast(layer.moving_mean.value, inputs.dtype))
        centred = inputs - tf.reshape(shift, shape)
        counts = tf.ones_like(centred)
        if mask is not None:
            keep = tf.broadcast_to(tf.expand_dims(tf.cast(mask, bool), -1), tf.shape(inputs))
            centred, counts = tf.where(keep, centred, 0), tf.cast(keep, inputs.dtype)
        own_rows = current_step().counts
        sums = tf.stack(
            [tf.reduce_sum(centred, axes), tf.reduce_sum(tf.square(centred), axes), tf.reduce_sum(counts, axes)]
        )
        if own_rows is not None:
            sums *= tf.cast(own_rows, sums.dtype)
        totals = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, sums)
        mean = tf.math.divide_no_nan(totals[0], totals[2])
        variance = tf.maximum(tf.math.divide_no_nan(totals[1], totals[2]) - tf.square(mean), 0.0)
        return mean + shift, variance

    return moments
