"""What in a graph waits for what, besides its inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def gated(groups: Sequence[Sequence[tf.Tensor]], gate: Sequence[tf.Tensor], compiled: bool) -> list[list[tf.Tensor]]:
    """The same tensors, of which what is computed from them comes after the gate.

    Args:
        groups: lists of tensors.
        gate: what to wait for.
        compiled: whether XLA compiles it. XLA drops control dependencies, and merges what is computed twice. With
            its optimization barriers instead, a step on a CPU needed as much as without any recomputation.

    Example:
        >>> [[x]] = gated([[tf.constant(1.0)]], [tf.constant(2.0)], compiled=False)
        >>> float(x)
        1.0
    """
    if compiled and gate:
        never = _never(gate)
        return [[tf.where(never, tf.zeros_like(tensor), tensor) for tensor in group] for group in groups]
    with tf.control_dependencies(list(gate)):
        return [[tf.identity(tensor) for tensor in group] for group in groups]


def waiting_for(gate: Sequence[tf.Tensor], compiled: bool) -> contextlib.AbstractContextManager:
    """Everything that is made in this context waits, also what has no inputs: random numbers, say."""
    return contextlib.nullcontext() if compiled else tf.control_dependencies(list(gate))


def released_together(gradients: Sequence[Any], compiled: bool) -> list[Any]:
    """The same gradients, none of which goes on before all are there.

    What is computed again is needed for all of them. If the gradient of the inputs went on alone, those of the weights
    would be computed much later, or at the end, and what they are computed from would be kept until then.

    Args:
        gradients: tensors, `tf.IndexedSlices` or `None`.
        compiled: whether XLA compiles it.
    """
    flat = tf.nest.flatten(gradients, expand_composites=True)
    [passed] = gated([[t for t in flat if t is not None]], [t for t in flat if t is not None], compiled)
    rest = iter(passed)
    passed = [None if t is None else next(rest) for t in flat]
    return tf.nest.pack_sequence_as(list(gradients), passed, expand_composites=True)


def _never(gate: Sequence[tf.Tensor]) -> tf.Tensor:
    """False, but XLA would have to compute the gate to know it: a number that is equal to itself, and is not."""
    # Of none or one element each: a sum of all of them would read them once more.
    heads = [tf.cast(tf.reshape(tensor, [-1])[:1], tf.float32) for tensor in gate]
    number = tf.reduce_sum(tf.concat(heads, 0))
    return tf.logical_and(tf.equal(number, number), tf.not_equal(number, number))
