"""Variables: those on parameter servers are changed by several workers at a time; those of strategies are numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
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


def _numpy_as(kind: Callable[[Any], Any]) -> Callable[[None], Callable]:
    def make(original: None) -> Callable:
        def converted(self: Any) -> Any:
            return kind(self.numpy())

        return converted

    return make


def _array(original: None) -> Callable:
    def __array__(self: Any, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        # What is read is a copy already.
        return np.asarray(self.numpy(), dtype)

    return __array__


_VALUES = "tensorflow.python.distribute.values:DistributedVariable"
_NOT_NUMBERS = "no upstream issue: tf.Variable converts to int, float and numpy, a strategy's variables do not"

PATCHES = [
    Patch(
        "keras.src.backend.tensorflow.core:Variable._initialize",
        _initialize,
        "keras",
        "no upstream issue: assign_add is a read and a write, and sparse_read does not exist",
    ),
    Patch(f"{_VALUES}.__int__", _numpy_as(int), "tensorflow", _NOT_NUMBERS, is_new=True),
    Patch(f"{_VALUES}.__float__", _numpy_as(float), "tensorflow", _NOT_NUMBERS, is_new=True),
    Patch(f"{_VALUES}.__complex__", _numpy_as(complex), "tensorflow", _NOT_NUMBERS, is_new=True),
    Patch(f"{_VALUES}.__array__", _array, "tensorflow", _NOT_NUMBERS, is_new=True),
]
