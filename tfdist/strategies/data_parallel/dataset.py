"""Which rows of each batch a replica gets.

`tf.distribute` shards a dataset and then makes batches of what each worker has; which rows meet in a step, and how
many, depends on the number of workers. Here every worker runs the user's pipeline and keeps its own rows of each
global batch, so a step sees exactly the rows that one process would see. All workers have the same number of steps by
construction; so, unlike `tf.distribute.DistributedDataset`, no collective is needed to find out whether data is left.

rows of a global batch of 10 over 4 replicas:   0 1 2 | 3 4 5 | 6 7 | 8 9
rows of a last batch of 3 over 4 replicas:      0 | 1 | 2 | (none: row 0 stands in, with weight 0)
rows of a batch of 8 with batch_shares=[3, 1]:  0 1 2 3 4 5 | 6 7

From top to bottom:

ReplicaBatch                what a replica gets in a step
distribute_in_common_order  the dataset that `fit` gets, and the order in which all processes read it
ReplicaBatchDataset         it, and its iterator
cut_for_worker              each batch of a dataset, cut into what the replicas of this worker get; where Keras makes
                            batches of arrays (`array_source`), only these rows are ever taken
cut_for_replica             one batch, cut; numbers of rows may be ints or tensors
count_rows                  how many rows a batch has
sample_of                   what tells a batch from others
warn_of_other_rows          components with other numbers of rows than the rest
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.arguments import is_new
from tfdist.compat.upstream import ArrayDataAdapter, data_distribute, distribute_utils, input_lib, nest
from tfdist.inspection.datasets import (
    NoOrderError,
    draws_numbers,
    glance_at_arrays,
    goes_by_processors,
    in_order,
    order_of,
    rows_of_arrays,
    runs_python,
)
from tfdist.runtime.progress import after

_log = logging.getLogger("tfdist")
# Names of components of which a warning was given.
_WARNED: set[tuple[str, ...]] = set()
# So many values of a row, and of these dtypes, tell a batch from others.
_SAMPLED = 32
_NUMBERS = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int8, tf.uint8, tf.int16, tf.uint16, tf.int32, tf.int64)
# How a batch is cut: into so many equal pieces, or where each of them ends, as a part of the rows: (0.75, 1.0). These
# may be scalar tensors.
Pieces = int | tuple[Any, ...]
# Nothing here needs AutoGraph, which takes a second to find that out.
_as_it_is = tf.autograph.experimental.do_not_convert

_ORDER_IS_GIVEN = (
    "The dataset has no order of its own (%s): all processes read it in the same one, and nothing needs to be done. To "
    "choose the order, give it seeds, and no deterministic=False; TensorFlow Datasets sets that for shuffle_files=True "
    "unless there is a read_config=tfds.ReadConfig(shuffle_seed=1)."
)
# What comes after the rows of arrays were taken.
_KEEPS_ELEMENTS = ("_PrefetchDataset", "_OptionsDataset", "_SkipDataset")
# A plain iterator instead of one that feeds several devices: CPUs need no feeding, and setting the other one up and
# down takes 0.1 s for each device, several times an epoch.
_HOST_INPUT = tf.distribute.InputOptions(
    experimental_fetch_to_device=False,
    experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
)


class WholeBatch(NamedTuple):
    """A global batch that the step cuts, since shares may change, and batches are read ahead.

    Attributes:
        data: its rows.
        sample: as in `ReplicaBatch`.
    """

    data: Any
    sample: Any


class ReplicaBatch(NamedTuple):
    """A replica's share of a global batch, as Keras' steps receive it.

    Attributes:
        data: the replica's rows.
        rows: how many of them count; 0 if a row stands in for none (int32 scalar).
        global_rows: number of rows of the whole batch (int32 scalar); `None` if only the workers together know.
        sample: numbers that tell the global batch from others (`sample_of`); nothing where no other worker has it.
    """

    data: Any
    rows: Any
    global_rows: Any
    sample: Any = ()


def distribute_in_common_order(extended: Any, dataset: tf.data.Dataset, options: Any, by_tensorflow: Callable) -> Any:
    """What `experimental_distribute_dataset` returns: a dataset that all processes read in one order.

    Args:
        extended: the strategy's extended part.
        dataset: the user's dataset of global batches.
        options: the user's `tf.distribute.InputOptions`.
        by_tensorflow: what TensorFlow's strategy does, for data that TensorFlow shards.

    Raises:
        ValueError: if the processes have different datasets, or cannot be given one order.
    """
    distribute = functools.partial(_distribute, extended, options=options, by_tensorflow=by_tensorflow)
    strategy, found = extended._container_strategy(), distribute(dataset)
    if not strategy._peers:
        return found
    manual = getattr(found, "manual", True)
    if strategy._keras_asks_for_data:
        rows, glance = rows_of_arrays(strategy._epoch_iterator), glance_at_arrays(strategy._epoch_iterator)
        strategy._peers.check_same_dataset(dataset, manual, rows, glance)
    if manual or array_source(dataset):
        return found
    try:
        ordered = in_common_order(strategy, dataset)
    except NoOrderError as error:
        reason, _, remedy = str(error).partition("; ")
        raise ValueError(
            f"Received: a dataset without one order for all processes: {reason}. Each would have another order, "
            f"and train on some rows twice and on others never. Expected: {remedy}."
        ) from None
    return found if ordered is dataset else distribute(ordered)


def _distribute(extended: Any, dataset: tf.data.Dataset, options: Any, by_tensorflow: Callable) -> Any:
    policies = tf.data.experimental.AutoShardPolicy
    # One process has all files, and all rows: nothing is sharded there.
    is_alone = extended._input_position()[0] == 1
    policy = policies.AUTO if is_alone else dataset.options().experimental_distribute.auto_shard_policy
    for_keras = extended._container_strategy()._keras_asks_for_data
    # Workers may have different numbers of batches: TensorFlow lets them agree at every step.
    may_differ = policy == policies.OFF and dataset.cardinality() == tf.data.UNKNOWN_CARDINALITY
    if policy == policies.FILE or may_differ or (policy == policies.OFF and not for_keras):
        return by_tensorflow(dataset, options)
    return ReplicaBatchDataset(dataset, extended, options, count=for_keras, manual=policy == policies.OFF)


def in_common_order(strategy: Any, dataset: tf.data.Dataset, always: bool = False) -> tf.data.Dataset:
    """As `in_order`, in the order that the chief has for it, and also where that depends on the host."""
    peers = strategy._peers
    if goes_by_processors(dataset):
        processors = peers.gather("processors", len(os.sched_getaffinity(0)), "pass its dataset")
        always = always or len(set(processors)) > 1

    def agree(slots: list[list[int]]) -> list[list[int]]:
        return peers.gather("order", slots, "pass its dataset")[0]

    ordered = in_order(dataset, shared=True, agree=agree, always=always)
    reasons = [] if ordered is dataset else order_of(ordered).reasons
    if reasons and strategy.is_chief and is_new(strategy, "order"):
        _log.warning(_ORDER_IS_GIVEN, ", ".join(reasons))
    return ordered


class ReplicaBatchDataset(input_lib.DistributedDatasetsFromFunction):
    """What `experimental_distribute_dataset` of a tfdist strategy returns.

    Args:
        dataset: a dataset of global batches, the same on every worker; or, with `manual`, of this worker's rows.
        extended: the strategy's extended part.
        options: the user's `tf.distribute.InputOptions`.
        count: whether elements are `ReplicaBatch`es.
        manual: whether the user has sharded the data by hand (`AutoShardPolicy.OFF`).
        shrunk: whether its batches are already those that this worker takes in a step.

    Attributes:
        source: the dataset with one element for each step.
        manual: as given.
        is_whole: whether elements are `WholeBatch`es.
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
        strategy = extended._container_strategy()
        is_whole = count and not manual and strategy._automatic_shares is not None
        if is_whole:
            dataset = _whole_batches(dataset)
        elif workers * replicas > 1:
            share, pieces = ((1, 0), replicas) if manual else ((workers, worker), strategy._pieces)
            dataset = cut_for_worker(dataset, *share, replicas, count, manual, pieces)
        on_host = is_whole or (options is None and _are_cpus(extended.worker_devices))
        super().__init__(
            input_workers=extended._input_workers_with_options(options),
            strategy=strategy,
            input_contexts=[tf.distribute.InputContext(workers, worker, workers * replicas)],
            dataset_fn=lambda _: dataset,
            options=_HOST_INPUT if on_host else options,
        )
        self._enable_get_next_as_optional = False
        spec = dataset.element_spec
        self.is_whole = is_whole
        self._element_spec = spec if is_whole else _without_nothing(self._element_spec, of=spec)

    @property
    def cardinality(self) -> Any:
        """The number of steps, as of TensorFlow's distributed datasets; `_cardinality` is that of cut batches."""
        return input_lib._cardinality(self.source)

    def skip(self, steps: int) -> ReplicaBatchDataset:
        """The same without its first steps. A step of data that the user has sharded takes only a part of a batch."""
        return self.with_source(self.source.skip(steps))

    def with_source(self, source: tf.data.Dataset) -> ReplicaBatchDataset:
        """As this one, with another dataset of one element for each step."""
        how = {"count": self._count, "manual": self.manual, "shrunk": True}
        return ReplicaBatchDataset(source, self._extended, self._input_options, **how)

    def __iter__(self) -> ReplicaBatchIterator:
        iterators = input_lib._create_iterators_per_worker(
            self._datasets,
            self._input_workers,
            options=self._options,
            canonicalize_devices=getattr(self._strategy, "_canonicalize_devices", True),
        )
        iterator = ReplicaBatchIterator(
            input_workers=self._input_workers,
            iterators=iterators,
            strategy=self._strategy,
            cardinality=self._cardinality,
            options=self._options,
        )
        iterator._element_spec = self._element_spec
        return iterator

    @property
    def _type_spec(self) -> ReplicaBatchDatasetSpec:
        return ReplicaBatchDatasetSpec(self._input_workers, self._element_spec, self._strategy, self._options)


