"""Keras' optimizers: what they keep for each shard of a table is saved as one table."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from tfdist.compat.patch import Patch
from tfdist.layers.sharded_slots import has_shards, merged_slots


def _on_merged_slots(original: Callable) -> Callable:
    @functools.wraps(original)
    def method(self: Any, store: Any) -> None:
        if has_shards(self):
            self = types.SimpleNamespace(name=self.name, variables=merged_slots(self))
        original(self, store)

    return method


PATCHES = [
    Patch(
        f"keras.src.optimizers.base_optimizer:BaseOptimizer.{method}",
        _on_merged_slots,
        "keras",
        "no upstream issue: optimizers are saved as a list that depends on how weights are split",
    )
    for method in ("save_own_variables", "load_own_variables")
]


def install() -> None:
    """Installs these patches alone, for a table in a program without a strategy."""
    for patch in PATCHES:
        patch.install()
