"""Batches that the coordinator draws and sends to the workers."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.compat.upstream import NoneTensorSpec, input_lib
from tfdist.strategies.parameter_server.variables import COORDINATOR


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
        batches = [self._next()]
        for _ in range(count - 1):
            try:
                batches.append(self._next())
            except StopIteration:
                break
        return batches

    def look_ahead(self, position: int) -> list[tf.Tensor] | None:
        """A batch that will be drawn later; `None` if there is none.

        Args:
            position: 0 is the next one.
        """
        if self._steps is not None and self.issued + position >= self._steps:
            return None
        while len(self._ahead) <= position:
            try:
                self._ahead.append(self._draw())
            except StopIteration:
                return None
        return self._ahead[position]

    def _next(self) -> list[tf.Tensor]:
        return self._ahead.popleft() if self._ahead else self._draw()

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
    return tf.nest.map_structure(_none_if_absent, element_spec)


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


def _none_if_absent(spec: Any) -> Any:
    return None if isinstance(spec, (NoneTensorSpec, tf.OptionalSpec)) else spec


def _is_absent(value: Any) -> bool:
    # Keras' generators return an `Optional` where there are no targets or weights.
    return value is None or isinstance(value, tf.experimental.Optional)
