"""Batch statistics of the global batch for `keras.layers.BatchNormalization`, in one collective a layer and direction.

Keras' own `synchronized=True` sends three, ignores masks, and computes `E[x^2] - E[x]^2`, which cancels for data far
from zero. Here every replica writes the count, mean and sum of squared differences of its rows into a row of its own;
all rows are exchanged at once, and combined as in Chan, Golub and LeVeque, "Algorithms for computing the sample
variance" (1983).
"""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph

from tfdist.strategies.exchange import all_reduce
from tfdist.strategies.keras_step import current_step, global_replica, local_replica


def global_moments(layer: keras.layers.BatchNormalization) -> Callable[..., tuple[tf.Tensor, tf.Tensor]]:
    """Returns a replacement for `layer._moments` that sees the rows of all replicas.

    The replacement takes `(inputs, mask)`, inputs of shape `(batch, ..., channels)` in float32 or wider and a boolean
    mask of shape `inputs.shape[:-1]` or `None`, and returns mean and variance of shape `(channels,)`.
    """

    def moments(inputs: tf.Tensor, mask: tf.Tensor | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        _check_place(layer)
        axes, channels = layer._reduction_axes, inputs.shape[layer.axis]
        shape = [1] * inputs.shape.rank
        shape[layer.axis] = channels
        if mask is None:
            keep = None
            count = tf.cast(tf.size(inputs) // channels, inputs.dtype)
            mean = tf.math.divide_no_nan(tf.reduce_sum(inputs, axes), count)
        else:
            keep = tf.broadcast_to(tf.expand_dims(tf.cast(mask, inputs.dtype), -1), tf.shape(inputs))
            count = tf.reduce_sum(keep) / channels
            mean = tf.math.divide_no_nan(tf.reduce_sum(inputs * keep, axes), count)
        squares = tf.square(inputs - tf.reshape(mean, shape))
        squares = tf.reduce_sum(squares if keep is None else squares * keep, axes)
        own_rows = current_step().counts
        if own_rows is not None:
            count *= tf.cast(own_rows, count.dtype)
            squares *= tf.cast(own_rows, squares.dtype)
        counts, means, squares = tf.unstack(_of_all_replicas(tf.stack([tf.fill([channels], count), mean, squares])))
        total = tf.reduce_sum(counts, 0)
        global_mean = tf.math.divide_no_nan(tf.reduce_sum(counts * means, 0), total)
        squares = tf.reduce_sum(squares + counts * tf.square(means - global_mean), 0)
        return global_mean, tf.math.divide_no_nan(squares, total)

    return moments


def _check_place(layer: keras.layers.BatchNormalization) -> None:
    """Refuses what ends in waiting for ever: one replica may leave a loop, or take another branch, than the others."""
    if tf.executing_eagerly():
        return
    # The step itself may be in a loop, that of `steps_per_execution`.
    graph, of_step = tf.compat.v1.get_default_graph(), current_step().states[local_replica()].graph
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


def _of_all_replicas(rows: tf.Tensor) -> tf.Tensor:
    """Stacks a `(3, channels)` tensor of every replica to `(3, replicas, channels)`, differentiably."""
    replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    own = tf.one_hot(global_replica(), replicas, dtype=rows.dtype)
    return _sum(rows[:, None, :] * own[None, :, None])


def _sum(values: tf.Tensor) -> tf.Tensor:
    """Sum over all replicas, whose gradient is that of the global batch's loss.

    The losses of all replicas depend on the sum, so each replica gets the gradients of all. A loss is back-propagated
    without the weight of its replica, with which the gradients of all parameters are multiplied in the end
    (step_shadows.py). So those of other replicas come with the other's weight, divided by the own one.
    """

    @tf.custom_gradient
    def add(values: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        return all_reduce(values, differentiable=False), of_all_losses

    @tf.custom_gradient
    def of_all_losses(gradient: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        weight = tf.cast(current_step().relative_weight, gradient.dtype)
        total = all_reduce(tf.math.multiply_no_nan(gradient, weight), differentiable=False)
        return tf.math.divide_no_nan(total, weight), add

    return add(values)
