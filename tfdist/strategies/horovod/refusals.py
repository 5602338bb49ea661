"""Refuses Horovod's own Keras layer, which was written for Keras 2.

With Keras 3, `horovod.keras.DistributedOptimizer` overrides a method that Keras no longer calls: it reduces nothing,
says nothing, and the ranks drift apart. Horovod's callbacks read attributes that Keras 3 does not have.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import keras

from tfdist.strategies.model_parts import optimizers_of, parts_of

_EXPECTED = (
    "Expected: plain Keras code in the scope of tfdist's strategy, which averages the gradients, broadcasts the "
    "variables and averages the metrics itself: `with tfdist.HorovodStrategy().scope(): model = ...; "
    "model.compile(optimizer='adam', ...)`"
)


def check_optimizers(model: keras.Model) -> None:
    """Checks a model's optimizers, and those inside of them.

    Raises:
        ValueError: if one was made by Horovod's `DistributedOptimizer`.
    """
    if "horovod" not in sys.modules:
        return  # nothing can be Horovod's; looking through all layers takes its time, at each call of Keras
    for optimizer in (part for whole in optimizers_of(model) for part in [whole, *parts_of(whole)]):
        if _is_horovods(optimizer):
            raise ValueError(
                f"Received: optimizer '{optimizer.name}', made by horovod.keras.DistributedOptimizer. With Keras 3 it "
                f"reduces nothing: every rank would train a model of its own. {_EXPECTED}, with the optimizer itself."
            )


def check_callbacks(callbacks: Iterable[Any]) -> None:
    """Checks the callbacks of a fit.

    Raises:
        ValueError: if one is Horovod's.
    """
    for callback in callbacks:
        if _is_horovods(callback):
            raise ValueError(
                f"Received: callback {type(callback).__name__} of {type(callback).__module__}, which does not work "
                f"with Keras 3. {_EXPECTED}, without this callback."
            )


def _is_horovods(thing: Any) -> bool:
    # DistributedOptimizer makes a class of the optimizer's own name, with what is in a class of Horovod's.
    return any(kind.__module__.split(".")[0] == "horovod" for kind in type(thing).__mro__)
