"""Moves variables to the devices of their stages, and optimizers' slots after them."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.strategies.model_parts import optimizers_of, parts_of


class SlotReferences:
    """Remembers which variable each optimizer's slot was created for, from `colocate_with`."""

    def __init__(self) -> None:
        # Ids, not the variables: the one that a slot was created for is gone once it has moved.
        self._reference_of: dict[str, str] = {}

    def note(self, slot: tf.Variable, reference: tf.Variable) -> None:
        """Notes that `slot` belongs to `reference`."""
        self._reference_of[slot._unique_id] = reference._unique_id

    def reference(self, slot: tf.Variable) -> str | None:
        """The unique id of the variable that a slot belongs to; `None` for what is no slot."""
        return self._reference_of.get(slot._unique_id)


def move(variable: keras.Variable, device: str) -> None:
    """Re-creates the TensorFlow variable inside of a Keras variable on a device, with the same value."""
    old = variable._value
    if tf.DeviceSpec.from_string(old.device) == _full(device):
        return
    with tf.init_scope(), tf.device(device):
        new = tf.Variable(
            tf.identity(old), dtype=old.dtype, trainable=old.trainable, name=variable.name, aggregation=old.aggregation
        )
    variable._value = new


def move_slots(model: keras.Model, references: SlotReferences, moved: dict[str, keras.Variable]) -> None:
    """Moves the slots of a model's optimizers to the devices of their variables, which have moved already.

    Args:
        model: the model.
        references: which slot belongs to which variable.
        moved: Keras variables by the unique id of the TensorFlow variable that they had before.
    """
    for optimizer in optimizers_of(model):
        for part in [optimizer, *parts_of(optimizer)]:
            for slot in part.variables:
                reference = references.reference(slot._value)
                variable = moved.get(reference) if reference is not None else None
                if variable is not None:
                    move(slot, variable._value.device)
                    references.note(slot._value, variable._value)
            if part.built and hasattr(part, "_trainable_variables"):
                # The optimizer finds a variable's slots by the id of the TensorFlow variable.
                part._trainable_variables_indices = {
                    part._var_key(v): i for i, v in enumerate(part._trainable_variables)
                }


def _full(device: str) -> tf.DeviceSpec:
    """A device string with job, replica and task, as variables have it."""
    with tf.init_scope(), tf.device(device):
        return tf.DeviceSpec.from_string(tf.constant(0.0).device)
