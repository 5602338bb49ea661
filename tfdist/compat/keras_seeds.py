"""Layers with a seed, in training loops of users' own: other numbers on each replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdist.compat.patch import Patch
from tfdist.strategies.own_loops import strategy_of_own_loop
from tfdist.strategies.step_shadows import seed_of_replica


def _next_of_replica(original: Callable) -> Callable:
    def next(self: Any, *args: Any, **kwargs: Any) -> Any:
        seed = original(self, *args, **kwargs)
        return seed if strategy_of_own_loop() is None else seed_of_replica(seed)

    return next


PATCHES = [
    Patch(
        "keras.src.random.seed_generator:SeedGenerator.next",
        _next_of_replica,
        "keras",
        "no upstream issue: all replicas draw the same numbers",
    )
]
