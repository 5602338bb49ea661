"""Keras' variables: those on parameter servers are changed by several workers at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.compat.patch import Patch
from tfdist.strategies.parameter_server.strategy import ParameterServerStrategy
from tfdist.strategies.parameter_server.variables import adopt


def _initialize(original: Callable) -> Callable:
    def _initialize(self: Any, value: Any) -> None:
        strategy = tf.distribute.get_strategy()
        if not isinstance(strategy, ParameterServerStrategy):
            original(self, value)
            return
        with strategy.extended.unpartitioned():
            original(self, value)
        adopt([self])

    return _initialize


PATCHES = [
    Patch(
        "keras.src.backend.tensorflow.core:Variable._initialize",
        _initialize,
        "keras",
        "no upstream issue: assign_add is a read and a write, and sparse_read does not exist",
    ),
]
