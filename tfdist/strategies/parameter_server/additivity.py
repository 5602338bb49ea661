"""Whether a traced step only adds to a state: then the sum of what several workers add is what one would have added."""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

_TRANSPARENT = {"Identity", "Cast", "Reshape", "EnsureShape", "StopGradient"}


def only_adds(before: tf.Tensor, after: tf.Tensor, states: Iterable[tf.Tensor]) -> bool:
    """Whether `after` is `before` plus something that depends on no state.

    Args:
        before: the value of a variable at the beginning of a traced function.
        after: its value at the end.
        states: the values of all variables at the beginning, `before` among them.

    Example:
        >>> with tf.Graph().as_default():
        ...     state, x = tf.compat.v1.placeholder("float32", []), tf.compat.v1.placeholder("float32", [])
        ...     only_adds(state, state + 2 * x, [state]), only_adds(state, tf.maximum(state, x), [state])
        (True, False)
    """
    names = {state.name for state in states}
    independent: set[str] = set()

    def is_sum(tensor: tf.Tensor) -> bool:
        if tensor.name == before.name:
            return True
        operation, inputs = tensor.op, tensor.op.inputs
        if operation.type in _TRANSPARENT:
            return is_sum(inputs[0])
        if operation.type in ("Add", "AddV2"):
            return any(is_sum(a) and not _depends(b, names, independent) for a, b in (inputs, inputs[::-1]))
        return operation.type == "Sub" and is_sum(inputs[0]) and not _depends(inputs[1], names, independent)

    return is_sum(after)


def _depends(tensor: tf.Tensor, names: set[str], independent: set[str]) -> bool:
    """Whether a tensor is computed from one of these names; fills in the operations that are known not to be."""
    waiting, seen = [tensor], set()
    while waiting:
        tensor = waiting.pop()
        if tensor.name in names:
            return True
        if tensor.op.name not in seen and tensor.op.name not in independent:
            seen.add(tensor.op.name)
            waiting.extend(tensor.op.inputs)
    independent |= seen
    return False
