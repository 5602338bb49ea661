"""The data of a training: drawn by the coordinator and sent, or read by the workers; and how values travel.

CoordinatorDataset   the coordinator draws batches, and sends them to the workers as dense tensors
WorkerDataset        each worker reads its shard of the data by an input pipeline of its own
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from tfdist.compat.upstream import NoneTensorSpec, graph_pb2, input_lib, op_def_registry
from tfdist.compat.upstream import coordinator_values as upstream
from tfdist.inspection.datasets import draws, draws_seeds, family_of, has_order, pipeline, seeds
from tfdist.strategies.parameter_server.dispatcher import Worker

COORDINATOR = "/job:chief/replica:0/task:0/device:CPU:0"


class CoordinatorDataset(input_lib.DistributedDatasetsFromFunction):
    """A dataset that stays on the coordinator; what Keras gets from `experimental_distribute_dataset`.

    The base class is there for Keras only, which recognises it if a user passes the dataset to `fit` directly; nothing
    of it is used.

    Args:
        source: the user's dataset.
        on_iterator: called with each iterator that is made.

    Attributes:
        steps: how many batches Keras wants at most; `None` for all of them.
    """

    def __init__(self, source: tf.data.Dataset, on_iterator: Callable[[BatchIterator], Any]):
        self.source, self._on_iterator = source, on_iterator
        self.steps: int | None = None

    @property
    def element_spec(self) -> Any:
        return self.source.element_spec

    @property
    def cardinality(self) -> int:
        return int(self.source.cardinality())

    def map(self, function: Callable) -> CoordinatorDataset:
        """What Keras does to a dataset for `class_weight`."""
        return CoordinatorDataset(self.source.map(function), self._on_iterator)

    def prefetch(self, size: int) -> CoordinatorDataset:
        """The same."""
        return CoordinatorDataset(self.source.prefetch(size), self._on_iterator)

    def build(self) -> NoReturn:
        """Called by `create_per_worker_dataset` of TensorFlow's coordinator."""
        raise ValueError(
            "Received: what strategy.experimental_distribute_dataset returns, for create_per_worker_dataset. Expected: "
            "the tf.data.Dataset itself, or a function that returns one."
        )

    def __iter__(self) -> BatchIterator:
        iterator = BatchIterator(self.source, self.steps)
        self._on_iterator(iterator)
        return iterator


class BatchIterator:
    """The batches of a dataset in their order, whole for Keras or as the dense tensors that a worker gets.

    Args:
        dataset: whose batches.
        steps: how many of them will be asked for at most; `None`: all.

    Attributes:
        spec: the specification of a batch, as `batch_spec` returns it.
        issued: how many batches were drawn by `next`.
        last: the batch that was drawn last by `next`.
    """

    def __init__(self, dataset: tf.data.Dataset, steps: int | None = None):
        with tf.device(COORDINATOR):
            self._iterator = iter(dataset)
        self.spec = batch_spec(dataset.element_spec)
        leaves = tf.nest.flatten(dataset.element_spec)
        self._is_dense = all(isinstance(leaf, (tf.TensorSpec, NoneTensorSpec)) for leaf in leaves)
        self._ahead: collections.deque[list[tf.Tensor]] = collections.deque()
        self._steps = steps
        self.issued, self.last = 0, None

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> Any:
        self.last = unflatten(self.spec, self.draw(1)[0])
        self.issued += 1
        return self.last

    def draw(self, count: int) -> list[list[tf.Tensor]]:
        """The next batches, flattened; fewer at the end.

        Raises:
            StopIteration: if there is none.
        """
        self._fill(count)
        if not self._ahead:
            raise StopIteration
        return [self._ahead.popleft() for _ in range(min(count, len(self._ahead)))]

    def look_ahead(self, position: int) -> list[tf.Tensor] | None:
        """A batch that will be drawn later, 0 is the next one; `None` if there is none."""
        if self._steps is not None and self.issued + position >= self._steps:
            return None
        self._fill(position + 1)
        return self._ahead[position] if position < len(self._ahead) else None

    def _fill(self, count: int) -> None:
        with contextlib.suppress(StopIteration):
            while len(self._ahead) < count:
                self._ahead.append(self._draw())

    def _draw(self) -> list[tf.Tensor]:
        with tf.device(COORDINATOR):
            if not self._is_dense:
                return flatten(next(self._iterator))
            try:
                # What the iterator does itself, without putting the batch together and waiting for other operations.
                return tf.raw_ops.IteratorGetNext(
                    iterator=self._iterator._iterator_resource,
                    output_types=self._iterator._flat_output_types,
                    output_shapes=self._iterator._flat_output_shapes,
                )
            except tf.errors.OutOfRangeError:
                raise StopIteration from None


