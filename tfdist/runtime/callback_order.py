"""Which callbacks of a fit run on the chief only, and which need a certain place among the others."""

from __future__ import annotations

from typing import Any

import keras

# Not every release of Keras has them all.
_WRITERS = tuple(
    getattr(keras.callbacks, name)
    for name in ("CSVLogger", "TensorBoard", "RemoteMonitor", "OrbaxCheckpoint")
    if hasattr(keras.callbacks, name)
)


class Arranged(keras.callbacks.Callback):
    """A callback that needs a certain place among the others of a fit."""

    def _arrange(self, callback_list: Any, callbacks: list[keras.callbacks.Callback]) -> list[keras.callbacks.Callback]:
        """The callbacks of a fit in their order. tfdist calls it when Keras makes its list of them.

        Args:
            callback_list: Keras' list.
            callbacks: the callbacks in it, this one among them.
        """
        return callbacks


def is_on_every_process(callback: Any) -> bool:
    """Whether a callback runs on all processes because it needs their help; it lets only the chief write by itself."""
    return getattr(callback, "_on_every_process", False)


def is_the_chiefs(callback: Any) -> bool:
    """Whether a callback runs on the chief only, since it does nothing but write."""
    return isinstance(callback, _WRITERS) and not is_on_every_process(callback)
