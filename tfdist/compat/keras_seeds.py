"""Generators of seeds: other numbers on each replica where no step's shadows see to it, and who has drawn from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.compat.patch import Patch
from tfdist.compat.scopes import outside_of_scope
from tfdist.strategies.global_seeds import is_here
from tfdist.strategies.keras_step import current_step
from tfdist.strategies.own_loops import strategy_of_own_loop
from tfdist.strategies.step_shadows import seed_of_replica


def _next_of_replica(original: Callable) -> Callable:
    def next(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.is_used = True
        if tf.distribute.in_cross_replica_context() and not is_here(self):
            # `keras.random` without a seed, in the scope of another strategy than that of the last model.
            with outside_of_scope():
                return original(self, *args, **kwargs)
        seed = original(self, *args, **kwargs)
        step = current_step()
        is_alike = step.kind == "predict" if step is not None else strategy_of_own_loop() is not None
        return seed_of_replica(seed) if is_alike else seed

    return next


PATCHES = [
    Patch(
        "keras.src.random.seed_generator:SeedGenerator.next",
        _next_of_replica,
        "keras",
        "no upstream issue: all replicas draw the same numbers",
    )
]
