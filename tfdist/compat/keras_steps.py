"""Keras' losses, metrics, optimizers and seeds: in a step they ask the strategy, which knows the shares of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.hooks import KerasHooks, hooks_of
from tfdist.compat.patch import Patch


def _here() -> KerasHooks:
    return hooks_of(tf.distribute.get_strategy())


def _scale_loss(original: Callable) -> Callable:
    def scale(value: Any) -> Any:
        return _here().scale_loss(value, original)

    return scale


def _apply_mask(original: Callable) -> Callable:
    def apply_mask(sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
        return _here().apply_mask(sample_weight, mask, dtype, reduction, original)

    return apply_mask


def _reduce_values(original: Callable) -> Callable:
    def reduce_values(values: Any, sample_weight: Any = None, reduction: str = "sum_over_batch_size") -> Any:
        return _here().reduce_values(values, sample_weight, reduction, original)

    return reduce_values


def _update_state(original: Callable) -> Callable:
    def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
        if sample_weight is None and len(keras.ops.shape(values)) == 0:
            sample_weight = _here().weight_of_scalar(self, values)
        return original(self, values, sample_weight=sample_weight)

    return update_state


def _sum_gradients(original: Callable) -> Callable:
    def _all_reduce_sum_gradients(self: Any, grads_and_vars: Any) -> Any:
        return _here().sum_gradients(self, grads_and_vars, lambda pairs: original(self, pairs))

    return _all_reduce_sum_gradients


def _apply(original: Callable) -> Callable:
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        return _here().apply_gradients(self, grads, trainable_variables, lambda *args: original(self, *args))

    return apply


def _next(original: Callable) -> Callable:
    def next(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _here().next_seed(self, lambda: original(self, *args, **kwargs))

    return next


def _of_losses(name: str, make: Callable) -> Patch:
    return Patch(f"keras.src.losses.loss:{name}", make, "keras", "keras issue 19246, uneven batches")


PATCHES = [
    _of_losses("scale_loss_for_distribution", _scale_loss),
    _of_losses("unscale_loss_for_distribution", _scale_loss),
    _of_losses("apply_mask", _apply_mask),
    _of_losses("reduce_values", _reduce_values),
    *(
        Patch(f"keras.src.metrics.reduction_metrics:{name}.update_state", _update_state, "keras", "keras issue 19246")
        for name in ("Mean", "Sum")
    ),
    Patch(
        "keras.src.backend.tensorflow.optimizer:TFOptimizer._all_reduce_sum_gradients",
        _sum_gradients,
        "keras",
        "no upstream issue: gradients are clipped and tested for overflow before they are reduced",
    ),
    *(
        Patch(target, _apply, "keras", "no upstream issue: gradients are clipped before they are reduced")
        for target in (
            "keras.src.optimizers.base_optimizer:BaseOptimizer.apply",
            "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer.apply",
        )
    ),
    Patch(
        "keras.src.random.seed_generator:SeedGenerator.next",
        _next,
        "keras",
        "no upstream issue: all replicas draw the same numbers",
    ),
]
