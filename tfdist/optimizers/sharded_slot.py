"""What an optimizer keeps for one variable, read and written as a whole, while each replica has a part of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

if TYPE_CHECKING:
    from tfdist.optimizers.flat_slots import FlatSlots


class ShardedSlot:
    """Takes the place of a slot variable among the variables of an optimizer.

    It has what Keras and `tfdist.callbacks.BackupAndRestore` need of a variable to save and load it.

    Args:
        slots: where its rows are.
        kind: name of the slot, such as "momentum".
        bucket: index of the bucket of the variable.
        place: index of the variable in the bucket.
        owner: name of the optimizer.
        variable: the variable.
    """

    trainable = False

    def __init__(self, slots: FlatSlots, kind: str, bucket: int, place: int, owner: str, variable: Any) -> None:
        self._slots, self._where = slots, (kind, bucket, place)
        self.kind = kind
        # The names and shapes that Optimizer.add_variable_from_reference gives.
        self.name = f"{variable.path.replace('/', '_')}_{kind}"
        self.path = f"{owner}/{self.name}"
        self.shape, self.dtype = tf.TensorShape(variable.shape), variable.dtype

    @property
    def _value(self) -> ShardedSlot:
        # There is no TensorFlow variable behind it.
        return self

    def numpy(self) -> np.ndarray:
        """A copy of the whole slot.

        Raises:
            RuntimeError: if other processes have parts of it, see `ShardedOptimizer.collect`.
        """
        return self._slots.read(*self._where)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """As `numpy`; `model.save("x.h5")` reads variables so."""
        return self.numpy().astype(dtype or self.dtype, copy=False)

    def read_value(self) -> tf.Tensor:
        """The whole slot; with several processes a collective, which all of them call after the same step."""
        if not self._slots.is_readable:
            self._slots.collect()
        return tf.constant(self.numpy())

    def assign(self, value: Any) -> None:
        """Sets the whole slot; with several processes all of them call it with the same value.

        Raises:
            ValueError: if `value` has another shape.
        """
        value = np.asarray(value)
        if value.shape != tuple(self.shape):
            raise ValueError(
                f"Received: a value of shape {value.shape} for '{self.path}'. Expected: {tuple(self.shape)}. Load what "
                "was saved of the same model and optimizer; the number of replicas does not matter."
            )
        self._slots.write(*self._where, value)
