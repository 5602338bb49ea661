"""Keeps TensorFlow from merging operations of a block that plain training would leave apart.

Grappler makes one kernel of a product, a sum and an activation where nothing else reads what is between them, and such
a kernel rounds otherwise. In plain training the backward pass often does read it. Where a block is run twice, the first
run is read by nobody, and of the second one nobody reads the end: each would be merged in a way of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

# Made once for each graph, or without inputs.
_NOT_COMPARED = frozenset({"Placeholder", "Const"})


def keep_apart(
    graph: tf.Graph, first: Sequence[str], again: Sequence[str], backward: Sequence[str], gradients: Sequence[tf.Tensor]
) -> None:
    """Lets nothing be merged over a tensor that both the forward and the backward pass of plain training read.

    Args:
        graph: the one that all operations are in.
        first: names of the operations of the first run.
        again: of the second run.
        backward: of those that compute gradients from the second run.
        gradients: what comes of it.
    """
    firsts, seconds = _compared(graph, first), _compared(graph, again)
    if [op.type for op in firsts] != [op.type for op in seconds]:
        return  # A layer that does something else the second time: there is nothing to compare.
    in_first, in_second = set(firsts), set(seconds)
    needed = _needed(gradients, {*again, *backward})
    later = needed - in_second
    for one, other in zip(firsts, seconds, strict=True):
        # A loop whose gradient is asked for has more of them: what it keeps for it.
        for before, after in zip(one.outputs, other.outputs, strict=False):
            readers = after.consumers()
            inside = [op for op in readers if op in in_second]
            outside = [op for op in readers if op in later and not _reads_shape(op, after)]
            if not (after.dtype.is_floating and inside and outside):
                continue
            _part(before, [op for op in before.consumers() if op in in_first])
            if sum(op in needed for op in readers) < 2:
                _part(after, readers)


def _compared(graph: tf.Graph, names: Sequence[str]) -> list[tf.Operation]:
    return [op for op in map(graph.get_operation_by_name, names) if op.type not in _NOT_COMPARED]


def _needed(gradients: Sequence[tf.Tensor], names: set[str]) -> set[tf.Operation]:
    """Those of the named operations from which the gradients are computed: TensorFlow drops the others."""
    found: set[tf.Operation] = set()
    waiting = [tensor.op for tensor in gradients]
    while waiting:
        op = waiting.pop()
        if op.name in names and op not in found:
            found.add(op)
            waiting += [tensor.op for tensor in op.inputs]
    return found


def _reads_shape(op: tf.Operation, tensor: tf.Tensor) -> bool:
    """Whether it becomes a constant before anything is merged."""
    return op.type in ("Shape", "ShapeN", "Size", "Rank") and tensor.shape.is_fully_defined()


def _part(tensor: tf.Tensor, readers: Sequence[tf.Operation]) -> None:
    """Lets operations read a tensor through one that copies nothing, and that Grappler leaves where it is."""
    if tensor.shape.rank is None:
        return
    # What the backward pass waits for must not hold up the forward pass. And Grappler sorts factors and terms by name
    # before it moves constants among them: the name must come where that of the tensor would.
    name = f"{tensor.op.name}/apart"
    with tf.control_dependencies(None), tf.device(tensor.op.device or None), tensor.graph.name_scope(None):
        same = tf.raw_ops.EnsureShape(input=tensor, shape=tensor.shape, name=name)
    for op in readers:
        for position, given in enumerate(op.inputs):
            if given is tensor:
                op._update_input(position, same)
