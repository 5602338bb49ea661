"""`BatchNormalization` with the statistics of the global batch, already in the forward pass.

It takes one collective a layer and direction. Keras' own `synchronized=True` sends three, ignores masks, and computes
`E[x^2] - E[x]^2`, which cancels for data far from zero. Here every replica computes mean and squared differences of its
own rows, and three numbers a channel are added up in float64, however many replicas there are: there, the difference of
squares is exact enough for float32. For float64 the means are added up first, and then the squared differences from the
global mean, as in Chan, Golub and LeVeque, "Algorithms for computing the sample variance" (1983).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfdist.compat.upstream import ControlFlowFuncGraph, FuncGraph
from tfdist.steps.keras_step import current_step
from tfdist.steps.reduce import all_reduce


def global_moments(layer: keras.layers.BatchNormalization) -> Callable[..., tuple[tf.Tensor, tf.Tensor]]:
    """Returns a replacement for `layer._moments` that sees the rows of all replicas.

    The replacement takes `(inputs, mask)`, inputs of shape `(batch, ..., channels)` in float32 or wider and a boolean
    mask of shape `inputs.shape[:-1]` or `None`, and returns mean and variance of shape `(channels,)`.
    """

    def moments(inputs: tf.Tensor, mask: tf.Tensor | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        _refuse_branches(layer)
        shape = [1] * inputs.shape.rank
        shape[layer.axis] = inputs.shape[layer.axis]
        keep = None
        if mask is not None:
            keep = tf.broadcast_to(tf.expand_dims(tf.cast(mask, tf.bool), -1), tf.shape(inputs))

        # TensorFlow's own way back would have a sum over the replicas of every replica's moments, and four times as
        # many operations, all of which are traced and optimised for each layer and replica.
        @tf.custom_gradient
        def all_rows_moments(own: tf.Tensor) -> tuple[tuple[tf.Tensor, tf.Tensor, tf.Tensor], Callable]:
            return _combine_moments(*_own_moments(own, keep, layer._reduction_axes, shape)), backward

        def backward(of_mean: tf.Tensor, of_variance: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
            gradients = tf.math.divide_no_nan(_with_gradient_of_all_losses(tf.stack([of_mean, of_variance])), total)
            of_mean, of_variance = (tf.reshape(gradient, shape) for gradient in tf.unstack(gradients))
            # Second derivatives are those of one process: there, `tf.nn.moments` has none of the mean in the variance,
            # and Keras' own computation with a mask has.
            centre = tf.reshape(tf.stop_gradient(mean) if keep is None else mean, shape)
            gradient = of_mean + 2 * of_variance * (inputs - centre)
            return _where_kept(gradient, keep)

        mean, variance, total = all_rows_moments(inputs)
        return mean, variance

    return moments


def _refuse_branches(layer: keras.layers.BatchNormalization) -> None:
    """Refuses branches and loops: a replica that takes another branch than the others would let them wait for ever."""
    if tf.executing_eagerly():
        return
    # The step itself may be in a loop, that of `steps_per_execution`.
    graph, of_step = tf.compat.v1.get_default_graph(), current_step().here.state.graph
    while isinstance(graph, FuncGraph) and graph is not of_step:
        if isinstance(graph, ControlFlowFuncGraph):
            raise NotImplementedError(
                f"Received: layer '{layer.name}' ({type(layer).__name__}) in a loop or a branch of the graph "
                "(tf.map_fn, tf.while_loop, tf.cond, the cell of a keras.layers.RNN). Replicas cannot exchange the "
                "statistics of the global batch there. Expected: the layer outside of it, "
                "keras.layers.RNN(..., unroll=True), or a strategy with batch_norm='local', where each replica takes "
                "the statistics of its own rows."
            )
        graph = graph.outer_graph


def _own_moments(
    inputs: tf.Tensor, keep: tf.Tensor | None, axes: Sequence[int], shape: Sequence[int]
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Count (a scalar), mean and sum of squared differences (one for each channel) of this replica's rows.

    Channels are the axis that is not 1 in `shape`, `axes` all others; `keep` tells which elements count, `None` all.
    """
    elements = tf.size(inputs) if keep is None else tf.math.count_nonzero(keep, dtype=tf.int32)
    count = tf.cast(elements // max(shape), inputs.dtype)
    mean = tf.math.divide_no_nan(tf.reduce_sum(_where_kept(inputs, keep), axes), count)
    squares = tf.reduce_sum(_where_kept(tf.square(inputs - tf.reshape(mean, shape)), keep), axes)
    return count, mean, squares


def _where_kept(values: tf.Tensor, keep: tf.Tensor | None) -> tf.Tensor:
    # What does not count may be NaN, which no factor turns into 0.
    return values if keep is None else tf.where(keep, values, tf.zeros_like(values))


def _combine_moments(count: tf.Tensor, mean: tf.Tensor, squares: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Mean and variance of the rows of all replicas, and how many there are, for each channel."""
    # Squared means are far larger than variances where data are far from zero: their difference would be lost.
    wide = tf.cast(tf.stack([tf.fill(mean.shape, count), mean, squares]), tf.float64)
    if (has_rows := current_step().has_rows) is not None:
        wide = tf.where(has_rows, wide, tf.zeros_like(wide))
    count, wide_mean, wide_squares = tf.unstack(wide)
    if mean.dtype == tf.float64:
        total, sums = tf.unstack(all_reduce(tf.stack([count, count * wide_mean]), differentiable=False))
        global_mean = tf.math.divide_no_nan(sums, total)
        squares = all_reduce(wide_squares + count * tf.square(wide_mean - global_mean), differentiable=False)
        return global_mean, tf.math.divide_no_nan(squares, total), total
    own = tf.stack([count, count * wide_mean, wide_squares + count * tf.square(wide_mean)])
    total, sums, squares = tf.unstack(all_reduce(own, differentiable=False))
    global_mean = tf.math.divide_no_nan(sums, total)
    variance = tf.maximum(tf.math.divide_no_nan(squares, total) - tf.square(global_mean), 0)
    return tuple(tf.cast(value, mean.dtype) for value in (global_mean, variance, total))


@tf.custom_gradient
def _with_gradient_of_all_losses(gradient: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    """The identity, whose gradient is that of all replicas' losses: each of them depends on these statistics.

    A replica back-propagates its loss without its weight; the gradients of all parameters are multiplied by that weight
    at the end (replica_step.py). So the gradients from another replica are multiplied by the other's weight and
    divided by this one's.
    """
    weight = tf.cast(current_step().relative_weight, gradient.dtype)
    total = all_reduce(tf.math.multiply_no_nan(gradient, weight), differentiable=False)
    return tf.math.divide_no_nan(total, weight), _sum_over_replicas


@tf.custom_gradient
def _sum_over_replicas(values: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    """The gradient of `_with_gradient_of_all_losses`: the sum over the replicas that have rows, by one all-reduce."""
    values = tf.where(current_step().relative_weight > 0, values, tf.zeros_like(values))
    return all_reduce(values, differentiable=False), _with_gradient_of_all_losses
