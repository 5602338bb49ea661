"""Keras variables on parameter servers: several workers change one at a time, and read only the rows they need."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.stateless_scope import get_stateless_scope, in_stateless_scope


class ServerVariable(keras.Variable):
    """A Keras variable whose additions are single operations on the server.

    Keras adds by reading, adding and writing (`assign(self + value)`): of two workers that do so at a time, one has
    counted in vain. And Keras' embedding reads the whole table, unless it can `sparse_read`.
    """

    def assign_add(self, value: Any) -> Any:
        if self._is_held_by_scope():
            return super().assign_add(value)
        value = self._convert_to_tensor(value, dtype=self._dtype)
        self._value.assign_add(value)
        return value

    def assign_sub(self, value: Any) -> Any:
        if self._is_held_by_scope():
            return super().assign_sub(value)
        value = self._convert_to_tensor(value, dtype=self._dtype)
        self._value.assign_sub(value)
        return value

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """The rows with these indices; `tf.gather` looks for this method."""
        if self._is_held_by_scope():
            return tf.gather(self.value, indices, name=name)
        return self._maybe_autocast(self._value.sparse_read(indices, name=name))

    def _is_held_by_scope(self) -> bool:
        if not in_stateless_scope():
            return False
        scope = get_stateless_scope()
        holds = getattr(scope, "holds", None)
        return holds is None or holds(self)


def adopt(variables: Iterable[keras.Variable]) -> None:
    """Makes plain Keras variables `ServerVariable`s, in place."""
    for variable in variables:
        if type(variable) is keras.Variable:
            variable.__class__ = ServerVariable
