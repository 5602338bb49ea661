"""Tensors with the masks and logits that Keras attaches to them, packed into flat lists of tensors and unpacked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.compat.upstream import get_keras_mask, set_keras_mask


class Value(NamedTuple):
    """A tensor with the mask and the logits that Keras has attached to it.

    Attributes:
        tensor: the tensor.
        mask: which of its time steps later layers should use.
        logits: the input of the activation that has computed the tensor; some losses are more precise with it.
    """

    tensor: Any
    mask: Any = None
    logits: Any = None


class Gradients(NamedTuple):
    """The gradients of a value. Where a loss uses the logits, the tensor itself has no gradient.

    Attributes:
        tensor: the gradient of its tensor, or `None`.
        logits: the gradient of its logits, or `None`.
    """

    tensor: tf.Tensor | None = None
    logits: tf.Tensor | None = None


def value_of(tensor: tf.Tensor) -> Value:
    """The tensor with its mask and logits."""
    tensor = tf.convert_to_tensor(tensor)
    return Value(tensor, get_keras_mask(tensor), getattr(tensor, "_keras_logits", None))


def attached(value: Value) -> tf.Tensor:
    """The tensor, with mask and logits attached as Keras does it."""
    if value.mask is not None:
        set_keras_mask(value.tensor, value.mask)
    if value.logits is not None:
        value.tensor._keras_logits = value.logits
    return value.tensor


def pack(values: Sequence[Value]) -> tuple[list[tf.Tensor], list[tuple[bool, ...]]]:
    """Returns all tensors in one list, and for each value, which of its parts exist."""
    tensors = [part for value in values for part in value if part is not None]
    return tensors, [tuple(part is not None for part in value) for value in values]


def unpack(tensors: Iterable[tf.Tensor], layout: Sequence[tuple[bool, ...]]) -> list[Value]:
    """The reverse of `pack`."""
    given = iter(tensors)
    return [Value(*(next(given) if there else None for there in parts)) for parts in layout]


def is_differentiable(tensor: tf.Tensor | tf.TensorSpec) -> bool:
    """Whether a tensor can have a gradient."""
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def differentiable_parts(value: Value) -> tuple[tf.Tensor | None, tf.Tensor | None]:
    """The tensor and the logits of a value; `None` for one that does not exist or cannot have a gradient."""
    tensor, logits = (p if p is not None and is_differentiable(p) else None for p in (value.tensor, value.logits))
    return tensor, logits


def differentiable(values: Sequence[Value]) -> list[tf.Tensor]:
    """All tensors of the values that can have a gradient, in their order."""
    return [part for value in values for part in differentiable_parts(value) if part is not None]


def gradients_of(values: Sequence[Value], gradients: Iterable[tf.Tensor | None]) -> list[Gradients]:
    """The gradients of each value.

    Args:
        values: the values.
        gradients: the gradients of the tensors that `differentiable` lists.
    """
    given = iter(gradients)
    return [Gradients(*(p if p is None else next(given) for p in differentiable_parts(value))) for value in values]