def batch_spec(element_spec: Any) -> Any:
    """The specification of a batch, with `None` where there is no tensor.

    Example:
        >>> batch_spec((tf.TensorSpec([None, 2]), NoneTensorSpec()))
        (TensorSpec(shape=(None, 2), dtype=tf.float32, name=None), None)
    """
    absent = (NoneTensorSpec, tf.OptionalSpec)
    return tf.nest.map_structure(lambda spec: None if isinstance(spec, absent) else spec, element_spec)


def spec_of(batch: Any) -> Any:
    """The specification of batches like this one, with any number of rows.

    Example:
        >>> spec_of((tf.zeros([3, 2]), None))
        (TensorSpec(shape=(None, 2), dtype=tf.float32, name=None), None)
    """

    def of(value: Any) -> Any:
        if _is_absent(value):
            return None
        return tf.type_spec_from_value(value if tf.is_tensor(value) else tf.convert_to_tensor(value))

    return any_rows(tf.nest.map_structure(of, batch))


def any_rows(spec: Any) -> Any:
    """The same specification, for any number of rows.

    Example:
        >>> any_rows((tf.TensorSpec([8, 2]), None))
        (TensorSpec(shape=(None, 2), dtype=tf.float32, name=None), None)
    """

    def relaxed(spec: Any) -> Any:
        if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
            return spec
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)

    return tf.nest.map_structure(relaxed, spec)


def is_dense(spec: Any) -> bool:
    """Whether a batch is made of dense tensors only, which can be cut and joined.

    Example:
        >>> is_dense((tf.TensorSpec([None, 2]), None)), is_dense(tf.RaggedTensorSpec([None, None]))
        (True, False)
    """
    return all(x is None or isinstance(x, tf.TensorSpec) for x in tf.nest.flatten(spec))


def rows_of(tensors: list[tf.Tensor]) -> int | None:
    """How many rows these tensors have, if that is one number.

    Example:
        >>> rows_of([tf.zeros([3, 2]), tf.zeros([3])]), rows_of([tf.zeros([3]), tf.zeros([])])
        (3, None)
    """
    counts = {tensor.shape[0] if tensor.shape.rank else None for tensor in tensors}
    return counts.pop() if len(counts) == 1 else None


def flatten(batch: Any) -> list[tf.Tensor]:
    """The dense tensors of a batch."""
    return [tf.convert_to_tensor(x) for x in tf.nest.flatten(batch, expand_composites=True) if not _is_absent(x)]


def flatten_spec(spec: Any) -> list[tf.TensorSpec]:
    """The specifications of the dense tensors of a batch."""
    return [x for x in tf.nest.flatten(spec, expand_composites=True) if x is not None]


def unflatten(spec: Any, tensors: list[tf.Tensor]) -> Any:
    """The batch again, as `flatten` has taken it apart."""
    rest = iter(tensors)
    flat = [None if x is None else next(rest) for x in tf.nest.flatten(spec, expand_composites=True)]
    return tf.nest.pack_sequence_as(spec, flat, expand_composites=True)


def _is_absent(value: Any) -> bool:
    # Keras' generators return an `Optional` where there are no targets or weights.
    return value is None or isinstance(value, tf.experimental.Optional)


def fetch(tensor: tf.Tensor) -> np.ndarray:
    """The value of a tensor that may be on another process.

    `tensor.numpy()`, and making a tensor while a device of another process is entered, hold Python's lock until that
    process answers. If it hangs, all threads of the coordinator hang. An operation (`identity`) does not hold it.

    Example:
        >>> fetch(tf.constant([1, 2])).tolist()  # doctest: +SKIP
        [1, 2]
    """
    with tf.device(COORDINATOR):
        return tf.identity(tensor).numpy()


