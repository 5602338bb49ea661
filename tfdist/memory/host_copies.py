"""Tensors that spend the time between forward and backward pass on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.memory.block_call import Keeping
from tfdist.memory.gates import waiting_for

_NOT_COPIED = frozenset({tf.resource, tf.variant, tf.string})


def is_data(tensor: tf.Tensor) -> bool:
    """Whether it may go to the host: no resource or text, and no shape.

    Shapes are known when the graph is made ready, if nobody hides them.
    """
    is_shape = tensor.dtype.is_integer and tensor.shape.rank is not None and tensor.shape.rank < 2
    return not is_shape and tensor.dtype not in _NOT_COPIED


def to_host(tensor: tf.Tensor, place: int, keeping: Keeping) -> tf.Tensor:
    """A copy on the host, made once for each tensor.

    Args:
        tensor: any.
        place: of the block that makes the copy.
        keeping: of the model's call.
    """
    on_host = keeping.order.on_host
    if id(tensor) not in on_host:
        with tf.device(keeping.host):
            copy = tf.identity(tensor)
        on_host[id(tensor)] = tensor, copy
        if not tf.executing_eagerly():
            keeping.order.copies[place].append(copy.op)
    return on_host[id(tensor)][1]


def from_host(copy: tf.Tensor, device: str, keeping: Keeping, gate: Sequence[Any] | None = None) -> tf.Tensor:
    """What is on the host, on the device (again), as late as the gate says.

    Args:
        copy: as `to_host` has made it.
        device: on which the tensor was; empty if that is left to TensorFlow.
        keeping: of the model's call.
        gate: what the host waits for before it sends; by default what `keeping` says for the backward pass.
    """
    # The host must wait: what it may send, it sends.
    gate = keeping.order.fetch_after(keeping.prefetch) if gate is None else gate
    with tf.device(keeping.host), waiting_for(gate, keeping.compiled):
        sent = tf.identity(copy)
    with tf.device(device or None):
        return tf.identity(sent)
