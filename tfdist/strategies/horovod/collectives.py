"""Horovod's collectives on TensorFlow's tensors, for all dtypes that gradients, metrics and predictions have."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.compat.upstream import func_graph

# What Horovod can add up, and what it can carry. All others travel as what is named here.
_ADDED = (tf.uint8, tf.int8, tf.int32, tf.int64, tf.float16, tf.float32, tf.float64)
_ADDED_AS = {tf.bfloat16: tf.float32, tf.bool: tf.int32, tf.int16: tf.int32, tf.uint16: tf.int32, tf.uint32: tf.int64}
_CARRIED = (*_ADDED, tf.uint16, tf.int16, tf.bool)
_CARRIED_AS = {tf.bfloat16: tf.uint16, tf.uint32: tf.int32, tf.uint64: tf.int64, tf.complex64: tf.int64}


class Collectives:
    """The collectives of a group of processes.

    Args:
        horovod: the module `horovod.tensorflow`, initialized.
        process_set: the group, of which this process is one.
    """

    def __init__(self, horovod: Any, process_set: Any):
        self._horovod, self._set = horovod, process_set
        self.size: int = process_set.size()
        self.rank: int = process_set.rank()
        with tf.init_scope(), tf.device("CPU:0"):
            self._zero = tf.Variable(0, trainable=False)

    def all_reduce(self, op: tf.distribute.ReduceOp, value: tf.Tensor | tf.IndexedSlices) -> Any:
        """Sum or mean over all processes, of a tensor or of slices; the same bits on all of them.

        Raises:
            TypeError: for a dtype that has no sum.
        """
        if isinstance(value, tf.IndexedSlices):
            scaled = value.values / self.size if op == tf.distribute.ReduceOp.MEAN else value.values
            return tf.IndexedSlices(self.all_gather(scaled), self.all_gather(value.indices), value.dense_shape)
        wire = value.dtype if value.dtype in _ADDED else _of(_ADDED_AS, value.dtype, "added up")
        matrix = self._matrix(tf.cast(value, wire), tf.size(value), 1)
        summed = self._horovod.allreduce(matrix, op=self._horovod.Sum, process_set=self._set, **_named("sum"))
        if op == tf.distribute.ReduceOp.MEAN:
            summed = summed / tf.cast(self.size, wire) if wire.is_floating else summed // tf.cast(self.size, wire)
        return tf.cast(_shaped(summed, value), value.dtype)

    def all_gather(self, value: tf.Tensor) -> tf.Tensor:
        """The rows of all processes, which may have differently many, by rank.

        Raises:
            TypeError: for a dtype that cannot be sent.
        """
        matrix = self._matrix(_as_carried(value), tf.shape(value)[0], tf.reduce_prod(tf.shape(value)[1:]))
        gathered = self._horovod.allgather(matrix, process_set=self._set, **_named("rows"))
        gathered = tf.reshape(gathered, tf.concat([tf.shape(gathered)[:1], tf.shape(value)[1:]], 0))
        return tf.ensure_shape(_back(gathered, value.dtype), [None, *value.shape[1:]])

    def broadcast(self, value: tf.Tensor) -> tf.Tensor:
        """The value of the first process.

        Raises:
            TypeError: for a dtype that cannot be sent.
        """
        first = self._set.ranks[0] if self._set.ranks else 0
        matrix = self._matrix(_as_carried(value), tf.size(value), 1)
        sent = self._horovod.broadcast(matrix, root_rank=first, process_set=self._set, **_named("first"))
        return _back(_shaped(sent, value), value.dtype)

    def _matrix(self, value: tf.Tensor, rows: tf.Tensor, columns: tf.Tensor | int) -> tf.Tensor:
        """Reshapes to a matrix whose shape TensorFlow does not know before it runs the graph.

        Horovod does not declare its operations stateful. TensorFlow would fold an operation whose input is constant
        (a static number of rows, say): run it once while it optimizes the graph, when other processes may not. The
        unknown shape prevents that; a reshape copies nothing.
        """
        return tf.reshape(value, tf.stack([rows, columns]) + self._zero)


def _named(kind: str) -> dict[str, Any]:
    """A name for a collective: its number in the graph. The processes match collectives by their names.

    Horovod would take the name scope, which contains names of layers, and these count what else a process has built.
    Eager collectives need no name.
    """
    if tf.executing_eagerly():
        return {}
    graph = tf.compat.v1.get_default_graph()
    while isinstance(getattr(graph, "outer_graph", None), func_graph.FuncGraph):
        graph = graph.outer_graph
    graph._tfdist_collectives = number = getattr(graph, "_tfdist_collectives", 0) + 1
    return {"name": f"tfdist_{kind}_{number}", "ignore_name_scope": True}


def _shaped(matrix: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    return tf.reshape(matrix, like.shape if like.shape.is_fully_defined() else tf.shape(like))


def _as_carried(value: tf.Tensor) -> tf.Tensor:
    return value if value.dtype in _CARRIED else tf.bitcast(value, _of(_CARRIED_AS, value.dtype, "sent"))


def _back(value: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return value if value.dtype == dtype else tf.bitcast(value, dtype)


def _of(table: dict[tf.DType, tf.DType], dtype: tf.DType, what: str) -> tf.DType:
    if dtype not in table:
        raise TypeError(
            f"Received: a tensor of dtype {dtype.name}, to be {what} by Horovod. Expected: one of "
            f"{', '.join(sorted(known.name for known in (*_CARRIED, *table)))}; convert it, or leave it out of what "
            "the step returns."
        )
    return table[dtype]
