"""Custom training loops, `strategy.run(step)`: as in `tf.distribute`, but without two silent mistakes.

Losses are divided and gradients summed as TensorFlow's tutorial says
(https://www.tensorflow.org/tutorials/distribute/custom_training). There, optimizers would clip the gradient of each
replica instead of the global one, and layers with a seed would draw the same numbers on every replica.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.hooks import hooks_of
from tfdist.steps.gradients import all_reduce_sum
from tfdist.steps.keras_step import current_step

# Replicas are threads.
_of_thread = threading.local()


def strategy_of_custom_loop() -> tf.distribute.Strategy | None:
    """The strategy, if this runs on one of several replicas and not in a step of a Keras model; else `None`."""
    context = tf.distribute.get_replica_context()
    strategy = None if context is None else context.strategy
    if not hooks_of(strategy).is_data_parallel or strategy.num_replicas_in_sync == 1:
        return None
    return strategy if current_step() is None else None


def apply_gradients(optimizer: Any, gradients: Any, variables: Any, apply: Callable[[Any, Any], Any]) -> Any:
    """`optimizer.apply(gradients, variables)`, with global gradients if the optimizer clips or tests them.

    Args:
        optimizer: any Keras optimizer.
        gradients: of this replica, `None` where there is none.
        variables: what they are the gradients of, or `None` for all of the optimizer's.
        apply: what Keras does.
    """
    strategy = None if are_summed() else strategy_of_custom_loop()
    if strategy is None:
        return apply(gradients, variables)
    is_summed_here = _depends_on_whole_gradient(optimizer)
    if strategy._wire.compressor is not None or (strategy._wire.dtype is not None and not is_summed_here):
        # By default Python shows it once.
        warnings.warn(
            "Received: compression=... of the strategy, and a training loop around strategy.run. It sends gradients as "
            "they are. Expected: model.fit or model.train_on_batch, with a train_step of your own if you need one; or "
            "no compression.",
            stacklevel=2,
        )
    if not is_summed_here:
        return apply(gradients, variables)
    gradients = _global_gradients(strategy, list(gradients))
    _of_thread.summed = True
    try:
        return apply(gradients, variables)
    finally:
        _of_thread.summed = False


def are_summed() -> bool:
    """Whether the gradients that this thread's optimizer applies are summed already."""
    return getattr(_of_thread, "summed", False)


def _depends_on_whole_gradient(optimizer: Any) -> bool:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return True
    return any(getattr(optimizer, name, None) is not None for name in ("clipnorm", "global_clipnorm", "clipvalue"))


def _global_gradients(strategy: Any, gradients: Sequence[Any]) -> list:
    """Sums of the replicas' gradients, `None` where there is none."""
    present = [i for i, gradient in enumerate(gradients) if gradient is not None]
    result: list = [None] * len(gradients)
    for i, total in zip(present, all_reduce_sum([gradients[i] for i in present], strategy._wire), strict=True):
        result[i] = total
    return result
