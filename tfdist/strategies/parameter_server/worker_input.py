"""Input pipelines that run on the workers: each worker reads its shard of the data."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat.upstream import coordinator_values as upstream
from tfdist.compat.upstream import input_lib
from tfdist.inspection.dataset_properties import draws_seeds, has_no_order
from tfdist.strategies.parameter_server.batches import BatchIterator, CoordinatorDataset, batch_spec
from tfdist.strategies.parameter_server.dispatcher import Worker
from tfdist.strategies.parameter_server.transfer import local_constant


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
        self._whole = whole
        self._spec = shards[0].element_spec

    @property
    def element_spec(self) -> Any:
        return self._spec

    @property
    def cardinality(self) -> int:
        unknown = [count for count in self._cardinalities if count < 0]
        return min(unknown) if unknown else sum(self._cardinalities)

    def __iter__(self) -> WorkerIterator:
        return WorkerIterator(self._shards, self._spec, self._whole)

    def _shards(self) -> list[Shard]:
        return [
            Shard(graph, self._spec, count if count >= 0 else None)
            for graph, count in zip(self._graphs, self._cardinalities, strict=True)
        ]

    @functools.cached_property
    def _graphs(self) -> list[tf.Tensor]:
        source = self._whole.source if self._whole is not None else None
        if source is not None and (draws_seeds(source) or has_no_order(source)):
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
    if not _takes_one(function):
        raise ValueError(
            f"Received: a dataset function {function!r} that cannot be called with one argument. Expected: "
            "`def f(input_context): return dataset`, of batches, for the worker number input_context.input_pipeline_id."
        )
    shards = [function(tf.distribute.InputContext(workers, index, num_replicas_in_sync=1)) for index in range(workers)]
    for shard in shards:
        if not isinstance(shard, tf.data.Dataset):
            raise ValueError(
                f"Received: a dataset function that returns {type(shard).__name__}. Expected: a tf.data.Dataset, of "
                "batches, for the worker number input_context.input_pipeline_id."
            )
    return WorkerDataset(shards)


@dataclasses.dataclass(eq=False)
class Shard:
    """How far one shard of a dataset has been read.

    Attributes:
        graph: the dataset, serialised.
        spec: the specification of its elements.
        remaining: how many of them have not been handed out; `None` if that is unknown.
        done: how many steps have been done.
        is_busy: whether a worker computes a step of it.
        is_exhausted: whether a worker has come to its end.
        home: the worker that reads it.
    """

    graph: tf.Tensor
    spec: Any
    remaining: int | None
    done: int = 0
    is_busy: bool = False
    is_exhausted: bool = False
    home: Worker | None = None
    _lives: int = -1
    _iterator: Any = None

    def iterator_on(self, worker: Worker) -> Any:
        """An iterator on a worker, at the first batch that has not been trained on.

        Another worker than before, or one that was lost, starts the pipeline again and skips what has been done; the
        batches are the same if the pipeline is deterministic.
        """
        if worker is not self.home or worker.lives != self._lives:
            dataset = upstream.deserialize_dataset_from_graph(self.graph, self.spec)
            self._iterator = iter(dataset.skip(local_constant(np.int64(self.done))) if self.done else dataset)
            self.home, self._lives = worker, worker.lives
        return self._iterator

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to hand out."""
        return self.is_exhausted or self.remaining == 0


class WorkerIterator:
    """Hands out steps of shards, at most one call a shard at a time.

    Args:
        make_shards: makes the shards, at their beginning.
        element_spec: of the batches.
        whole: the whole dataset, if there is one.

    Attributes:
        spec: the specification of a batch, as `batch_spec` returns it.
        shards: the shards.
    """

    def __init__(self, make_shards: Callable[[], list[Shard]], element_spec: Any, whole: CoordinatorDataset | None):
        self.element_spec, self.spec = element_spec, batch_spec(element_spec)
        self._make_shards, self._whole = make_shards, whole
        self._local: BatchIterator | None = None

    def __iter__(self) -> WorkerIterator:
        return self

    def __next__(self) -> Any:
        # Only `predict` draws batches itself, and wants them in their order: the coordinator reads them.
        if self._whole is None:
            raise ValueError(
                "Received: a dataset function for predict, which needs the batches in their order. Expected: arrays or "
                "a tf.data.Dataset."
            )
        if self._local is None:
            self._local = iter(self._whole)
        return next(self._local)

    @functools.cached_property
    def shards(self) -> list[Shard]:
        return self._make_shards()

    def free(self) -> Shard | None:
        """The shard with data left that has been read least, of those that no worker reads now; `None`: none."""
        shards = [shard for shard in self.shards if not shard.is_busy and not shard.is_over]
        return min(shards, key=lambda shard: shard.done, default=None)

    @property
    def is_over(self) -> bool:
        """Whether all data have been handed out, as far as is known."""
        return all(shard.is_over for shard in self.shards)


def _takes_one(function: Callable) -> bool:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:
        pass  # a callable without a signature, such as some built-in ones
    return True


def _serialised(dataset: tf.data.Dataset) -> tf.Tensor:
    try:
        return tf.raw_ops.DatasetToGraphV2(
            input_dataset=dataset._variant_tensor, external_state_policy=2, strip_device_assignment=True
        )
    except tf.errors.OpError as error:
        raise ValueError(
            "Received: a dataset that cannot be sent to the workers, because it uses something of this process: a "
            f"Python function or generator, a lookup table, a variable ({error.message.splitlines()[0][:200]}). "
            "Expected: a dataset of files or arrays with TensorFlow operations only; or ParameterServerStrategy("
            "worker_input=False), which runs the pipeline in the coordinator's process, and this dataset passed to fit "
            "as it is."
        ) from None
