"""Keras' variables: those on parameter servers are changed by several workers at a time; mirrored ones are numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.values import DistributedVariable

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


def _as(kind: Callable[[Any], Any]) -> Callable[[Callable], Callable]:
    def make(original: Callable) -> Callable:
        def converted(self: Any) -> Any:
            # TensorFlow's own variables are numbers, those of a strategy are not.
            if self.ndim == 0 and isinstance(self.value, DistributedVariable):
                return kind(tf.convert_to_tensor(self.value))
            return original(self)

        return converted

    return make


_NOT_NUMBERS = "no upstream issue: int(optimizer.iterations) and float(optimizer.learning_rate) raise under a strategy"

PATCHES = [
    Patch(
        "keras.src.backend.tensorflow.core:Variable._initialize",
        _initialize,
        "keras",
        "no upstream issue: assign_add is a read and a write, and sparse_read does not exist",
    ),
    Patch("keras.src.backend.common.variables:Variable.__int__", _as(int), "keras", _NOT_NUMBERS),
    Patch("keras.src.backend.common.variables:Variable.__float__", _as(float), "keras", _NOT_NUMBERS),
]
