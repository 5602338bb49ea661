"""Scalars given to `keras.metrics.Mean` and `Sum`: one for a batch, in one process.

Every replica computes such a value from its own rows (a loss, or a metric function that returns a mean); weighted by
the replica's share they make the one that the global batch would have given. Values per row are left alone, and so are
integers that a `Sum` is given: they count something, of which each replica has its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.patch import Patch
from tfdist.strategies.keras_step import current_step


def _weigh_scalars(original: Callable) -> Callable:
    def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
        step = current_step()
        is_scalar = len(keras.ops.shape(values)) == 0
        if step is not None and sample_weight is None and is_scalar and not _is_count(self, values):
            sample_weight = step.weight
        return original(self, values, sample_weight=sample_weight)

    return update_state


def _is_count(metric: keras.Metric, value: Any) -> bool:
    """Whether replicas' values add up to that of the global batch: `tf.shape(x)[0]`, say, given to a sum."""
    return isinstance(metric, keras.metrics.Sum) and tf.is_tensor(value) and value.dtype.is_integer


PATCHES = [
    Patch(f"keras.src.metrics.reduction_metrics:{name}.update_state", _weigh_scalars, "keras", "keras issue 19246")
    for name in ("Mean", "Sum")
]