class ReplicaBatchDatasetSpec(input_lib.DistributedDatasetsFromFunctionSpec):
    """Type specification that lets a `ReplicaBatchDataset` enter a `tf.function` and stay one: to be iterated over."""

    @property
    def value_type(self) -> type:
        return ReplicaBatchDataset

    def _from_components(self, components: Any) -> ReplicaBatchDataset:
        dataset = ReplicaBatchDataset.__new__(ReplicaBatchDataset)
        input_lib.DistributedDatasetsFromFunction.__init__(
            dataset,
            input_workers=self._input_workers,
            strategy=self._strategy,
            components=components,
            element_spec=self._element_spec,
            options=self._options,
        )
        dataset.source, dataset._enable_get_next_as_optional = components[0], False
        return dataset


class ReplicaBatchIterator(input_lib.DistributedIterator):
    """Iterator of `ReplicaBatchDataset`: all replicas of all workers run out of data at the same step.

    What compiled functions take from it is counted by the strategy's `_input_meter`.
    """

    def get_next(self, name: str | None = None) -> Any:
        meter = self._strategy._input_meter
        if not meter.is_counting:
            return self._next_batch()
        batch, seconds = meter.timed(self._next_batch)
        meter.count(*_rows_and_manual(batch), seconds)
        return after(seconds, batch)

    def get_next_as_optional(self) -> tf.experimental.Optional:
        meter = self._strategy._input_meter
        optionals, seconds = meter.timed(self._next_optionals) if meter.is_counting else (self._next_optionals(), None)

        def value() -> tf.experimental.Optional:
            per_replica = self._make_per_replica([optional.get_value() for optional in optionals])
            if seconds is not None:
                meter.count(*_rows_and_manual(per_replica), seconds)
            return tf.experimental.Optional.from_value(per_replica)

        with tf.control_dependencies([] if seconds is None else [seconds]):
            has_value = optionals[0].has_value()
        return tf.cond(has_value, value, lambda: tf.experimental.Optional.empty(self._element_spec))

    def _next_batch(self) -> Any:
        return self._make_per_replica(self._one_for_each_replica(lambda iterator: iterator.get_next_as_list()))

    def _next_optionals(self) -> list[tf.experimental.Optional]:
        return self._one_for_each_replica(lambda iterator: iterator.get_next_as_optional_list())

    def _make_per_replica(self, batches: list[Any]) -> Any:
        if isinstance(batches[0], WholeBatch):
            return batches[0]
        return _without_nothing(input_lib._create_per_replica(batches, self._strategy), of=batches[0])

    def _one_for_each_replica(self, take: Callable[[Any], list[Any]]) -> list[Any]:
        """What `take` returns is for all replicas of this worker; of a plain iterator, for the next one."""
        ((device, iterator),) = zip(self._input_workers.worker_devices, self._iterators, strict=True)
        taken: list[Any] = []
        is_whole = isinstance(self._element_spec, WholeBatch)
        with tf.device(device):
            while len(taken) < (1 if is_whole else len(self._input_workers.compute_devices_for_worker(0))):
                taken += take(iterator)
        return taken

    @property
    def _type_spec(self) -> ReplicaBatchIteratorSpec:
        return ReplicaBatchIteratorSpec(
            self._input_workers,
            self._element_spec,
            self._strategy,
            self._options,
            cardinality=self._cardinality,
            enable_get_next_as_optional=False,
        )


