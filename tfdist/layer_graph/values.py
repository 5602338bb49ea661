"""Tensors with what Keras attaches to them, as flat lists that go through functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask


class Value(NamedTuple):
    """A tensor with its attachments.

    Attributes:
        tensor: the tensor.
        mask: which of its time steps count, for the layers that come after.
        logits: from what an activation has computed it, for losses that are more precise with these.
    """

    tensor: Any
    mask: Any = None
    logits: Any = None


class Gradients(NamedTuple):
    """The gradients of a value: where a loss has used the logits, there is none of the tensor itself.

    Attributes:
        tensor: that of its tensor, or `None`.
        logits: that of its logits, or `None`.
    """

    tensor: tf.Tensor | None = None
    logits: tf.Tensor | None = None


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


def unpack(tensors: Iterable[tf.Tensor], layout: Sequence[tuple[bool, ...]]) -> list[Value]:
    """The values again, as `pack` has taken them apart."""
    given = iter(tensors)
    return [Value(*(next(given) if there else None for there in parts)) for parts in layout]


def is_differentiable(tensor: tf.Tensor | tf.TensorSpec) -> bool:
    """Whether gradients come back to a tensor."""
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def differentiable_parts(value: Value) -> tuple[tf.Tensor | None, tf.Tensor | None]:
    """Its tensor and its logits, or `None` in place of what no gradients come back to."""
    tensor, logits = (p if p is not None and is_differentiable(p) else None for p in (value.tensor, value.logits))
    return tensor, logits


def differentiable(values: Sequence[Value]) -> list[tf.Tensor]:
    """All that gradients come back to, one after the other."""
    return [part for value in values for part in differentiable_parts(value) if part is not None]


def gradients_of(values: Sequence[Value], gradients: Iterable[tf.Tensor | None]) -> list[Gradients]:
    """The gradients of each value.

    Args:
        values: the values.
        gradients: those of all that is `differentiable` in them.
    """
    given = iter(gradients)
    return [Gradients(*(p if p is None else next(given) for p in differentiable_parts(value))) for value in values]
