"""Scalars given to `keras.metrics.Mean` and `Sum`: one for a batch, in one process.

Every replica computes such a value from its own rows (a loss, or a metric function that returns a mean); weighted by
the replica's share they make the one that the global batch would have given. Values per row are left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfdist.compat.patch import Patch
from tfdist.strategies.keras_step import current_step


def _weigh_scalars(original: Callable) -> Callable:
    def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
        step = current_step()
        if step is not None and sample_weight is None and len(keras.ops.shape(values)) == 0:
            sample_weight = step.weight
        return original(self, values, sample_weight=sample_weight)

    return update_state


PATCHES = [
    Patch(f"keras.src.metrics.reduction_metrics:{name}.update_state", _weigh_scalars, "keras", "keras issue 19246")
    for name in ("Mean", "Sum")
]