class ReplicaBatchIteratorSpec(input_lib.DistributedIteratorSpec):
    """Type specification that lets a `ReplicaBatchIterator` enter a `tf.function` and stay one."""

    @property
    def value_type(self) -> type:
        return ReplicaBatchIterator

    def _from_components(self, components: Any) -> ReplicaBatchIterator:
        return ReplicaBatchIterator(
            input_workers=self._input_workers,
            components=components,
            element_spec=self._element_spec,
            strategy=self._strategy,
            cardinality=self._cardinality,
            enable_get_next_as_optional=False,
            options=self._options,
        )


def _rows_and_manual(batch: Any) -> tuple[Any, bool]:
    """The number of rows of a distributed batch, and whether they are only those of this process."""
    with tf.device("CPU:0"):
        if isinstance(batch, WholeBatch):
            return count_rows(batch.data), False
        if not isinstance(batch, ReplicaBatch):
            return count_rows(batch) if _batched(batch) else 0, False
        rows, whole = (list(getattr(value, "values", [value])) for value in (batch.rows, batch.global_rows))
        return (tf.add_n(rows), True) if whole[0] is None else (whole[0], False)


def _shrink_batches(dataset: tf.data.Dataset, workers: int) -> tf.data.Dataset:
    """Divides the batch size by the number of workers, as `tf.distribute` does with datasets that the user shards."""
    size = int(data_distribute.compute_batch_size(dataset))
    if size < 0 or size % workers:
        raise ValueError(
            f"Received: AutoShardPolicy.OFF and batches of {size if size > 0 else 'unknown'} size for {workers} "
            f"workers. Expected: a dataset that ends in `.batch(n)`, with n, the global batch size, a multiple of "
            f"{workers}: each worker takes n / {workers} rows of its own dataset in every step."
        )
    return dataset.rebatch(size // workers)


def _without_nothing(distributed: Any, of: Any) -> Any:
    """A distributed batch of Keras, or its specification, in which what is nothing is not one for each replica.

    `tf.experimental.Optional`, in which Keras carries batches with `steps_per_execution`, takes None, but no
    `PerReplica` of it.
    """

    def whole(own: Any, spread: Any) -> Any:
        return own if own is None or isinstance(own, tf.NoneTensorSpec) else spread

    return tf.nest.map_structure(whole, of, distributed) if isinstance(of, ReplicaBatch) else distributed


def _are_cpus(devices: tuple[str, ...]) -> bool:
    return all("CPU" in device for device in devices)


def cut_for_worker(
    dataset: tf.data.Dataset,
    num_workers: int,
    worker: int,
    replicas: int,
    count: bool = False,
    manual: bool = False,
    pieces: Pieces | None = None,
) -> tf.data.Dataset:
    """Cuts each global batch of `dataset` into this worker's pieces, one element per local replica.

    Args:
        dataset: a dataset of global batches.
        num_workers: how many workers share each batch.
        worker: index of this worker.
        replicas: number of replicas on this worker.
        count: whether elements are `ReplicaBatch`es. Plain elements have no stand-ins: they may have no rows.
        manual: whether the user has sharded the data, so that only this worker's rows of a step are known here.
        pieces: how a batch is cut; `None`: into equal pieces.

    Returns:
        A dataset with `replicas` elements for each element of `dataset`. Local replica `k` of worker `w` gets piece
        `k * num_workers + w`: the order in which Keras' `predict` puts the replicas' results together.
    """
    if (source := array_source(dataset)) is not None:
        return _cut_arrays(source, dataset.options(), num_workers, worker, replicas, count, manual, pieces)
    pieces = pieces or num_workers * replicas
    is_tuple = _is_unpacked(dataset)
    sample = _sampler_of(dataset) if count and num_workers > 1 else None

    def cut(components: tuple, replica: int) -> Any:
        batch = components if is_tuple else components[0]
        piece = replica * num_workers + worker
        if count:
            cut = cut_for_replica(batch, pieces, piece, whole=not manual)
            # One replica of a process notes it.
            return cut._replace(sample=sample(batch if replica == 0 else ())) if sample else cut
        warn_of_other_rows(batch, num_workers * replicas)
        return cut_piece(batch, pieces, piece)

    if replicas == 1:
        return dataset.map(_as_it_is(lambda *components: cut(components, 0)))

    @_as_it_is
    def one_element_per_replica(*components: Any) -> tf.data.Dataset:
        first, *others = (tf.data.Dataset.from_tensors(cut(components, k)) for k in range(replicas))
        for other in others:
            first = first.concatenate(other)
        return first

    return dataset.flat_map(one_element_per_replica)


def _is_unpacked(dataset: tf.data.Dataset) -> bool:
    """Whether functions of a dataset get the components of an element one by one: a named tuple comes whole."""
    return type(dataset.element_spec) is tuple


def _whole_batches(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """A dataset of `WholeBatch`es."""
    # Arrays may have other values on each process, where something was drawn without a seed; the log has said so.
    sample = None if array_source(dataset) else _sampler_of(dataset)
    is_tuple = _is_unpacked(dataset)

    @_as_it_is
    def whole(*components: Any) -> WholeBatch:
        data = components if is_tuple else components[0]
        return WholeBatch(data, sample(data) if sample else ())

    return dataset.map(whole)


def _sampler_of(dataset: tf.data.Dataset) -> Callable[[Any], tf.Tensor] | None:
    """`sample_of` for batches of a dataset; `None` where these may differ."""
    # Random numbers that rows are augmented with may differ, and the rows be the same. Nobody knows what Python draws.
    return None if draws_numbers(dataset) else functools.partial(sample_of, is_of_python=runs_python(dataset))


class ArraySource(NamedTuple):
    """What Keras makes the batches of arrays from.

    Attributes:
        indices: a dataset of the numbers of the rows of each batch, int64 vectors.
        arrays: a dataset of the arrays as tensors, the same ones without an end.
        take: returns the rows with these numbers, from an element of `indices` and one of `arrays`.
    """

    indices: tf.data.Dataset
    arrays: tf.data.Dataset
    take: Callable[[tf.Tensor, Any], Any]


def array_source(dataset: tf.data.Dataset) -> ArraySource | None:
    """The source of a dataset that Keras has made from arrays, also after `skip`; `None` for any other dataset."""
    skipped = []
    while type(dataset).__name__ in _KEEPS_ELEMENTS:
        skipped += [dataset._count] if hasattr(dataset, "_count") else []
        dataset = dataset._input_dataset
    take = getattr(getattr(dataset, "_map_func", None), "_func", None)
    # Numbers and arrays, side by side. The numbers are made by functions of the same module.
    sources = getattr(getattr(dataset, "_input_dataset", None), "_datasets", ())
    if getattr(take, "__module__", None) != ArrayDataAdapter.__module__ or len(sources) != 2:
        return None
    indices, arrays = sources
    for count in skipped:
        indices = indices.skip(count)
    return ArraySource(indices, arrays, take)


def _cut_arrays(source: ArraySource, options: tf.data.Options, *arguments: Any) -> tf.data.Dataset:
    """As `cut_for_worker`, but rows of others are never taken: a batch takes no longer with more workers."""

    @_as_it_is
    def take(numbers: Any, arrays: Any) -> Any:
        if isinstance(numbers, ReplicaBatch):
            return numbers._replace(data=source.take(numbers.data, arrays))
        return source.take(numbers, arrays)

    numbers = cut_for_worker(source.indices, *arguments)
    rows = tf.data.Dataset.zip((numbers, source.arrays)).map(take, num_parallel_calls=tf.data.AUTOTUNE)
    return rows.with_options(options).prefetch(tf.data.AUTOTUNE)


def cut_for_replica(batch: Any, pieces: Pieces, piece: int, whole: bool = True) -> ReplicaBatch:
    """Returns one of the pieces of a batch, which is the global batch unless not `whole`."""
    data, rows = cut_piece_or_stand_in(batch, pieces, piece)
    warn_of_other_rows(batch, _number_of(pieces))
    return ReplicaBatch(data, tf.convert_to_tensor(rows), count_rows(batch) if whole else None)


def split_over_replicas(extended: Any, batch: Any, sample: Any = ()) -> Any:
    """Gives each replica its rows of a batch that every process holds whole; the first one has the `sample`."""
    workers, worker = extended._input_position()
    replicas = len(extended.worker_devices)
    # On the host: the first GPU may have no room for the rows of all.
    with tf.device("CPU:0"):
        batch = tf.nest.map_structure(_as_tensor, batch)
        pieces = extended._container_strategy()._pieces
        parts = [cut_for_replica(batch, pieces, k * workers + worker) for k in range(replicas)]
    # Only one replica of a process notes it.
    parts = [
        part._replace(sample=tf.nest.map_structure(tf.zeros_like, sample) if k else sample)
        for k, part in enumerate(parts)
    ]
    return distribute_utils.regroup(parts, always_wrap=True)


def _as_tensor(one: Any) -> Any:
    is_one = one is None or tf.is_tensor(one) or isinstance(one, tf.experimental.Optional)
    return one if is_one else tf.convert_to_tensor(one)


def sample_of(batch: Any, is_of_python: bool) -> tf.Tensor:
    """What tells a batch from others, for `RowsSeen`; machines may compute the same rows with other last bits.

    Returns:
        A number made of some values of the first and the last row, the sum of their sizes, and whether Python has made
        them (float64, `[3]`).
    """
    total = tf.zeros([2], tf.float64)
    for i, leaf in enumerate(tf.nest.flatten(batch)):
        values = leaf.flat_values if isinstance(leaf, tf.RaggedTensor) else getattr(leaf, "values", leaf)
        if not tf.is_tensor(values) or not (values.dtype in (tf.bool, tf.string) or values.dtype in _NUMBERS):
            continue
        values = tf.reshape(values, [1, -1]) if values.shape.rank == 0 else values
        # Spread over the row: its margins may be empty.
        ends = [tf.reshape(rows, [-1]) for rows in (values[:1], values[-1:])]
        values = tf.concat([row[:: tf.maximum(1, tf.size(row) // _SAMPLED)][:_SAMPLED] for row in ends], 0)
        if values.dtype == tf.string:
            values = tf.strings.to_hash_bucket_fast(values, 1 << 20)
        values = tf.cast(values, tf.float64)
        values = tf.where(tf.math.is_finite(values), values, tf.zeros_like(values))
        places = tf.cast(tf.range(tf.size(values)) + 7 * i, tf.float64)
        total += tf.stack([tf.reduce_sum(values * tf.cos(places)), tf.reduce_sum(tf.abs(values))])
    return tf.concat([total, [float(is_of_python)]], 0)


def piece_bounds(rows: Any, pieces: Pieces, piece: int) -> tuple[Any, Any]:
    """Returns `(begin, size)` of one piece of `rows` rows; the sizes of equal pieces differ by at most one.

    Args:
        rows: number of rows, an int or a scalar integer tensor.
        pieces: number of pieces, at least 1, or where each of them ends.
        piece: which piece, from 0.

    Example:
        >>> [piece_bounds(10, 4, i) for i in range(4)]
        [(0, 3), (3, 3), (6, 2), (8, 2)]
        >>> [piece_bounds(10, (0.75, 1.0), i) for i in range(2)]
        [(0, 8), (8, 2)]
    """
    if not isinstance(pieces, int):
        begin, end = (_end(rows, pieces, i) for i in (piece - 1, piece))
        return begin, end - begin
    base, extra = rows // pieces, rows % pieces
    if isinstance(rows, int):
        return piece * base + min(piece, extra), base + int(piece < extra)
    return piece * base + tf.minimum(piece, extra), base + tf.cast(piece < extra, base.dtype)


def _end(rows: Any, ends: tuple[Any, ...], piece: int) -> Any:
    """Where a piece ends: at the row next to its part of all, so that each piece has a row if there are so many.

    Halves go to the even row, in a graph as in Python.
    """
    after = len(ends) - 1 - piece
    if piece < 0:
        return 0 * rows  # of its type
    if isinstance(rows, int) and isinstance(ends[0], float):
        place = max(1, *(round(rows * end) - i for i, end in enumerate(ends[: piece + 1]))) + piece
        return min(place, rows - after) if rows >= len(ends) else min(rows, piece + 1)
    rows = tf.convert_to_tensor(rows)
    parts = tf.convert_to_tensor(ends[: piece + 1], tf.float64)
    places = tf.cast(tf.round(tf.cast(rows, tf.float64) * parts), rows.dtype) - tf.range(piece + 1, dtype=rows.dtype)
    place = tf.maximum(tf.reduce_max(places), 1) + piece
    return tf.where(rows >= len(ends), tf.minimum(place, rows - after), tf.minimum(rows, piece + 1))


def _number_of(pieces: Pieces) -> int:
    return pieces if isinstance(pieces, int) else len(pieces)


def cut_piece_or_stand_in(batch: Any, pieces: Pieces, piece: int, of: Any = None) -> tuple[Any, Any]:
    """Cuts the rows of one replica out of a (nested) batch; components without rows are kept whole.

    A replica for which no row is left gets a copy of the first one, which counts with weight 0: with an empty batch,
    models and metrics may return NaN or fail. Shapes stay static where the number of rows is static and divides.

    Components may have different numbers of rows, such as labelled and unlabelled rows. Each is then cut by its own
    number. As a replica has one weight for all of them, the pieces have to be equal and each number a multiple of
    theirs, or 1: every replica gets such a single row. Several rows for each row of another batch are cut like that
    one.

    Args:
        batch: the batch.
        pieces: number of pieces, at least 1, or where each of them ends.
        piece: which piece, from 0.
        of: number of rows of the batch whose shares these belong to, an int or an int32 scalar; those of `batch` if
            `None`.

    Returns:
        `(share, rows)`, where `rows` is the number of rows that count: 0 for a stand-in.

    Raises:
        ValueError: if no component has rows, or they cannot be cut so that all weights are equal.
        tf.errors.InvalidArgumentError: for the same reason, in the step, if the numbers are not known while tracing.
    """
    counts = [_known_rows(leaf) for leaf in _batched(batch)]
    checks = _check(counts, pieces, of) if pieces != 1 else []

    def cut(leaf: Any) -> Any:
        if not is_batched(leaf):
            # An optional stands for None in what a generator yields; Keras finds those of whole batches only.
            return None if isinstance(leaf, tf.experimental.Optional) else leaf
        total = _known_rows(leaf)
        unit = 1 if of is None else _rows_together(total, of)
        begin, size = (unit * n for n in piece_bounds(total // unit, pieces, piece))
        if isinstance(size, int):
            begin, taken = (begin, size) if size else (0, min(unit, total))
        else:
            begin, taken = tf.where(size > 0, begin, 0), tf.maximum(size, tf.minimum(unit, total))
        return _cut(leaf, begin, taken)

    with tf.control_dependencies(checks):
        total = static_rows(batch) if of is None else of
        total = _largest(counts, batch) if total is None else total
        return tf.nest.map_structure(cut, batch), piece_bounds(total, pieces, piece)[1]


def with_stand_in(batch: Any) -> Any:
    """A batch that a user or TensorFlow has cut, with a row of zeros if it has none.

    TensorFlow makes batches without rows for a worker whose data end before the others', and some kernels fail then.
    Text stays as it is: what looks words up may fail for one that it does not know.
    """
    leaves = [leaf for leaf in _batched(batch) if not _static_rows(leaf)]
    if not leaves or any(leaf.shape.rank is None or leaf.dtype == tf.string for leaf in leaves):
        return batch
    missing = tf.cast(tf.equal(_largest(list(map(_rows, leaves)), batch), 0), tf.int32)

    def fill(leaf: Any) -> Any:
        if not any(leaf is one for one in leaves):
            return leaf
        if isinstance(leaf, tf.RaggedTensor):
            splits = tf.concat([leaf.row_splits, tf.repeat(leaf.row_splits[-1:], missing)], 0)
            return tf.RaggedTensor.from_row_splits(leaf.values, splits, validate=False)
        shape = tf.cast(leaf.dense_shape, tf.int32) if isinstance(leaf, tf.SparseTensor) else tf.shape(leaf)
        widths = tf.maximum(shape[1:], missing)
        if isinstance(leaf, tf.SparseTensor):
            sizes = tf.unstack(tf.concat([shape[:1] + missing, widths], 0), num=leaf.shape.rank)
            # So known sizes stay known.
            sizes[1:] = [
                size if known is None else known for known, size in zip(leaf.shape[1:], sizes[1:], strict=True)
            ]
            return tf.SparseTensor(leaf.indices, leaf.values, tf.cast(tf.stack(sizes), tf.int64))
        row = tf.zeros(tf.concat([[missing], widths], 0), leaf.dtype)
        whole = tf.concat([tf.reshape(leaf, tf.concat([shape[:1], widths], 0)), row], 0)
        return tf.ensure_shape(whole, [None, *leaf.shape[1:]])

    # XLA compiles a step for one shape.
    eager = tf.executing_eagerly()
    with contextlib.nullcontext() if eager else tf.xla.experimental.jit_scope(compile_ops=False):
        return tf.nest.map_structure(fill, batch)


def cut_piece(batch: Any, pieces: Pieces, piece: int) -> Any:
    """Cuts one of the pieces out of every component of a batch that has rows; the piece may be empty."""

    def cut(leaf: Any) -> Any:
        return _cut(leaf, *piece_bounds(_rows(leaf), pieces, piece)) if is_batched(leaf) else leaf

    return tf.nest.map_structure(cut, batch)


def rows_if(wanted: Any, batch: Any) -> Any:
    """All rows of a (nested) batch, or none of them unless `wanted`, a bool scalar."""

    def cut(leaf: Any) -> Any:
        has_rows = tf.is_tensor(leaf) and bool(leaf.shape.rank)
        return _cut(leaf, 0, tf.where(wanted, _rows(leaf), 0)) if has_rows else leaf

    return tf.nest.map_structure(cut, batch)


def _cut(leaf: Any, begin: Any, size: Any) -> Any:
    if not isinstance(leaf, tf.SparseTensor):
        return leaf[begin : begin + size]
    start = tf.concat([[tf.cast(begin, tf.int64)], tf.zeros_like(leaf.dense_shape[1:])], 0)
    extent = tf.concat([[tf.cast(size, tf.int64)], leaf.dense_shape[1:]], 0)
    found = tf.sparse.slice(leaf, start, extent)
    # `tf.sparse.slice` loses the static shape, from which models build their weights.
    sizes = [found.dense_shape[i] if n is None or i == 0 else n for i, n in enumerate(leaf.shape)]
    return tf.SparseTensor(found.indices, found.values, tf.stack([tf.cast(n, tf.int64) for n in sizes]))


def _rows_together(total: Any, of: Any) -> Any:
    """How many of `total` rows belong to each of `of` rows; 1 if these are not equally many."""
    if isinstance(total, int) and isinstance(of, int):
        return max(total // of, 1) if total % of == 0 else 1
    of = tf.maximum(of, 1)
    return tf.where(total % of == 0, tf.maximum(total // of, 1), 1)


def _check(rows: list, pieces: Pieces, of: Any) -> list[tf.Operation]:
    """Refuses components of a batch whose rows cannot be cut so that every replica has the same part of each."""
    multiple = "" if of is None else "a multiple of the rows of the inputs, "
    are_equal = isinstance(pieces, int)
    multiples = f"or multiples of {pieces} (the number of replicas or micro-batches) " if are_equal else ""
    message = (
        f"Expected: the same number of rows in all, {multiple}{multiples}or one row: the rows of a replica have one "
        "weight. "
    )
    message += (
        "`.batch(n, drop_remainder=True)` leaves out a last batch that does not divide."
        if are_equal
        else "Without batch_shares, numbers that divide by the number of replicas are right, too."
    )
    known = rows if of is None else [of, *rows]
    is_static = all(isinstance(count, int) for count in known)
    counts = np.array(known or [1]) if is_static else tf.stack(known)
    largest = np.max if is_static else tf.reduce_max
    whole = largest([largest(counts) if of is None else of, 1])
    fits = (counts % whole == 0) | (counts == 1)
    fits |= ((counts % pieces == 0) & (whole % pieces == 0)) if are_equal else False
    if is_static and not fits.all():
        raise ValueError(f"Received: a batch whose components have {known} rows. {message}")
    if is_static or len(known) < 2:
        return []
    said = ["Received: a batch whose components have these numbers of rows:", counts, message]
    failed = tf.debugging.Assert(tf.reduce_all(fits), said, 32)
    return [] if failed is None else [failed]


def _largest(rows: list, batch: Any) -> tf.Tensor:
    if not rows:
        raise ValueError(
            f"A batch without rows cannot be split over replicas. Received: {batch!r}. "
            "Expected at least one component with a batch dimension; call `.batch(n)` on the dataset."
        )
    return rows[0] if len(rows) == 1 else tf.reduce_max(tf.stack(rows))


def is_batched(leaf: Any) -> bool:
    """Whether a component of a batch has rows. Scalars, `None` and optionals have none."""
    shape = getattr(leaf, "shape", None)
    return shape is not None and not isinstance(leaf, tf.experimental.Optional) and shape.rank != 0


def _batched(batch: Any) -> list:
    return [leaf for leaf in tf.nest.flatten(batch) if is_batched(leaf)]


def static_rows(batch: Any) -> int | None:
    """The number of rows of the largest component of a (nested) batch; `None` if it is not known while tracing."""
    rows = [_static_rows(leaf) for leaf in _batched(batch)]
    return None if None in rows else max(rows, default=None)


def _static_rows(leaf: Any) -> int | None:
    return None if leaf.shape.rank is None else leaf.shape[0]


def count_rows(batch: Any) -> tf.Tensor:
    """The number of rows of the largest component of a (nested) batch, as an int32 scalar.

    Components may be dense, ragged or sparse tensors.

    Raises:
        ValueError: if no component has rows.
    """
    rows = static_rows(batch)
    return _largest([_rows(leaf) for leaf in _batched(batch)], batch) if rows is None else tf.constant(rows)


def _rows(leaf: Any) -> tf.Tensor:
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32)
    return tf.cast(leaf.dense_shape[0], tf.int32) if isinstance(leaf, tf.SparseTensor) else tf.shape(leaf)[0]


def _known_rows(leaf: Any) -> Any:
    """The number of rows: an int if it is known while tracing, else a tensor."""
    rows = _static_rows(leaf)
    return _rows(leaf) if rows is None else rows


def warn_of_other_rows(batch: Any, pieces: int) -> None:
    """Warns of components with other numbers of rows than the rest: they may be for all of its rows, such as anchors.

    What `batch(n)` makes has unknown numbers only. Where just some are known while tracing, a component was added to
    it, and the graph warns.
    """
    names = tuple(name for name, leaf in nest.flatten_with_joined_string_paths(batch) if is_batched(leaf))
    counts = [_known_rows(leaf) for leaf in _batched(batch)]
    known = {count for count in counts if isinstance(count, int) and count != 1}
    if pieces == 1 or not known:
        return
    if all(isinstance(count, int) for count in counts):
        if len(known) > 1:
            _warn(names, counts, pieces)
        return
    found = tf.stack(counts)
    tf.cond(
        tf.reduce_any((found != known.pop()) & (found != 1)),
        lambda: tf.numpy_function(lambda rows: _warn(names, rows.tolist(), pieces), [found], tf.bool),
        lambda: False,
    )


def _warn(names: tuple[str, ...], rows: list[int], pieces: int) -> bool:
    """Warns of components with other numbers of rows, once in a process."""
    if names in _WARNED:
        return False
    _WARNED.add(names)
    each = ", ".join(f"{count} in '{name}'" for name, count in zip(names, rows, strict=True))
    warnings.warn(
        f"Received: a batch whose components have different numbers of rows: {each}. Each replica or micro-batch gets "
        f"1/{pieces} of the rows of each, whereas one process has all of them in a step. Expected: as many rows in "
        "all. If one is for all rows of the others (anchors, a vocabulary), make it a constant or a weight of the "
        "model, or repeat it for each row: `tf.repeat(anchors[None], rows, 0)`. Rows that a mean is taken of by "
        "themselves (labelled and unlabelled ones) are right as they are.",
        stacklevel=2,
    )
    return True