def local_constant(value: np.ndarray) -> tf.Tensor:
    """A tensor on the coordinator, whatever device is entered.

    Example:
        >>> int(local_constant(np.int32(3)))  # doctest: +SKIP
        3
    """
    with tf.device(COORDINATOR):
        return tf.constant(value)


class Packing:
    """Packs tensors of known shapes into one vector for each dtype, and unpacks them.

    Each transfer between processes costs as much as some kilobytes, so few large tensors travel faster than many small
    ones.

    Args:
        shapes: the shapes of the tensors.
        dtypes: the dtypes of the tensors.

    Example:
        >>> packing = Packing([(2,), ()], [tf.float32, tf.float32])
        >>> [vector] = packing.pack([tf.constant([1.0, 2.0]), tf.constant(3.0)])
        >>> [array.tolist() for array in packing.unpack([vector.numpy()])]
        [[1.0, 2.0], 3.0]
    """

    def __init__(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[tf.DType]):
        self._shapes = [tuple(shape) for shape in shapes]
        self._dtypes = [tf.as_dtype(dtype) for dtype in dtypes]
        self._groups = list(dict.fromkeys(self._dtypes))

    @property
    def length(self) -> int:
        """The number of values in all vectors."""
        return sum(math.prod(shape) for shape in self._shapes)

    def pack(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """One vector for each dtype, in the order of the first tensors of it."""
        return [
            tf.concat([tf.reshape(t, [-1]) for t, own in zip(tensors, self._dtypes, strict=True) if own == dtype], 0)
            for dtype in self._groups
        ]

    def unpack(self, vectors: Sequence[Any]) -> list[Any]:
        """The tensors again, from vectors that are arrays or tensors."""
        offsets = dict.fromkeys(self._groups, 0)
        found = dict(zip(self._groups, vectors, strict=True))
        arrays = []
        for shape, dtype in zip(self._shapes, self._dtypes, strict=True):
            begin = offsets[dtype]
            offsets[dtype] = end = begin + math.prod(shape)
            part = found[dtype][begin:end]
            arrays.append(part.reshape(shape) if isinstance(part, np.ndarray) else tf.reshape(part, shape))
        return arrays


class WorkerDataset(input_lib.DistributedDatasetsFromFunction):
    """A dataset in shards, one a worker.

    The base class is there for Keras only, which recognises it; nothing of it is used.

    Args:
        shards: for each worker, the dataset that it reads.
        whole: the whole dataset, if there is one.

    Attributes:
        element_spec: of the batches.
        cardinality: the number of batches; -1 for infinitely many, -2 if it is unknown.
    """

    def __init__(self, shards: list[tf.data.Dataset], whole: CoordinatorDataset | None = None):
        self._datasets = shards
        self._cardinalities = [int(shard.cardinality()) for shard in shards]
        self._built: list[dict[Worker, tuple[int, tf.data.Dataset]]] = [{} for _ in shards]
        self.whole, self._spec = whole, shards[0].element_spec

    @property
    def element_spec(self) -> Any:
        return self._spec

    @property
    def cardinality(self) -> int:
        unknown = [count for count in self._cardinalities if count < 0]
        return min(unknown) if unknown else sum(self._cardinalities)

    def map(self, function: Callable) -> WorkerDataset:
        """What Keras does to a dataset for `class_weight`."""
        return WorkerDataset([shard.map(function) for shard in self._datasets], self.whole)

    def prefetch(self, size: int) -> WorkerDataset:
        """The same."""
        return WorkerDataset([shard.prefetch(size) for shard in self._datasets], self.whole)

    def build(self) -> NoReturn:
        """Called by `create_per_worker_dataset` of TensorFlow's coordinator."""
        raise ValueError(
            "Received: what strategy.distribute_datasets_from_function returns, for create_per_worker_dataset. "
            "Expected: a tf.function that calls strategy.distribute_datasets_from_function, or a function that returns "
            "a tf.data.Dataset."
        )

    def __iter__(self) -> WorkerIterator:
        return WorkerIterator(self)

    def shards(self) -> list[Shard]:
        """The shards, at their beginning."""
        return [
            Shard(graph, self._spec, count if count >= 0 else None, count == tf.data.INFINITE_CARDINALITY, built)
            for graph, count, built in zip(self._graphs, self._cardinalities, self._built, strict=True)
        ]

    @functools.cached_property
    def _graphs(self) -> list[tf.Tensor]:
        source = self.whole.source if self.whole is not None else None
        if source is not None and (draws_seeds(source) or not has_order(source)):
            raise ValueError(
                "Received: a dataset that is shuffled, and ParameterServerStrategy(worker_input=True). Each worker "
                "would shuffle it for itself, and take its part of another order: some rows twice, some never. "
                "Expected: a dataset function, `strategy.distribute_datasets_from_function(f)`, which shards before it "
                "shuffles; or worker_input=False."
            )
        return [_serialised(dataset) for dataset in self._datasets]


def shards_of_dataset(dataset: CoordinatorDataset, workers: int) -> WorkerDataset:
    """Every worker runs the whole pipeline and trains on each `workers`-th batch: the batches are those of one process.

    What cannot be sent to a worker, or is shuffled, is refused with a ValueError when a step asks for data.
    """
    return WorkerDataset([dataset.source.shard(workers, index) for index in range(workers)], dataset)


def shards_of_function(function: Callable, workers: int) -> WorkerDataset:
    """Every worker runs the pipeline that the function returns for it.

    Args:
        function: takes a `tf.distribute.InputContext` and returns a dataset, of batches.
        workers: how many there are.

    Raises:
        ValueError: if a dataset cannot be sent to a worker, or the function returns something else.
    """
    shards = [function(tf.distribute.InputContext(workers, index, num_replicas_in_sync=1)) for index in range(workers)]
    for shard in shards:
        if not isinstance(shard, tf.data.Dataset):
            raise ValueError(
                f"Received: a dataset function that returns {type(shard).__name__}. Expected: a tf.data.Dataset, of "
                "batches, for the worker number input_context.input_pipeline_id."
            )
    _warn_of_order(shards)
    return WorkerDataset(shards)


def _warn_of_order(shards: Sequence[tf.data.Dataset]) -> None:
    """Warns of workers that take their parts of different orders."""
    parts = [[part for part in pipeline(shard) if family_of(type(part).__name__) == "Shard"] for shard in shards]
    before = [[seeds(source) for part in own for source in part._inputs()] for own in parts]
    differ = any([0, 0] in drawn for own in before for drawn in own) or any(own != before[0] for own in before)
    if differ and len(shards) > 1:
        warnings.warn(
            "Received: a dataset function that shards rows or files behind a shuffle without a seed (list_files "
            "shuffles, too). Each worker takes its part of another order, so that some rows come twice in an epoch and "
            "some never. Expected: the shard before the shuffle, list_files(..., shuffle=False), or a seed.",
            stacklevel=2,
        )


@dataclasses.dataclass(eq=False)
class Shard:
    """How far one shard of a dataset has been read.

    Attributes:
        graph: the dataset, serialised.
        spec: the specification of its elements.
        remaining: how many of them have not been handed out; `None` if that is unknown.
        is_endless: whether they have no end.
        built: by worker, in which of its lives it has made the dataset, and the dataset.
        done: how many steps have been done.
        is_busy: whether a worker computes a step of it.
        is_exhausted: whether a worker has come to its end.
        home: the worker that reads it.
    """

    graph: tf.Tensor
    spec: Any
    remaining: int | None
    is_endless: bool = False
    built: dict[Worker, tuple[int, tf.data.Dataset]] = dataclasses.field(default_factory=dict)
    done: int = 0
    is_busy: bool = False
    is_exhausted: bool = False
    home: Worker | None = None
    _lives: int = -1
    _iterator: Any = None

    def iterator_on(self, worker: Worker) -> Any:
        """An iterator on a worker, at the first batch that has not been trained on.

        Another worker than before, or one that was lost, starts the pipeline again and skips what has been done; the
        batches are the same if the pipeline is deterministic. Endless data begin again: to read once more all that a
        long training has used may take as long as that.
        """
        if worker is not self.home or worker.lives != self._lives:
            dataset = self._dataset_on(worker)
            if self.done and not self.is_endless:
                dataset = dataset.skip(local_constant(np.int64(self.done)))
            self._iterator = iter(dataset)
            self.home, self._lives = worker, worker.lives
        return self._iterator

    def _dataset_on(self, worker: Worker) -> tf.data.Dataset:
        """The dataset, made once in a worker's life: epochs differ in how it shuffles, and share what it caches."""
        lives, dataset = self.built.get(worker, (None, None))
        if lives != worker.lives:
            dataset = upstream.deserialize_dataset_from_graph(self.graph, self.spec)
            self.built[worker] = worker.lives, dataset
        return dataset

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to hand out."""
        return self.is_exhausted or self.remaining == 0


class WorkerIterator:
    """Hands out steps of shards, at most one call a shard at a time.

    Attributes:
        element_spec: the specification of the dataset's elements.
        spec: the same, as `batch_spec` returns it.
        shards: the shards.
    """

    def __init__(self, dataset: WorkerDataset):
        self._dataset, self.element_spec = dataset, dataset.element_spec
        self.spec = batch_spec(self.element_spec)

    def __iter__(self) -> WorkerIterator:
        return self

    def __next__(self) -> Any:
        # Only `predict` draws batches itself, and wants them in their order: the coordinator reads them.
        return next(self._in_order)

    @functools.cached_property
    def _in_order(self) -> BatchIterator:
        if self._dataset.whole is None:
            raise ValueError(
                "Received: a dataset function for predict, which needs the batches in their order. Expected: arrays or "
                "a tf.data.Dataset."
            )
        return iter(self._dataset.whole)

    @functools.cached_property
    def shards(self) -> list[Shard]:
        return self._dataset.shards()

    def free(self) -> Shard | None:
        """The shard with data left that has been read least, of those that no worker reads now; `None`: none."""
        shards = [shard for shard in self.shards if not shard.is_busy and not shard.is_over]
        return min(shards, key=lambda shard: shard.done, default=None)

    @property
    def is_over(self) -> bool:
        """Whether all data have been handed out, as far as is known."""
        return all(shard.is_over for shard in self.shards)


def _serialised(dataset: tf.data.Dataset) -> tf.Tensor:
    def graph(policy: int) -> tf.Tensor:
        return tf.raw_ops.DatasetToGraphV2(
            input_dataset=dataset._variant_tensor, external_state_policy=policy, strip_device_assignment=True
        )

    try:
        return graph(_FAIL)
    except tf.errors.OpError as error:
        reason = error.message.splitlines()[0][:200]
    # Random numbers are a state, too, but each worker may draw its own.
    with contextlib.suppress(tf.errors.OpError):
        drawing = graph(_IGNORE)
        if _only_draws(drawing):
            return drawing
    raise ValueError(
        "Received: a dataset that cannot be sent to the workers, because it uses something of this process: a "
        f"Python function or generator, a lookup table, a variable ({reason}). "
        "Expected: a dataset of files or arrays with TensorFlow operations only; or ParameterServerStrategy("
        "worker_input=False), which runs the pipeline in the coordinator's process, and this dataset passed to fit "
        "as it is."
    )


# What TensorFlow does about a state in a function of a dataset.
_IGNORE, _FAIL = 1, 2
# Stateful by what they call, which is in the list itself; what shuffles and caches; tables, which are sent along.
_HARMLESS = {
    *("Case", "If", "StatefulPartitionedCall", "While", "Assert", "DummySeedGenerator", "DummyMemoryCache"),
    *("LookupTableFindV2", "LookupTableSizeV2"),
}


def _only_draws(graph: tf.Tensor) -> bool:
    """Whether random numbers are the only state that functions of a serialised dataset have."""
    functions = graph_pb2.GraphDef.FromString(graph.numpy()).library.function
    nodes = [node for function in functions for node in function.node_def if node.op not in _HARMLESS]
    definitions = [(node, op_def_registry.get(node.op)) for node in nodes if not family_of(node.op)]
    return all(draws(node) for node, known in definitions if known is not None and known.is_stateful)
