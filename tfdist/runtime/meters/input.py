"""How long training functions wait for their data, and how many rows they get.

Keras takes the next batch within the training function, so code outside of it does not see the waiting. Here the graph
itself reads the clock before and after it takes a batch, and adds the difference to a variable of this process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.compat.upstream import framework_config as config
from tfdist.inspection.batch_sharding import GlobalBatch, count_rows, is_batched


@dataclasses.dataclass(frozen=True)
class InputCounts:
    """What compiled functions have taken from the iterators of this process so far.

    Attributes:
        seconds: how long they have waited for it.
        rows: of the global batches; where a process does not know the others' rows (`AutoShardPolicy.OFF`), its own.
        batches: how many there were.
        manual: how many of the batches were sharded by the user.
    """

    seconds: float
    rows: int
    batches: int
    manual: int

    def __sub__(self, other: InputCounts) -> InputCounts:
        """What has been taken since `other`."""
        return InputCounts(*(a - b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


class InputMeter:
    """Counts what the iterators of a strategy hand to compiled functions. Make it outside of the strategy's scope.

    Functions that are traced while `wanted` is false count nothing: counting takes some 20 microseconds a step.

    Attributes:
        wanted: whether somebody reads the counts.

    Example:
        >>> InputMeter().read()
        InputCounts(seconds=0.0, rows=0, batches=0, manual=0)
    """

    def __init__(self) -> None:
        self.wanted = False
        with tf.init_scope(), tf.device("CPU:0"):
            self._totals = tf.Variable(tf.zeros([4], tf.float64), trainable=False)

    @property
    def counts(self) -> bool:
        """Whether a function that is traced now has to count."""
        # A clock is not deterministic: TensorFlow refuses it.
        return self.wanted and not tf.executing_eagerly() and not config.is_op_determinism_enabled()

    def read(self) -> InputCounts:
        """The counts so far."""
        seconds, *numbers = self._totals.numpy().tolist()
        return InputCounts(seconds, *map(int, numbers))

    def timed(self, take: Callable[[], Any]) -> tuple[Any, tf.Tensor]:
        """In a graph: calls `take()`, and reads the clock (`tf.timestamp`, on the CPU) before and after its operations.

        Control dependencies give the order: the first reading, the operations of `take`, the second reading.

        Returns:
            What `take` returned, and how long that took, in seconds. The operations that use the data have to depend on
            this number (`after`): with a single thread, the second reading could otherwise come after the step.
        """
        with tf.device("CPU:0"):
            began = tf.timestamp()
        with tf.control_dependencies([began]):
            taken = take()
        with tf.control_dependencies(list(filter(tf.is_tensor, _flat(taken)))), tf.device("CPU:0"):
            return taken, tf.timestamp() - began

    def count(self, batch: Any, seconds: tf.Tensor) -> None:
        """In a graph: adds a batch, as the replicas of this process receive it, and the time waited for it.

        Its operations (the number of rows, an addition to the variable) are on the CPU, where the variable is.
        """
        with tf.device("CPU:0"):
            rows, manual = _rows_of(batch)
            self._totals.assign_add(tf.stack([seconds, rows, 1.0, float(manual)]), read_value=False)


def after(seconds: tf.Tensor, batch: Any) -> Any:
    """In a graph: the same batch, whose tensors become available only after that number.

    Each tensor gets an identity on its own device that has the number as a control dependency.
    """

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
    """The number of rows as float64, and whether they are only those of this process."""
    if not isinstance(batch, GlobalBatch):
        countable = any(is_batched(leaf) for leaf in tf.nest.flatten(batch))
        return tf.cast(count_rows(batch) if countable else 0, tf.float64), False
    whole = _local(batch.global_rows)[0]
    if whole is not None:
        return tf.cast(whole, tf.float64), False
    return tf.cast(tf.add_n(_local(batch.rows)), tf.float64), True


def _local(value: Any) -> list:
    """The values of the replicas of this process."""
    return list(getattr(value, "values", [value]))
