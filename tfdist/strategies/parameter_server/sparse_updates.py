"""Lets Keras' Adagrad update only the rows of a table that have a gradient.

Keras reads and adds up whole tables for it, although rows without a gradient do not change. Of the other optimizers
of Keras, SGD without momentum is row-wise already, and all others change every row in every step, so they are left
alone: moments decay (Adam, momentum, RMSprop, Adadelta, ...), or the value is computed anew (Ftrl).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.strategies.keras_step import shadowed


@contextlib.contextmanager
def sparse_updates(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Makes an optimizer's updates row-wise, where that gives the same result, while a step is traced.

    Of a row that occurs several times, the accumulator gets the sum of the squares of its gradients, not the square of
    their sum: so does Keras with `tf.IndexedSlices` in one process.

    Args:
        optimizer: any optimizer, also a `keras.optimizers.LossScaleOptimizer` around one.

    Example:
        >>> optimizer, table = keras.optimizers.Adagrad(1.0), keras.Variable([[0.0], [0.0]])
        >>> gradient = tf.IndexedSlices([[3.0]], [1], [2, 1])
        >>> with sparse_updates(optimizer):
        ...     optimizer.apply([gradient], [table])
    """
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    if type(optimizer).update_step is not keras.optimizers.Adagrad.update_step:
        yield
        return
    with shadowed(optimizer, update_step=_row_wise(optimizer, optimizer.update_step)):
        yield


def _row_wise(optimizer: Any, dense: Callable) -> Callable:
    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        if not isinstance(gradient, tf.IndexedSlices):
            dense(gradient, variable, learning_rate)
            return
        rows, values = gradient.indices, tf.cast(gradient.values, variable.dtype)
        accumulator = optimizer._accumulators[optimizer._get_variable_index(variable)].value
        optimizer.assign_add(accumulator, tf.IndexedSlices(tf.square(values), rows))
        # Read after the addition, which has also added up the squares of a row that occurs several times.
        scale = tf.cast(learning_rate, variable.dtype) / tf.sqrt(tf.gather(accumulator, rows) + optimizer.epsilon)
        optimizer.assign_sub(variable, tf.IndexedSlices(values * scale, rows))

    return update_step
