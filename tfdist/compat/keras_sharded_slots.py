"""Keras' optimizers: what they keep for each shard of a table is saved as one table."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tfdist.compat.patch import Patch


def _as_is(optimizer: Any) -> Any:
    return optimizer


# An optimizer, or what stands in for it with whole tables in place of shards.
_saved_form: Callable[[Any], Any] = _as_is


def _on_saved_form(original: Callable) -> Callable:
    @functools.wraps(original)
    def method(self: Any, store: Any) -> None:
        original(_saved_form(self), store)

    return method


PATCHES = [
    Patch(
        f"keras.src.optimizers.base_optimizer:BaseOptimizer.{method}",
        _on_saved_form,
        "keras",
        "no upstream issue: optimizers are saved as a list that depends on how weights are split",
    )
    for method in ("save_own_variables", "load_own_variables")
]


def install(saved_form: Callable[[Any], Any]) -> None:
    """Installs these patches alone: a table may be in a program without a strategy.

    Args:
        saved_form: takes an optimizer, and returns it, or an object with its name and with other `variables`.
    """
    global _saved_form
    _saved_form = saved_form
    for patch in PATCHES:
        patch.install()
