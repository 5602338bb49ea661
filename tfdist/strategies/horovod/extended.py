"""The part of `HorovodStrategy` that `tf.distribute` calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.compat.upstream import distribute_lib, distribute_utils, input_util, mirrored_strategy, trackable, values
from tfdist.strategies.horovod.collectives import Collectives
from tfdist.strategies.job_member import JobMemberExtended


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


class HorovodExtended(JobMemberExtended, _OwnInput):
    """One replica a process, on one device; what replicas exchange, Horovod carries.

    Args:
        strategy: the strategy.
        device: this process' device.
        collectives: the group of processes; `None` for a single process.
        from_first: whether variables begin with the first process' values.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, device: str, collectives: Collectives | None, from_first: bool
    ):
        self.connect(collectives)
        self._from_first = from_first
        super().__init__(strategy, devices=[device])

    def connect(self, collectives: Collectives | None) -> None:
        """Uses the collectives of these processes from now on."""
        self._collectives = collectives
        self._size = collectives.size if collectives else 1
        self._rank = collectives.rank if collectives else 0

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
        # In the thread of the caller: there is one replica, which has nobody to wait for outside of collectives.
        context = distribute_lib.ReplicaContext(self._container_strategy(), replica_id_in_sync_group=self._rank)
        args, kwargs = distribute_utils.select_replica(0, (args, kwargs))
        with context, tf.device(self._devices[0]):
            result = fn(*args, **kwargs)
        return distribute_utils.regroup((result,))

    def _get_variable_creator_initial_value(self, replica_id: int, device: str, primary_var: Any, **kwargs: Any) -> Any:
        if self._collectives is None or not self._from_first:
            return super()._get_variable_creator_initial_value(replica_id, device, primary_var, **kwargs)

        def of_first_process() -> tf.Tensor:
            value = kwargs["initial_value"]
            value = value() if callable(value) else value
            if isinstance(value, trackable.CheckpointInitialValue):
                value = value.wrapped_value
            value = tf.convert_to_tensor(value, dtype=kwargs.get("dtype"))
            with tf.device(device):
                return self._collectives.broadcast(value)

        return of_first_process

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

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int, options: Any) -> tf.Tensor:
        value = tf.convert_to_tensor(_of_this_process(value))
        if self._collectives is None:
            return value
        if axis == 0:
            return self._collectives.all_gather(value)
        order = [axis, *(i for i in range(value.shape.rank) if i != axis)]
        gathered = self._collectives.all_gather(tf.transpose(value, order))
        return tf.transpose(gathered, [order.index(i) for i in range(len(order))])

    def _gather_of_rows(self) -> Callable[[tf.Tensor], tf.Tensor] | None:
        return self._collectives and self._collectives.all_gather

    def _all_reduce(self, reduce_op: Any, value: Any) -> Any:
        if self._collectives is None:
            return value
        if not isinstance(value, tf.IndexedSlices):
            value = tf.convert_to_tensor(value)
        with tf.device(self._devices[0]):
            return self._collectives.all_reduce(reduce_op, value)


def _of_this_process(value: Any) -> Any:
    return value.values[0] if isinstance(value, values.DistributedValues) else value
