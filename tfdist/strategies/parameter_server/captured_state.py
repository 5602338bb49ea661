"""Some variables of a model as inputs and outputs of a step; all others act for real."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


class CapturedState(keras.StatelessScope):
    """While it is entered, these variables have these values, and their updates are kept here.

    Args:
        variables: which ones.
        values: tensors of their shapes.

    Example:
        >>> count = keras.Variable(1.0)
        >>> with CapturedState([count], [tf.constant(5.0)]) as state:
        ...     _ = count.assign_add(1.0)
        >>> float(state.values()[0]), float(count.numpy())
        (6.0, 1.0)
    """

    def __init__(self, variables: Sequence[keras.Variable], values: Sequence[tf.Tensor]):
        # Without it, what layers add as a loss would be lost.
        super().__init__(list(zip(variables, values, strict=True)), collect_losses=True, initialize_variables=False)
        self._variables = list(variables)
        self._ids = {id(variable) for variable in variables}

    def holds(self, variable: keras.Variable) -> bool:
        """Whether a variable is one of those captured."""
        return id(variable) in self._ids

    def values(self) -> list[tf.Tensor]:
        """The values as of now."""
        return [self.get_current_value(variable) for variable in self._variables]

    def get_current_value(self, variable: keras.Variable) -> Any:
        # Regularizers ask the scope for the weights, which are not in it.
        return super().get_current_value(variable) if self.holds(variable) else variable._value

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable, value = update
        if self.holds(variable):
            super().add_update(update)
        else:
            variable._direct_assign(value)
