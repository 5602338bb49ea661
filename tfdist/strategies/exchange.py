"""What the replicas of a strategy add up in a training step, and how long that takes by itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.strategies.keras_step import KerasStep, current_step, local_replica

_REPETITIONS = 3

# Shape and dtype of a sum; `None` for one that is no dense tensor of a known shape.
Sum = tuple[tuple[int, ...], tf.DType] | None


def all_reduce(value: tf.Tensor | tf.IndexedSlices, differentiable: bool = True) -> Any:
    """The sum over all replicas; in a Keras step it is noted that there is one.

    Args:
        value: of this replica, in its context.
        differentiable: whether a gradient of the sum is the sum of gradients. Where nobody asks for one, or it is given
            in another way, tracing takes less time without it: for each such sum TensorFlow looks for variables in all
            that the sum is made of, which is the whole step of every other replica of this process.
    """
    if not differentiable and isinstance(value, tf.Tensor):
        value = tf.stop_gradient(value)
    is_known = isinstance(value, tf.Tensor) and value.shape.is_fully_defined()
    _note((tuple(value.shape), value.dtype) if is_known else None)
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value)


def note_other() -> None:
    """Notes that replicas exchange something that is no sum."""
    _note(None)


def _note(one: Sum) -> None:
    step = current_step()
    if step is not None and local_replica() == 0:
        step.sums.append(one)


def keep(step: KerasStep, strategy: Any) -> None:
    """Notes on the strategy what a step that has been traced adds up."""
    if step.kind == "train" and step.sums:
        strategy.sums_of_step[step.model] = tuple(step.sums)


class ExchangeTimer:
    """Times the sums of a training step, without the step. All processes have to make the same calls.

    Args:
        strategy: a tfdist strategy for data parallelism.
        sums: what a step adds up, one after another.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> strategy = tfdist.MirroredStrategy(["CPU:0"])
        >>> ExchangeTimer(strategy, [((1000,), tf.float32)]).seconds() > 0
        True
    """

    def __init__(self, strategy: Any, sums: Sequence[Sum]) -> None:
        self._exchange = _function(strategy, [one for one in sums if one is not None])
        self._is_fresh = True

    def seconds(self) -> float:
        """The median of some repetitions. Their buffers are filled with zeros within that time."""
        if self._is_fresh:
            self._exchange()
            self._is_fresh = False
        # Whoever comes early waits here for the others, not where it is timed.
        self._exchange().numpy()
        return statistics.median(_timed(self._exchange) for _ in range(_REPETITIONS))


def _timed(exchange: Callable[[], tf.Tensor]) -> float:
    began = time.perf_counter()
    exchange().numpy()
    return time.perf_counter() - began


def _function(strategy: Any, sums: Sequence[tuple[tuple[int, ...], tf.DType]]) -> Callable[[], tf.Tensor]:
    def on_replica() -> tf.Tensor:
        done: list[tf.Tensor] = []
        for shape, dtype in sums:
            with tf.control_dependencies(done[-1:]):
                done.append(all_reduce(tf.zeros(shape, dtype)))
        with tf.control_dependencies(done):
            return tf.constant(len(done))

    @tf.function
    def exchange() -> tf.Tensor:
        return strategy.experimental_local_results(strategy.run(on_replica))[0]

    return exchange
