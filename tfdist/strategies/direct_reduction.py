"""TensorFlow's sums and gathers of replicas, carried by `tfdist.runtime.direct` in place of its gRPC servers.

    replicas' tensors ---+
    token.read_value() --+--> numpy_function: Exchange.all_reduce --> sum, on each replica's device
                                         |
                                         +--> token.assign()

All processes have to exchange the same values in the same order. TensorFlow may run operations that do not depend on
each other in any order, so each of these reads a variable that the one before has written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat.upstream import cross_device_ops, distribute_utils, values
from tfdist.runtime.direct.exchange import Exchange
from tfdist.runtime.direct.links import ExchangeError

# What NumPy adds up, and what it does slowly: that is added up as float32, and rounded where it leaves the host. All
# else goes TensorFlow's way.
_ADDED = (tf.float32, tf.float64, tf.int32, tf.int64)
_NARROW = (tf.bfloat16, tf.float16)
_SUM, _GATHER = "Collective sum of the replicas: %s", "Collective gather of the replicas: %s"


class DirectReduction(cross_device_ops.CollectiveAllReduce):
    """TensorFlow's `CollectiveAllReduce` with other sums; it gathers slices, too, where each process has one replica.

    Args:
        exchange: connects the processes.
        original: what it stands for.
    """

    def __init__(self, exchange: Exchange, original: cross_device_ops.CollectiveAllReduce) -> None:
        super().__init__(original._devices, original._group_size, original._options, original._collective_keys)
        self._exchange = exchange
        self._token = _token_of(exchange)

    def _all_reduce(self, reduce_op: Any, value: Any, replica_id: int, options: Any) -> Any:
        # Called for one replica at a time: with several in a process, the first one would wait for the second.
        if len(self._devices) > 1:
            return super()._all_reduce(reduce_op, value, replica_id, options)

        def of_one(one: Any) -> Any:
            if _is_dense(one):
                return self._sum(reduce_op, [one])[0]
            if _are_added_slices(reduce_op, one):
                return self._slices(one)
            return super(DirectReduction, self)._all_reduce(reduce_op, one, replica_id, options)

        return tf.nest.map_structure(of_one, value)

    def _all_reduce_per_replica_values(self, reduce_op: Any, per_replica_values: Sequence[Any], options: Any) -> list:
        results = []
        for value in per_replica_values:
            if all(map(_is_dense, value.values)):
                summed = self._sum(reduce_op, value.values)
                results.append(distribute_utils.regroup(summed, wrap_class=values.Mirrored))
            else:
                results += super()._all_reduce_per_replica_values(reduce_op, [value], options)
        return results

    def gather_rows(self, rows: tf.Tensor) -> tf.Tensor:
        """The rows of all processes, one below the other, by rank; each process has one replica.

        Args:
            rows: a matrix of this process, of a shape and dtype that are the same on all.
        """
        with tf.device("CPU:0"):
            (gathered,) = self._call(_GATHER, self._exchange.all_gather, [rows.dtype], [rows])
        with tf.device(self._devices[0]):
            return tf.reshape(gathered, [rows.shape[0] * self._group_size, *rows.shape[1:]])

    def _slices(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        """The slices of all processes: who applies them adds up those of one row."""
        parts = [slices.values, slices.indices]

        def gather(*tables: np.ndarray) -> list[np.ndarray]:
            return self._exchange.gather_rows(tables)

        with tf.device("CPU:0"):
            gathered = self._call(_GATHER, gather, [part.dtype for part in parts], parts)
        with tf.device(self._devices[0]):
            rows, indices = (
                tf.ensure_shape(x, tf.TensorShape([None]).concatenate(part.shape[1:]))
                for x, part in zip(gathered, parts, strict=True)
            )
            return tf.IndexedSlices(rows, indices, slices.dense_shape)

    def _sum(self, reduce_op: Any, replicas: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        dtype = replicas[0].dtype
        is_narrow = dtype in _NARROW

        def add_up(*parts: np.ndarray) -> np.ndarray:
            return self._exchange.all_reduce(parts, np.dtype(dtype.as_numpy_dtype) if is_narrow else None)

        with tf.device("CPU:0"):
            parts = [tf.cast(part, tf.float32) for part in replicas] if is_narrow else list(replicas)
            (total,) = self._call(_SUM, add_up, [parts[0].dtype], parts)
            total = tf.cast(total, dtype)
        total.set_shape(replicas[0].shape)
        results = []
        for device in self._devices:
            with tf.device(device):
                mean = reduce_op == tf.distribute.ReduceOp.MEAN
                results.append(total / self._group_size if mean else tf.identity(total))
        return results

    def _call(
        self, failure: str, function: Callable[..., Any], dtypes: Sequence[tf.DType], arguments: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        def in_turn(number: np.ndarray, *given: np.ndarray) -> list[np.ndarray]:
            try:
                found = function(*map(np.asarray, given))
                return [*(found if isinstance(found, list) else [found]), number + 1]
            except ExchangeError as error:
                raise tf.errors.UnavailableError(None, None, failure % error) from None

        *results, number = tf.numpy_function(in_turn, [self._token.read_value(), *arguments], [*dtypes, tf.int64])
        self._token.assign(number)
        return results


@functools.cache
def _token_of(exchange: Exchange) -> tf.Variable:
    """One for all that use an exchange: sums of devices and of hosts may be in the same graph."""
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(0, dtype=tf.int64, trainable=False)


def _are_added_slices(reduce_op: Any, value: Any) -> bool:
    return isinstance(value, tf.IndexedSlices) and reduce_op == tf.distribute.ReduceOp.SUM


def _is_dense(value: Any) -> bool:
    return not isinstance(value, tf.IndexedSlices) and value.dtype in (*_ADDED, *_NARROW)
