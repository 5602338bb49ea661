"""Keras' callbacks that do nothing but write: under several workers only the chief has them."""

from __future__ import annotations

from typing import Any

import keras

# Not every release of Keras has them all.
_WRITERS = tuple(
    getattr(keras.callbacks, name)
    for name in ("CSVLogger", "TensorBoard", "RemoteMonitor", "OrbaxCheckpoint")
    if hasattr(keras.callbacks, name)
)


def is_on_every_process(callback: Any) -> bool:
    """Whether it takes care itself that only the chief writes, since it needs the others' help."""
    return getattr(callback, "on_every_process", False)


def is_the_chiefs(callback: Any) -> bool:
    """Whether only the chief has any use for it."""
    return isinstance(callback, _WRITERS) and not is_on_every_process(callback)
