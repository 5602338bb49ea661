"""Training loops of users' own, `strategy.run(step)`: `tf.distribute`'s semantics, but for what it does wrong silently.

Losses are divided and gradients summed as TensorFlow's tutorial says
(https://www.tensorflow.org/tutorials/distribute/custom_training). Optimizers, though, would clip each replica's own
gradient, and layers with a seed would draw the same numbers on every replica.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.strategies.data_parallel import DataParallel
from tfdist.strategies.gradients import all_reduce_sum

# Replicas are threads.
_of_thread = threading.local()


def strategy_of_own_loop() -> DataParallel | None:
    """The strategy, if this is called on one of several replicas in a function that is no step of a Keras model."""
    context = tf.distribute.get_replica_context()
    strategy = None if context is None else context.strategy
    if not isinstance(strategy, DataParallel) or strategy.num_replicas_in_sync == 1:
        return None
    return None if strategy._keras_step is not None else strategy


def global_gradients(strategy: DataParallel, gradients: Sequence[Any]) -> list:
    """Sums of the replicas' gradients, `None` where there is none."""
    present = [i for i, gradient in enumerate(gradients) if gradient is not None]
    result: list = [None] * len(gradients)
    for i, total in zip(present, all_reduce_sum([gradients[i] for i in present], strategy._wire), strict=True):
        result[i] = total
    return result


@contextlib.contextmanager
def with_global_gradients() -> Iterator[None]:
    """While an optimizer applies gradients that are summed already."""
    _of_thread.summed = True
    try:
        yield
    finally:
        _of_thread.summed = False


def are_summed() -> bool:
    """Whether the gradients that this thread's optimizer applies are summed already."""
    return getattr(_of_thread, "summed", False)
