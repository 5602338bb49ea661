"""Optimizers: those that a strategy did not find, and what they do in training loops of users' own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfdist.compat.patch import Patch
from tfdist.strategies import own_loops
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
        return list(grads_and_vars) if own_loops.are_summed() else original(self, grads_and_vars)

    return _all_reduce_sum_gradients


def _sum_before(original: Callable) -> Callable:
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        strategy = None if own_loops.are_summed() else own_loops.strategy_of_own_loop()
        if strategy is None or not _depends_on_whole_gradient(self):
            return original(self, grads, trainable_variables)
        grads = own_loops.global_gradients(strategy, list(grads))
        with own_loops.with_global_gradients():
            return original(self, grads, trainable_variables)

    return apply


def _depends_on_whole_gradient(optimizer: Any) -> bool:
    """Whether it does more with a gradient than to add it up, before the replicas' gradients are added up."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return True
    return any(getattr(optimizer, name, None) is not None for name in ("clipnorm", "global_clipnorm", "clipvalue"))


PATCHES = [
    Patch(
        "keras.src.backend.tensorflow.optimizer:TFOptimizer._all_reduce_sum_gradients",
        _refuse_in_step,
        "keras",
        "no upstream issue: gradients are clipped and tested for overflow before they are reduced",
    ),
    *(
        Patch(target, _sum_before, "keras", "no upstream issue: gradients are clipped before they are reduced")
        for target in (
            "keras.src.optimizers.base_optimizer:BaseOptimizer.apply",
            "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer.apply",
        )
    ),
]
