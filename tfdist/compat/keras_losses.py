"""Keras' loss reductions, inside a train or test step of a tfdist strategy.

Keras divides each replica's mean loss by the number of replicas, and the gradients are then added up. That is the
mean of the global batch only if all replicas have equally many rows, and unmasked time steps. In a tfdist step a loss
is what one process would compute from the rows at hand, and the strategy weights it by the replica's share of the
global batch; a `train_step` written for one process is then right as it stands. Two kinds of losses are not means
over rows, and need the global batch's own denominator: masked means and sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src import ops

from tfdist.compat.patch import Patch
from tfdist.strategies.exchange import all_reduce
from tfdist.strategies.keras_step import KerasStep, current_step

_MODULE = "keras.src.losses.loss"
_MEANS = ("sum_over_batch_size", "mean")


def _patch(name: str, make: Callable) -> Patch:
    return Patch(f"{_MODULE}:{name}", make, "keras", "keras issue 19246, uneven batches")


def _identity_in_step(original: Callable) -> Callable:
    def scale(value: Any) -> Any:
        return original(value) if current_step() is None else value

    return scale


def _share_of(value: Any, step: KerasStep) -> Any:
    """`value` of this replica over that of all, divided by the replica's weight: 1 if it is as its share of rows."""
    value = tf.convert_to_tensor(value)
    if step.counts is not None:
        value *= tf.cast(step.counts, value.dtype)
    total = all_reduce(value)
    return tf.math.divide_no_nan(value, total * tf.cast(step.weight, value.dtype))


def _apply_mask(original: Callable) -> Callable:
    def apply_mask(sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
        step = current_step()
        if step is None or mask is None or reduction not in _MEANS:
            return original(sample_weight, mask, dtype, reduction)
        # The local mean is one over the valid entries here. Weighted by the share of rows, as every loss is, it has to
        # add up to the mean over the valid entries everywhere.
        valid = ops.sum(ops.cast(mask, dtype))
        return original(sample_weight, mask, dtype, reduction) * _share_of(valid, step)

    return apply_mask


def _reduce_values(original: Callable) -> Callable:
    def reduce_values(values: Any, sample_weight: Any = None, reduction: str = "sum_over_batch_size") -> Any:
        step = current_step()
        loss = original(values, sample_weight, reduction)
        if step is None or tuple(values.shape) in ((), (0,)):
            return loss
        if reduction == "sum":
            return ops.divide_no_nan(loss, ops.cast(step.weight, loss.dtype))
        if reduction == "mean_with_sample_weight" and sample_weight is not None:
            return loss * _share_of(ops.cast(ops.sum(sample_weight), loss.dtype), step)
        return loss

    return reduce_values


PATCHES = [
    _patch("scale_loss_for_distribution", _identity_in_step),
    _patch("unscale_loss_for_distribution", _identity_in_step),
    _patch("apply_mask", _apply_mask),
    _patch("reduce_values", _reduce_values),
]
