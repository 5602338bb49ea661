"""Steps that a strategy has handed out to workers, and that are not done yet."""

from __future__ import annotations

from typing import Any


def settle(model: Any) -> None:
    """Waits until all steps of a model that were handed out are done, where a strategy does that at all.

    Called before a model's state is read that belongs together: weights, counters, metrics, position in the data.

    Args:
        model: any Keras model.

    Raises:
        Exception: what a step has raised.
    """
    strategy = getattr(model, "_distribute_strategy", None)
    if hasattr(strategy, "settle"):
        strategy.settle(model)
