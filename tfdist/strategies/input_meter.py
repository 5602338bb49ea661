"""How long training functions wait for their data, and how many rows they get: counted where the data arrive.

Keras takes the next batch within the training function, so nobody outside of it sees the waiting. Here the graph itself
looks at the clock before and after it takes a batch, and adds the difference to a variable of this process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import config

from tfdist.strategies.sharing import count_rows, is_batched


@dataclasses.dataclass(frozen=True)
class InputCounts:
    """What compiled functions have taken from this process' iterators so far.

    Attributes:
        seconds: how long they have waited for it.
        rows: of the global batches; of this process' own rows where nobody else knows them (`AutoShardPolicy.OFF`).
        batches: how many there were.
        own: how many of the batches were of this process' own rows.
    """

    seconds: float
    rows: int
    batches: int
    own: int

    def __sub__(self, other: InputCounts) -> InputCounts:
        """What has been taken since `other`."""
        return InputCounts(*(a - b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


class InputMeter:
    """Counts what the iterators of a strategy hand to compiled functions. To be made outside of the strategy's scope.

    Functions that are traced while nobody wants to know count nothing: it takes some 20 microseconds a step.

    Attributes:
        wanted: whether somebody wants to know.

    Example:
        >>> InputMeter().read()
        InputCounts(seconds=0.0, rows=0, batches=0, own=0)
    """

    def __init__(self) -> None:
        self.wanted = False
        with tf.init_scope(), tf.device("CPU:0"):
            self._totals = tf.Variable(tf.zeros([4], tf.float64), trainable=False)

    @property
    def counts(self) -> bool:
        """Whether what is built now has to count."""
        # A clock is not deterministic: TensorFlow refuses it.
        return self.wanted and not tf.executing_eagerly() and not config.is_op_determinism_enabled()

    def read(self) -> InputCounts:
        """The counts so far."""
        seconds, *numbers = self._totals.numpy().tolist()
        return InputCounts(seconds, *map(int, numbers))

    def timed(self, take: Callable[[], Any]) -> tuple[Any, tf.Tensor]:
        """In a graph: calls `take()`, whose operations then run between two looks at the clock.

        Returns:
            What `take` returned, and how long that took, in seconds. Whoever uses the data has to wait for this number
            first (`after`): a thread that is alone would otherwise come to the second look after the step.
        """
        with tf.device("CPU:0"):
            began = tf.timestamp()
        with tf.control_dependencies([began]):
            taken = take()
        with tf.control_dependencies(list(filter(tf.is_tensor, _flat(taken)))), tf.device("CPU:0"):
            return taken, tf.timestamp() - began

    def count(self, batch: Any, seconds: tf.Tensor) -> None:
        """In a graph: adds a batch, as replicas of this process receive it, and the time waited for it."""
        with tf.device("CPU:0"):
            rows, own = _rows_of(batch)
            self._totals.assign_add(tf.stack([seconds, rows, 1.0, float(own)]), read_value=False)


def after(seconds: tf.Tensor, batch: Any) -> Any:
    """In a graph: the same batch, which nobody gets before that number is known."""

    def wait(leaf: Any) -> Any:
        if not tf.is_tensor(leaf):
            return leaf
        with leaf.graph.colocate_with(leaf.op):
            return tf.identity(leaf)

    with tf.control_dependencies([seconds]):
        return tf.nest.pack_sequence_as(batch, list(map(wait, _flat(batch))), expand_composites=True)


def _flat(value: Any) -> list:
    return tf.nest.flatten(value, expand_composites=True)


def _rows_of(batch: Any) -> tuple[tf.Tensor, bool]:
    """The number of rows, float64, and whether they are only those of this process."""
    from tfdist.strategies.global_batches import GlobalBatch  # it counts its batches with this module

    if not isinstance(batch, GlobalBatch):
        countable = any(is_batched(leaf) for leaf in tf.nest.flatten(batch))
        return tf.cast(count_rows(batch) if countable else 0, tf.float64), False
    whole = _local(batch.global_rows)[0]
    if whole is not None:
        return tf.cast(whole, tf.float64), False
    return tf.cast(tf.add_n(_local(batch.rows)), tf.float64), True


def _local(value: Any) -> list:
    """For each replica of this process."""
    return list(getattr(value, "values", [value]))
