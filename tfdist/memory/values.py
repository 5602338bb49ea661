"""Tensors with what Keras attaches to them, as flat lists that go through functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask


class Value(NamedTuple):
    """A tensor with its attachments.

    Attributes:
        tensor: the tensor.
        mask: which of its time steps count, for the layers that come after.
        logits: from what an activation has computed it, for losses that are more precise with these.
    """

    tensor: tf.Tensor
    mask: tf.Tensor | None
    logits: tf.Tensor | None


def value_of(tensor: tf.Tensor) -> Value:
    """The tensor with what Keras has attached to it."""
    tensor = tf.convert_to_tensor(tensor)
    return Value(tensor, get_keras_mask(tensor), getattr(tensor, "_keras_logits", None))


def attached(value: Value) -> tf.Tensor:
    """The tensor, to which everything is attached as Keras does it."""
    if value.mask is not None:
        set_keras_mask(value.tensor, value.mask)
    if value.logits is not None:
        value.tensor._keras_logits = value.logits
    return value.tensor


def pack(values: Sequence[Value]) -> tuple[list[tf.Tensor], list[tuple[bool, ...]]]:
    """All tensors in one list, and what is there."""
    tensors = [part for value in values for part in value if part is not None]
    return tensors, [tuple(part is not None for part in value) for value in values]


def unpack(tensors: Sequence[tf.Tensor], layout: Sequence[tuple[bool, ...]]) -> list[Value]:
    """The values again, as `pack` has taken them apart."""
    given = iter(tensors)
    return [Value(*(next(given) if there else None for there in parts)) for parts in layout]
