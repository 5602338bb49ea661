"""The state of a step as inputs and outputs of a function; and whether the step only adds to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

_TRANSPARENT = {"Identity", "Cast", "Reshape", "EnsureShape", "StopGradient"}


class CapturedState(keras.StatelessScope):
    """A scope in which some variables have given values and keep their updates here; all others act as always.

    Args:
        variables: the variables.
        values: tensors of their shapes.

    Example:
        >>> count = keras.Variable(1.0)
        >>> with CapturedState([count], [tf.constant(5.0)]) as state:
        ...     _ = count.assign_add(1.0)
        >>> float(state.values()[0]), float(count.numpy())
        (6.0, 1.0)
    """

    def __init__(self, variables: Sequence[keras.Variable], values: Sequence[tf.Tensor]):
        # Without `collect_losses`, the losses that layers add would be lost.
        super().__init__(list(zip(variables, values, strict=True)), collect_losses=True, initialize_variables=False)
        self._variables = list(variables)
        self._ids = {id(variable) for variable in variables}

    def holds(self, variable: keras.Variable) -> bool:
        """Whether a variable is one of those captured."""
        return id(variable) in self._ids

    def values(self) -> list[tf.Tensor]:
        """The current values."""
        return [self.get_current_value(variable) for variable in self._variables]

    def get_current_value(self, variable: keras.Variable) -> Any:
        # Keras' regularizers ask the scope for the weights, which are not captured.
        return super().get_current_value(variable) if self.holds(variable) else variable._value

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable, value = update
        if self.holds(variable):
            super().add_update(update)
        else:
            variable._direct_assign(value)


def only_adds(before: tf.Tensor, after: tf.Tensor, states: Iterable[tf.Tensor]) -> bool:
    """Whether `after` is `before` plus something that depends on no state.

    If so, what several workers add, each starting from 0, sums up to what one process would have added.

    Args:
        before: the value of a variable at the beginning of a traced function.
        after: its value at the end.
        states: the values of all variables at the beginning, `before` among them.

    Example:
        >>> with tf.Graph().as_default():
        ...     state, x = tf.compat.v1.placeholder("float32", []), tf.compat.v1.placeholder("float32", [])
        ...     only_adds(state, state + 2 * x, [state]), only_adds(state, tf.maximum(state, x), [state])
        (True, False)
    """
    names = {state.name for state in states}
    independent: set[str] = set()

    def is_sum(tensor: tf.Tensor) -> bool:
        if tensor.name == before.name:
            return True
        operation, inputs = tensor.op, tensor.op.inputs
        if operation.type in _TRANSPARENT:
            return is_sum(inputs[0])
        if operation.type in ("Add", "AddV2"):
            return any(is_sum(a) and not _depends(b, names, independent) for a, b in (inputs, inputs[::-1]))
        return operation.type == "Sub" and is_sum(inputs[0]) and not _depends(inputs[1], names, independent)

    return is_sum(after)


def _depends(tensor: tf.Tensor, names: set[str], independent: set[str]) -> bool:
    """Whether a tensor is computed from one of these names; fills in the operations that are known not to be."""
    waiting, seen = [tensor], set()
    while waiting:
        tensor = waiting.pop()
        if tensor.name in names:
            return True
        if tensor.op.name not in seen and tensor.op.name not in independent:
            seen.add(tensor.op.name)
            waiting.extend(tensor.op.inputs)
    independent |= seen
    return False
