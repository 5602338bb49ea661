"""What a step logs: metrics' results, which every replica computes from its own rows, and other values.

Keras reads the metrics once more at the end of an epoch, from all replicas, if the step has logged exactly those of
`model.metrics`, by their names. Then a step's own logs are for the progress bar, and cost nothing. All others become
global in the step: metrics (under another name, of another place, nested) by the sums of their states, other values by
their means over the rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.upstream import SyncOnReadVariable
from tfdist.inspection.replica_values import is_kept_per_replica
from tfdist.steps.gradients import all_reduce_sum, scale
from tfdist.steps.keras_step import KerasStep, global_replica

# What collectives can add up; anything else is sent as int32.
_NUMBERS = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64)


def marked_result(metric: keras.Metric) -> Callable:
    """Returns a replacement for `metric.result` whose tensors are known to come from it."""
    original = metric.result

    def result() -> Any:
        value = original()
        leaves = [tf.identity(leaf) for leaf in tf.nest.flatten(value)]
        for i, leaf in enumerate(leaves):
            leaf._tfdist_result = metric, i
        return tf.nest.pack_sequence_as(value, leaves)

    return result


@contextlib.contextmanager
def kept_where(counts: tf.Tensor | None, variables: Iterable[keras.Variable]) -> Iterator[None]:
    """Undoes the block's changes of this replica's copies of `variables` where `counts` is given and false."""
    if counts is None:
        yield
        return
    variables = [v.value for v in variables]
    before = [tf.identity(v) for v in variables]
    yield

    def undo() -> tf.Tensor:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        return tf.constant(True)

    tf.cond(counts, lambda: tf.constant(True), undo)


def read_by_keras(step: KerasStep, logs: Any) -> bool:
    """Whether Keras replaces these logs of a replica at the end of the epoch."""
    if step.on_batch or not isinstance(logs, dict):
        return False
    return all(_origin(log) for log in logs.values()) and logs.keys() == step.model.get_metrics_result().keys()


def of_all_replicas(step: KerasStep, logs: Any) -> Any:
    """The logs that one process would return, on every replica; one collective for each dtype."""
    leaves = tf.nest.flatten(logs)
    metrics = list({id(origin[0]): origin[0] for origin in map(_origin, leaves) if origin}.values())
    variables = list({id(v): v for metric in metrics for v in metric.variables}.values())
    others = [_weighted(leaf, step) for leaf in leaves if not _origin(leaf)]
    sums = all_reduce_sum([_summand(variable) for variable in variables] + others)
    states = zip(variables, sums[: len(variables)], strict=True)
    with keras.StatelessScope(state_mapping=[(v, tf.cast(total, v.dtype)) for v, total in states]):
        results = {id(metric): tf.nest.flatten(metric.result()) for metric in metrics}
    means = iter(sums[len(variables) :])
    return tf.nest.pack_sequence_as(logs, [_of(results, leaf) if _origin(leaf) else next(means) for leaf in leaves])


def _origin(leaf: Any) -> tuple[keras.Metric, int] | None:
    return getattr(leaf, "_tfdist_result", None)


def _of(results: dict[int, list], leaf: Any) -> tf.Tensor:
    metric, i = _origin(leaf)
    return results[id(metric)][i]


def _weighted(leaf: Any, step: KerasStep) -> tf.Tensor:
    value = tf.convert_to_tensor(leaf)
    # A weight is a fraction; as an integer it would be 0.
    return scale(value if value.dtype.is_floating else tf.cast(value, tf.float64), step.weight)


def _summand(variable: keras.Variable) -> tf.Tensor:
    """What this replica adds to a metric's variable, as the variable's `aggregation` says."""
    value = tf.convert_to_tensor(variable.value)
    value = value if value.dtype in _NUMBERS else tf.cast(value, tf.int32)
    if is_kept_per_replica(variable) and variable.aggregation == "sum":
        return value
    if is_kept_per_replica(variable) and variable.aggregation == "mean":
        return value / tf.distribute.get_replica_context().num_replicas_in_sync
    return value if global_replica() == 0 else tf.zeros_like(value)


# Metrics whose replicas each count their own rows: once Keras has read them at the end of an epoch, reading is local.
#
# To read such a variable, TensorFlow adds up those of all replicas: under several processes a collective, at which a
# process that reads alone (`if rank == 0: print(metric.result())`) would stand still. Within an epoch it stays one.


class MetricTotals:
    """What the variables of a strategy's metrics add up to, from the end of an epoch until the next step."""

    def __init__(self) -> None:
        # Totals are kept on their variables: a new round makes all earlier ones void.
        self._round = 0

    def watch(self, variable: SyncOnReadVariable) -> None:
        """Shadows two methods of a variable: reading returns what is known, and writing does not read."""
        read, assign = variable._get_cross_replica, variable.assign
        variable._tfdist_total = None

        def total() -> Any:
            known = variable._tfdist_total
            if known is None or known[0] != self._round or not tf.executing_eagerly():
                return read()
            return known[1]

        def assign_without_reading(
            value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = False
        ) -> Any:
            # Upstream returns the new value, which costs a collective that nobody reads.
            variable._tfdist_total = None
            return assign(value, use_locking, name, read_value)

        variable._get_cross_replica = total
        variable.assign = assign_without_reading

    def settle(self, model: keras.Model) -> None:
        """Adds up the metrics that Keras reads at the end of an epoch; all processes call it there."""
        self.forget()
        for variable in model.metrics_variables:
            if is_kept_per_replica(variable):
                variable.value._tfdist_total = self._round, tf.convert_to_tensor(variable.value)

    def forget(self) -> None:
        """Forgets the totals: the metrics are about to be updated again."""
        self._round += 1
