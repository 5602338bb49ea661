"""Metrics whose replicas each count their own rows: once Keras has read them at the end of an epoch, reading is local.

To read such a variable, TensorFlow adds up those of all replicas: under several processes a collective, at which a
process that reads alone (`if rank == 0: print(metric.result())`) would stand still. Within an epoch it stays one.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute.values import SyncOnReadVariable

from tfdist.strategies.replica_values import is_kept_per_replica


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
        """The metrics are about to count again."""
        self._round += 1
