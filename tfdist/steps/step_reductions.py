"""Keras' losses and scalar metrics, inside a train or test step of a tfdist strategy.

Keras divides each replica's mean loss by the number of replicas, and the gradients are then added up. That is the
mean of the global batch only if all replicas have equally many rows, and unmasked time steps. In a tfdist step a loss
is what one process would compute from the rows at hand, and the strategy weights it by the replica's share of the
global batch; a `train_step` written for one process is then right as it stands. Two kinds of losses are not means
over rows, and need the global batch's own denominator: masked means and sums.

A scalar given to `keras.metrics.Mean` or `Sum` is one for a batch, in one process. Every replica computes it from its
own rows (a loss, or a metric function that returns a mean); weighted by the replica's share the scalars make the one
that the global batch would have given. What a `Sum` is given and adds up over the replicas needs no weight: integers,
which count something, and sums over rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tfdist.steps.collectives import all_reduce
from tfdist.steps.keras_step import KerasStep

_MEANS = ("sum_over_batch_size", "mean")


def apply_mask(step: KerasStep, sample_weight: Any, mask: Any, dtype: Any, reduction: Any, apply: Callable) -> Any:
    """Keras' `apply_mask`: weights whose mean, weighted by the share of rows, adds up to that of the global batch."""
    masked = apply(sample_weight, mask, dtype, reduction)
    if mask is None or reduction not in _MEANS:
        return masked
    # The local mean is one over the valid entries here. It has to add up to the mean over the valid entries everywhere.
    valid = ops.sum(ops.cast(mask, dtype))
    return masked * _share_of(valid, step)


def reduce_values(step: KerasStep, values: Any, sample_weight: Any, reduction: str, reduce: Callable) -> Any:
    """Keras' `reduce_values`: a loss that, weighted by the share of rows, adds up to that of the global batch."""
    loss = reduce(values, sample_weight, reduction)
    if tuple(values.shape) in ((), (0,)):
        return loss
    if reduction == "sum":
        return ops.divide_no_nan(loss, ops.cast(step.weight, loss.dtype))
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        return loss * _share_of(ops.cast(ops.sum(sample_weight), loss.dtype), step)
    return loss


def weight_of_scalar(step: KerasStep, metric: keras.Metric, value: Any) -> tf.Tensor | None:
    """The sample weight of a scalar that a metric is given; `None` if the replicas' values add up without one."""
    is_tensor_for_sum = isinstance(metric, keras.metrics.Sum) and tf.is_tensor(value)
    is_count = is_tensor_for_sum and (value.dtype.is_integer or step.adds_up(value))
    return None if is_count else step.weight


def _share_of(value: Any, step: KerasStep) -> Any:
    """This replica's share of the sum of a value over all replicas, divided by its share of the rows."""
    value = tf.convert_to_tensor(value)
    if step.counts is not None:
        value *= tf.cast(step.counts, value.dtype)
    total = all_reduce(value)
    return tf.math.divide_no_nan(value, total * tf.cast(step.weight, value.dtype))
