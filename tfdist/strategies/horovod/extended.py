"""The part of `HorovodStrategy` that `tf.distribute` calls, and Horovod's collectives, which it exchanges by.

step of the one replica of this process, in one graph
    gradients, sums of metrics ──> cast to a dtype that Horovod adds  ──> matrix of unknown shape ──> hvd.allreduce
    rows of predictions        ──> a dtype that all collectives carry ──> matrix of unknown shape ──> hvd.allgather
initial values of variables    ──> hvd.broadcast from rank 0
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.compat.upstream import (
    distribute_lib,
    distribute_utils,
    func_graph,
    input_util,
    mirrored_strategy,
    values,
)
from tfdist.steps.reduce import broadcast, from_carried, gathered_together, to_carried
from tfdist.strategies.data_parallel.strategy import DataParallelExtended

# As what each dtype is added up.
_ADDED = {
    **{dtype: dtype for dtype in (tf.uint8, tf.int8, tf.int32, tf.int64, tf.float16, tf.float32, tf.float64)},
    **dict.fromkeys((tf.bool, tf.int16, tf.uint16), tf.int32),
    **{tf.bfloat16: tf.float32, tf.uint32: tf.int64},
}


class Collectives:
    """The collectives of all processes, by the module `horovod.tensorflow`, which is initialized."""

    def __init__(self, horovod: Any):
        self._horovod = horovod
        self.size: int = horovod.size()
        self.rank: int = horovod.rank()
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
        dtype = _ADDED.get(value.dtype)
        if dtype is None:
            raise TypeError(
                f"Received: a tensor of dtype {value.dtype.name}, to be added up by Horovod. Expected: one of "
                f"{', '.join(sorted(known.name for known in _ADDED))}; convert it, or leave it out of what the step "
                "returns."
            )
        matrix = self._matrix(tf.cast(value, dtype), tf.size(value), 1)
        summed = self._horovod.allreduce(matrix, op=self._horovod.Sum, **_named("sum"))
        if op == tf.distribute.ReduceOp.MEAN:
            summed = summed / tf.cast(self.size, dtype) if dtype.is_floating else summed // tf.cast(self.size, dtype)
        return tf.cast(_shaped(summed, value), value.dtype)

    def all_gather(self, value: tf.Tensor) -> tf.Tensor:
        """The rows of all processes, which may have differently many, by rank."""
        sent = to_carried(value)
        matrix = self._matrix(sent, tf.shape(sent)[0], tf.reduce_prod(tf.shape(sent)[1:]))
        gathered = self._horovod.allgather(matrix, **_named("rows"))
        gathered = tf.reshape(gathered, tf.concat([tf.shape(gathered)[:1], tf.shape(sent)[1:]], 0))
        return tf.ensure_shape(from_carried(gathered, value.dtype), [None, *value.shape[1:]])

    def broadcast(self, value: tf.Tensor) -> tf.Tensor:
        """The value of the first process, of a dtype that Horovod carries."""
        matrix = self._matrix(value, tf.size(value), 1)
        return _shaped(self._horovod.broadcast(matrix, root_rank=0, **_named("first")), value)

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


class _OwnInput(mirrored_strategy.MirroredExtended):
    """Datasets as this process' input pipeline, one of several: the others have theirs."""

    def _experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: Any) -> Any:
        return input_util.get_distributed_dataset(
            dataset,
            self._input_workers_with_options(options),
            self._container_strategy(),
            num_replicas_in_sync=self._num_replicas_in_sync,
            input_context=self._input_context(),
            options=options,
        )

    def _distribute_datasets_from_function(self, dataset_fn: Callable, options: Any) -> Any:
        workers = self._input_workers_with_options(options)
        return input_util.get_distributed_datasets_from_function(
            dataset_fn, workers, [self._input_context()], self._container_strategy(), options
        )

    def _input_context(self) -> tf.distribute.InputContext:
        size, rank = self._input_position()
        return tf.distribute.InputContext(size, rank, size)


class HorovodExtended(DataParallelExtended, _OwnInput):
    """One replica a process, on one device; what replicas exchange, Horovod carries.

    Args:
        strategy: the strategy.
        device: this process' device.
        collectives: of all processes; `None` for a single one.
    """

    def __init__(self, strategy: tf.distribute.Strategy, device: str, collectives: Collectives | None):
        self._collectives = collectives
        self._size = collectives.size if collectives else 1
        self._rank = collectives.rank if collectives else 0
        super().__init__(strategy, devices=[device])

    # Who is where

    def _input_position(self) -> tuple[int, int]:
        return self._size, self._rank

    @property
    def _num_replicas_in_sync(self) -> int:
        return self._size

    def _get_replica_id_in_sync_group(self, replica_id: int) -> int:
        return self._rank

    def _get_local_replica_id(self, replica_id_in_sync_group: Any) -> int:
        return 0

    def _in_multi_worker_mode(self) -> bool:
        return self._size > 1

    @property
    def experimental_between_graph(self) -> bool:
        return True

    @property
    def should_checkpoint(self) -> bool:
        return self._rank == 0

    @property
    def should_save_summary(self) -> bool:
        return self._rank == 0

    # What replicas do

    def _use_merge_call(self) -> bool:
        return False

    def _call_for_each_replica(self, fn: Callable, args: tuple, kwargs: dict) -> Any:
        # There is one replica, which has nobody to wait for outside of collectives.
        return self._call_here(self._rank, fn, args, kwargs)

    def _get_variable_creator_initial_value(self, replica_id: int, device: str, primary_var: Any, **kwargs: Any) -> Any:
        if self._collectives is None:
            return super()._get_variable_creator_initial_value(replica_id, device, primary_var, **kwargs)

        def make(initial_value: tf.Tensor, **_: Any) -> Callable[[], tf.Tensor]:
            return functools.partial(self._collectives.broadcast, initial_value)

        return broadcast(make, device, **kwargs)

    def _experimental_distribute_values_from_function(self, value_fn: Callable) -> Any:
        context = distribute_lib.ValueContext(self._rank, self._size)
        return distribute_utils.regroup((value_fn(context),), always_wrap=True)

    # What they exchange

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        return tf.nest.map_structure(lambda part: self._all_reduce(reduce_op, part), value)

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        if distribute_utils.is_mirrored(value) and reduce_op == tf.distribute.ReduceOp.MEAN:
            return value
        return self._all_reduce(reduce_op, _of_this_process(value))

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> list:
        return [self._all_reduce(reduce_op, _of_this_process(value)) for value, _ in value_destination_pairs]

    def _gather_dense(self, value: Any, destinations: Any, axis: int, options: Any) -> tf.Tensor:
        value = tf.convert_to_tensor(_of_this_process(value))
        if self._collectives is None:
            return value
        if axis == 0:
            return self._collectives.all_gather(value)
        order = [axis, *(i for i in range(value.shape.rank) if i != axis)]
        gathered = self._collectives.all_gather(tf.transpose(value, order))
        return tf.transpose(gathered, [order.index(i) for i in range(len(order))])

    def _gather_of_rows(self) -> Callable[[Sequence[tf.Tensor]], list[tf.Tensor]] | None:
        return self._collectives and functools.partial(gathered_together, self._collectives.all_gather)

    def _all_reduce(self, reduce_op: Any, value: Any) -> Any:
        if self._collectives is None:
            return value
        if not isinstance(value, tf.IndexedSlices):
            value = tf.convert_to_tensor(value)
        with tf.device(self._devices[0]):
            return self._collectives.all_reduce(reduce_op, value)


def _of_this_process(value: Any) -> Any:
    return value.values[0] if isinstance(value, values.DistributedValues) else value
