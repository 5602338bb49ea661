"""Variables that have a value of their own on each replica, such as metrics within an epoch: read from all, and set."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat.upstream import DistributedVariable, SyncOnReadVariable


def parts_of_variable(variable: Any) -> list[tf.Variable]:
    """The TensorFlow variables behind a Keras (or TensorFlow) variable: one for each local replica."""
    value = getattr(variable, "_value", variable)
    return list(value.values) if isinstance(value, DistributedVariable) else [value]


def is_kept_per_replica(variable: Any) -> bool:
    """Whether each replica has a value of its own, which are combined only when the variable is read."""
    return isinstance(getattr(variable, "_value", variable), SyncOnReadVariable)


def gather(strategy: tf.distribute.Strategy, variables: Sequence[Any]) -> list[tf.Tensor]:
    """The values of all replicas of all workers; with several workers, one collective for each dtype.

    The variables of one dtype are laid end to end in one row for each replica, so that they need one collective only.
    Floats, int32 and int64 are sent as they are, all others as int32.

    Args:
        strategy: the strategy of the variables.
        variables: variables that are kept per replica; none of them may be of text.

    Returns:
        For each variable a tensor of shape `(replicas, *shape of the variable)`.
    """
    local = [tf.stack([part.read_value() for part in parts_of_variable(variable)]) for variable in variables]
    if strategy.num_replicas_in_sync == len(strategy.extended.worker_devices):
        return local
    gathered: list[tf.Tensor | None] = [None] * len(local)
    for dtype in dict.fromkeys(value.dtype for value in local):
        chosen = [i for i, value in enumerate(local) if value.dtype == dtype]
        wire = dtype if dtype.is_floating or dtype in (tf.int32, tf.int64) else tf.int32
        rows = tf.concat([tf.cast(tf.reshape(local[i], [len(local[i]), -1]), wire) for i in chosen], axis=1)
        everything = _gather_of(strategy)(rows)
        parts = tf.split(everything, [local[i][0].shape.num_elements() for i in chosen], axis=1)
        for i, part in zip(chosen, parts, strict=True):
            gathered[i] = tf.cast(tf.reshape(part, [-1, *local[i].shape[1:]]), dtype)
    return gathered


@functools.cache
def _gather_of(strategy: tf.distribute.Strategy) -> Callable[[tf.Tensor], tf.Tensor]:
    """A function that stacks the rows of all replicas of all workers; it is traced once for each shape.

    Each worker passes the rows of its own replicas. In the graph, every replica takes its row, and an all-gather of the
    strategy stacks them in the order of the replicas.
    """

    @tf.function(reduce_retracing=False)
    def gather_rows(rows: tf.Tensor) -> tf.Tensor:
        first = strategy.extended._input_position()[1] * rows.shape[0]

        def row_of(context: Any) -> tf.Tensor:
            return rows[context.replica_id_in_sync_group - first][tf.newaxis]

        return strategy.gather(strategy.experimental_distribute_values_from_function(row_of), axis=0)

    return gather_rows


def forget_functions() -> None:
    """Forgets the traced functions, which are of no use once the processes of a strategy have changed."""
    _gather_of.cache_clear()


def scatter(strategy: tf.distribute.Strategy, variable: Any, values: np.ndarray) -> None:
    """Sets the value of every local replica.

    Args:
        strategy: the strategy of the variable.
        variable: a Keras variable that is kept per replica.
        values: what `gather` returned for it. If the number of replicas was another one, the values are combined: of a
            sum the first replica gets all and the others 0; a mean is set on every replica.
    """
    parts = parts_of_variable(variable)
    workers, worker = strategy.extended._input_position()
    replicas = workers * len(parts)
    if len(values) != replicas:
        whole = combine(variable, values)
        rest = np.zeros_like(whole) if variable.aggregation == "sum" else whole
        values = np.stack([whole] + [rest] * (replicas - 1))
    for k, part in enumerate(parts):
        part.assign(tf.constant(values[worker * len(parts) + k], dtype=part.dtype))


def combine(variable: Any, values: np.ndarray) -> np.ndarray:
    """The value of the whole variable, from the values of all replicas: combined as `variable.aggregation` says."""
    if variable.aggregation == "sum":
        return values.sum(0, dtype=values.dtype)
    return values.mean(0, dtype=values.dtype) if variable.aggregation == "mean" else values[0]
