"""What in a graph waits for what, besides its inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.python.xla import optimization_barrier


def gated(groups: Sequence[Sequence[tf.Tensor]], gate: Sequence[tf.Tensor], compiled: bool) -> list[list[tf.Tensor]]:
    """The same tensors, of which what is computed from them comes after the gate.

    Args:
        groups: lists of tensors.
        gate: what to wait for.
        compiled: whether XLA compiles it. XLA drops control dependencies, and merges what is computed twice.

    Example:
        >>> [[x]] = gated([[tf.constant(1.0)]], [tf.constant(2.0)], compiled=False)
        >>> float(x)
        1.0
    """
    if compiled:
        flat = [tensor for group in groups for tensor in group]
        passed = iter(optimization_barrier(*flat, *gate))
        return [[next(passed) for _ in group] for group in groups]
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
