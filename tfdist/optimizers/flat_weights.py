"""What an optimizer updates in place of a variable: a shard of the weights, which exists within a step only."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class FlatWeights:
    """A value that `Optimizer.update_step` takes for a variable.

    A variable in its place would stay between the steps, and cost as much memory as a slot.

    Args:
        key: by what the optimizer finds its slots.
        value: the weights before the update.
    """

    def __init__(self, key: str, value: tf.Tensor):
        # The name that TFOptimizer._var_key reads.
        self._unique_id = key
        self.value = value

    @property
    def dtype(self) -> tf.DType:
        """That of the value."""
        return self.value.dtype

    @property
    def shape(self) -> tf.TensorShape:
        """That of the value."""
        return self.value.shape

    def assign(self, value: Any) -> None:
        """Sets the value."""
        self.value = tf.convert_to_tensor(value)

    def assign_add(self, value: Any) -> None:
        """Adds to the value."""
        self.value = self.value + value

    def assign_sub(self, value: Any) -> None:
        """Subtracts from the value."""
        self.value = self.value - value

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self.value, dtype=dtype, name=name)
