"""Keras' callbacks that do nothing but write: under several workers only the chief has them."""

from __future__ import annotations

import keras

# Not every release of Keras has them all.
WRITERS = tuple(
    getattr(keras.callbacks, name)
    for name in ("CSVLogger", "TensorBoard", "RemoteMonitor", "OrbaxCheckpoint")
    if hasattr(keras.callbacks, name)
)
