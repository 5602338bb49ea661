"""How initial values travel from the chief whose dtype `CollectiveBcastSend` does not know: as one that it knows.

It knows bool, int32, int64 and floats of 16 (not bfloat16), 32 and 64 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.trackable.base import CheckpointInitialValue

# Wider ones, in which each value is exact, and others of the same size.
_CAST = {tf.int8: tf.int32, tf.uint8: tf.int32, tf.int16: tf.int32, tf.uint16: tf.int32, tf.bfloat16: tf.float32}
_BITCAST = {tf.uint32: tf.int32, tf.uint64: tf.int64, tf.complex64: tf.int64, tf.complex128: tf.int64}


def broadcast(make: Callable[..., Callable], device: str, **kwargs: Any) -> Callable[[], tf.Tensor]:
    """A function that returns a variable's initial value, which is the chief's on all workers.

    Args:
        make: `StrategyExtended._get_variable_creator_initial_value` for the first replica of a worker, of TensorFlow:
            it is given the variable's arguments, and returns such a function.
        device: the first replica's.
        kwargs: the variable's arguments.
    """

    def initial_value() -> tf.Tensor:
        with tf.device(device):
            value = kwargs["initial_value"]
            value = value() if callable(value) else value
            if isinstance(value, CheckpointInitialValue):
                value = value.wrapped_value
            value = tf.convert_to_tensor(value, kwargs.get("dtype"))
            sent = to_wire(value)
            return from_wire(make(**{**kwargs, "initial_value": sent, "dtype": sent.dtype})(), value.dtype)

    return initial_value


def to_wire(value: tf.Tensor) -> tf.Tensor:
    """The value in a dtype that collectives know."""
    if value.dtype in _CAST:
        return tf.cast(value, _CAST[value.dtype])
    return tf.bitcast(value, _BITCAST[value.dtype]) if value.dtype in _BITCAST else value


def from_wire(value: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """What `to_wire` was given, of that dtype."""
    return tf.bitcast(value, dtype) if dtype in _BITCAST else tf.cast(value, dtype)
