"""An optimizer that a strategy did not find: its gradients would be added up without the replicas' weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdist.compat.patch import Patch
from tfdist.strategies.keras_step import current_step


def _refuse_in_step(original: Callable) -> Callable:
    def _all_reduce_sum_gradients(self: Any, grads_and_vars: Any) -> Any:
        # Those that were found have a shadow of this method, see step_shadows.py.
        if current_step() is not None:
            raise RuntimeError(
                f"Received: optimizer '{self.name}', used in a train_step, which is not an attribute of the model or "
                "of one of its layers. Expected: `self.my_optimizer = ...` on the model (in a list or dict, too), so "
                "that tfdist can give it the gradient of the global batch."
            )
        return original(self, grads_and_vars)

    return _all_reduce_sum_gradients


PATCHES = [
    Patch(
        "keras.src.backend.tensorflow.optimizer:TFOptimizer._all_reduce_sum_gradients",
        _refuse_in_step,
        "keras",
        "no upstream issue: gradients are clipped and tested for overflow before they are reduced",
    )
]
