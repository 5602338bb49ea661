"""A distributed dataset in which every step consumes one global batch of the user's dataset.

`tf.distribute` shards a dataset and then makes batches of what each worker has; which rows meet in a step, and how
many, depends on the number of workers. Here every worker runs the user's pipeline and keeps its own rows of each
global batch, so a step sees exactly the rows that one process would see. All workers have the same number of steps by
construction; so, unlike `tf.distribute.DistributedDataset`, no collective is needed to find out whether data is left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.compat.upstream import data_distribute as distribute
from tfdist.compat.upstream import input_lib
from tfdist.inspection.batch_sharding import GlobalBatch, count_rows, rows_of_piece, take_share
from tfdist.inspection.epoch_iterators import ArraySource, array_source
from tfdist.runtime.meters.input import after

# Nothing here needs AutoGraph, which takes a second to find that out.
_as_it_is = tf.autograph.experimental.do_not_convert


def share_of(batch: Any, pieces: int, piece: int, whole: bool = True) -> GlobalBatch:
    """Returns one of `pieces` shares of a batch, which is the global batch unless not `whole`."""
    data, rows = take_share(batch, pieces, piece)
    return GlobalBatch(data, tf.convert_to_tensor(rows), count_rows(batch) if whole else None)


def rows_of_worker(
    dataset: tf.data.Dataset, num_workers: int, worker: int, replicas: int, count: bool = False, manual: bool = False
) -> tf.data.Dataset:
    """Cuts each global batch of `dataset` into this worker's pieces, one element per local replica.

    Args:
        dataset: a dataset of global batches.
        num_workers: how many workers share each batch.
        worker: index of this worker.
        replicas: number of replicas on this worker.
        count: whether elements are `GlobalBatch`es. Plain elements have no stand-ins: they may have no rows.
        manual: whether the user has sharded the data, so that only this worker's rows of a step are known here.

    Returns:
        A dataset with `replicas` elements for each element of `dataset`. Local replica `k` of worker `w` gets piece
        `k * num_workers + w`: the order in which Keras' `predict` puts the replicas' results together.
    """
    source = array_source(dataset)
    if source is not None:
        return _rows_of_arrays(source, dataset.options(), num_workers, worker, replicas, count, manual)
    is_tuple = isinstance(dataset.element_spec, tuple)

    def cut(components: tuple, replica: int) -> Any:
        batch = components if is_tuple else components[0]
        piece = replica * num_workers + worker
        if count:
            return share_of(batch, num_workers * replicas, piece, whole=not manual)
        return rows_of_piece(batch, num_workers * replicas, piece)

    if replicas == 1:
        return dataset.map(_as_it_is(lambda *components: cut(components, 0)))

    @_as_it_is
    def one_element_per_replica(*components: Any) -> tf.data.Dataset:
        first, *others = (tf.data.Dataset.from_tensors(cut(components, k)) for k in range(replicas))
        for other in others:
            first = first.concatenate(other)
        return first

    return dataset.flat_map(one_element_per_replica)


def _rows_of_arrays(source: ArraySource, options: tf.data.Options, *arguments: Any) -> tf.data.Dataset:
    """As `rows_of_worker`, but rows of others are never taken: a batch takes no longer with more workers."""

    @_as_it_is
    def take(numbers: Any, arrays: Any) -> Any:
        if isinstance(numbers, GlobalBatch):
            return numbers._replace(data=source.take(numbers.data, arrays))
        return source.take(numbers, arrays)

    numbers = rows_of_worker(source.indices, *arguments)
    rows = tf.data.Dataset.zip((numbers, source.arrays)).map(take, num_parallel_calls=tf.data.AUTOTUNE)
    return rows.with_options(options).prefetch(tf.data.AUTOTUNE)


class GlobalBatchIterator(input_lib.DistributedIterator):
    """Iterator of `GlobalBatchDataset`: all replicas of all workers run out of data at the same step.

    What compiled functions take from it is counted by the strategy's `_input_meter`.
    """

    def get_next(self, name: str | None = None) -> Any:
        meter = self._strategy._input_meter
        if not meter.counts:
            return self._next_batch()
        batch, seconds = meter.timed(self._next_batch)
        meter.count(batch, seconds)
        return after(seconds, batch)

    def get_next_as_optional(self) -> tf.experimental.Optional:
        meter = self._strategy._input_meter
        if meter.counts:
            optionals, seconds = meter.timed(self._next_optionals)
        else:
            optionals, seconds = self._next_optionals(), None

        def value() -> tf.experimental.Optional:
            per_replica = self._of_all_replicas([optional.get_value() for optional in optionals])
            if seconds is not None:
                meter.count(per_replica, seconds)
            return tf.experimental.Optional.from_value(per_replica)

        with tf.control_dependencies([] if seconds is None else [seconds]):
            has_value = optionals[0].has_value()
        return tf.cond(has_value, value, lambda: tf.experimental.Optional.empty(self._element_spec))

    def _next_batch(self) -> Any:
        return self._of_all_replicas(self._one_for_each_replica(lambda iterator: iterator.get_next_as_list()))

    def _next_optionals(self) -> list[tf.experimental.Optional]:
        return self._one_for_each_replica(lambda iterator: iterator.get_next_as_optional_list())

    def _of_all_replicas(self, batches: list[Any]) -> Any:
        return _without_unknown_rows(input_lib._create_per_replica(batches, self._strategy), of=batches[0])

    def _one_for_each_replica(self, take: Callable[[Any], list[Any]]) -> list[Any]:
        """What `take` returns is for all replicas of this worker; of a plain iterator, for the next one."""
        ((device, iterator),) = zip(self._input_workers.worker_devices, self._iterators, strict=True)
        taken: list[Any] = []
        with tf.device(device):
            while len(taken) < len(self._input_workers.compute_devices_for_worker(0)):
                taken += take(iterator)
        return taken

    @property
    def _type_spec(self) -> GlobalBatchIteratorSpec:
        return GlobalBatchIteratorSpec(
            self._input_workers,
            self._element_spec,
            self._strategy,
            self._options,
            cardinality=self._cardinality,
            enable_get_next_as_optional=False,
        )


class GlobalBatchIteratorSpec(input_lib.DistributedIteratorSpec):
    """Type specification that lets a `GlobalBatchIterator` enter a `tf.function` and stay one."""

    @property
    def value_type(self) -> type:
        return GlobalBatchIterator

    def _from_components(self, components: Any) -> GlobalBatchIterator:
        return GlobalBatchIterator(
            input_workers=self._input_workers,
            components=components,
            element_spec=self._element_spec,
            strategy=self._strategy,
            cardinality=self._cardinality,
            enable_get_next_as_optional=False,
            options=self._options,
        )


# A plain iterator instead of one that feeds several devices: CPUs need no feeding, and setting the other one up and
# down takes 0.1 s for each device, several times an epoch.
_HOST_INPUT = tf.distribute.InputOptions(
    experimental_fetch_to_device=False,
    experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
)


def _shrink_batches(dataset: tf.data.Dataset, workers: int) -> tf.data.Dataset:
    """Divides the batch size by the number of workers, as `tf.distribute` does with datasets that the user shards."""
    size = int(distribute.compute_batch_size(dataset))
    if size < 0 or size % workers:
        raise ValueError(
            f"Received: AutoShardPolicy.OFF and batches of {size if size > 0 else 'unknown'} size for {workers} "
            f"workers. Expected: a dataset that ends in `.batch(n)`, with n, the global batch size, a multiple of "
            f"{workers}: each worker takes n / {workers} rows of its own dataset in every step."
        )
    return dataset.rebatch(size // workers)


def _without_unknown_rows(distributed: Any, of: Any, none: Any = None) -> Any:
    """A distributed batch, or its specification, in which a number that nobody knows is not one for each replica.

    `tf.experimental.Optional`, in which Keras carries batches with `steps_per_execution`, takes None, but no
    `PerReplica` of it.
    """
    unknown = isinstance(of, GlobalBatch) and (of.global_rows is None or isinstance(of.global_rows, tf.NoneTensorSpec))
    return distributed._replace(global_rows=none) if unknown else distributed


def _are_cpus(devices: tuple[str, ...]) -> bool:
    return all("CPU" in device for device in devices)


class GlobalBatchDataset(input_lib.DistributedDatasetsFromFunction):
    """What `experimental_distribute_dataset` of a tfdist strategy returns.

    Args:
        dataset: a dataset of global batches, the same on every worker; or, with `manual`, of this worker's rows.
        extended: the strategy's extended part.
        options: the user's `tf.distribute.InputOptions`.
        count: whether elements are `GlobalBatch`es.
        manual: whether the user has sharded the data by hand (`AutoShardPolicy.OFF`).
        shrunk: whether its batches are already those that this worker takes in a step.

    Attributes:
        source: the dataset with one element for each step.
        manual: as given.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        extended: Any,
        options: Any = None,
        *,
        count: bool = False,
        manual: bool = False,
        shrunk: bool = False,
    ):
        workers, worker = extended._input_position()
        replicas = len(extended.worker_devices)
        self.manual = manual
        self._extended, self._input_options, self._count = extended, options, count
        self.source = dataset = _shrink_batches(dataset, workers) if manual and not shrunk else dataset
        if workers * replicas > 1:
            share = (1, 0) if manual else (workers, worker)
            dataset = rows_of_worker(dataset, *share, replicas, count, manual)
        super().__init__(
            input_workers=extended._input_workers_with_options(options),
            strategy=extended._container_strategy(),
            input_contexts=[tf.distribute.InputContext(workers, worker, workers * replicas)],
            dataset_fn=lambda _: dataset,
            options=_HOST_INPUT if options is None and _are_cpus(extended.worker_devices) else options,
        )
        self._enable_get_next_as_optional = False
        self._element_spec = _without_unknown_rows(
            self._element_spec, of=dataset.element_spec, none=tf.NoneTensorSpec()
        )

    def skip(self, steps: int) -> GlobalBatchDataset:
        """The same without its first steps. A step of data that the user has sharded takes only a part of a batch."""
        how = {"count": self._count, "manual": self.manual, "shrunk": True}
        return GlobalBatchDataset(self.source.skip(steps), self._extended, self._input_options, **how)

    def __iter__(self) -> GlobalBatchIterator:
        iterators = input_lib._create_iterators_per_worker(
            self._datasets,
            self._input_workers,
            options=self._options,
            canonicalize_devices=getattr(self._strategy, "_canonicalize_devices", True),
        )
        iterator = GlobalBatchIterator(
            input_workers=self._input_workers,
            iterators=iterators,
            strategy=self._strategy,
            cardinality=self._cardinality,
            options=self._options,
        )
        iterator._element_spec = self._element_spec
        return iterator
