"""Keras' files and variables under a strategy, and numbers in a strategy's variables."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat.hooks import hooks_of
from tfdist.compat.patch import Patch, inherited


def _save(has_optimizer: Callable[..., bool], original: Callable) -> Callable:
    @functools.wraps(original)
    def save(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        write = functools.partial(original, model, filepath, *args, **kwargs)
        hooks = hooks_of(getattr(model, "_distribute_strategy", None))
        return hooks.save(model, filepath, has_optimizer(*args, **kwargs), write)

    return save


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


def _never(*args: Any, **kwargs: Any) -> bool:
    return False


def _if_included(overwrite: bool = True, include_optimizer: bool = True) -> bool:
    return include_optimizer


def _initialize(original: Callable) -> Callable:
    def _initialize(self: Any, value: Any) -> None:
        hooks_of(tf.distribute.get_strategy()).initialize_variable(self, functools.partial(original, self, value))

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
    *(
        Patch(
            target,
            functools.partial(_save, has_optimizer),
            "keras",
            "tensorflow issue 38635: all workers write one file",
        )
        for target, has_optimizer in (
            ("keras.src.saving.saving_lib:save_model", _always),
            ("keras.src.saving.saving_lib:save_weights_only", _always),
            ("keras.src.legacy.saving.legacy_h5_format:save_model_to_hdf5", _if_included),
            ("keras.src.models.model:Model.export", _never),
        )
    ),
    Patch(
        inherited(keras.Variable, "_initialize"),
        _initialize,
        "keras",
        "no upstream issue: assign_add is a read and a write, and sparse_read does not exist",
    ),
    Patch(f"{_VALUES}.__int__", _numpy_as(int), "tensorflow", _NOT_NUMBERS, is_new=True),
    Patch(f"{_VALUES}.__float__", _numpy_as(float), "tensorflow", _NOT_NUMBERS, is_new=True),
    Patch(f"{_VALUES}.__complex__", _numpy_as(complex), "tensorflow", _NOT_NUMBERS, is_new=True),
    Patch(f"{_VALUES}.__array__", _array, "tensorflow", _NOT_NUMBERS, is_new=True),
]
