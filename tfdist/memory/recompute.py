"""Blocks that are run again in the backward pass, from inputs that are kept.

Source: "Training Deep Nets with Sublinear Memory Cost" (Chen et al., arXiv 1604.06174). Unlike `keras.remat` and
`tf.recompute_grad`, the second run sees the seeds and the statistics of the first one, and changes nothing.

The graph of one block, for a loss L:

    forward:   inputs -> first run -> outputs                 no tape records it: what it makes is given back at once
    backward:  dL/d outputs ready
               -> identity of inputs, weights and state       control dependencies: not before dL/d outputs
               -> second run, recorded by a tape              makes again what the gradients read
               -> gradients of weights and inputs             leave together, so that nothing of the block stays

`keep_apart` then prevents TensorFlow from merging operations of a block that plain training would leave apart. Grappler
makes one kernel of a product, a sum and an activation where nothing else reads what is between them, and such a kernel
rounds differently. In plain training the backward pass often does read it. Where a block is run twice, nothing else
reads what is inside of the first run, and nothing reads the end of the second one: each would be merged in its own way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.compat.upstream import record
from tfdist.layer_graph.pure_call import CHANGING, UNSEEDED, ImpureError, PureResult
from tfdist.memory.block_call import BlockCall, watch
from tfdist.memory.op_recorder import record_operations, upstream
from tfdist.memory.order import gated, released_together, waiting_for

# Their number may differ between the runs: some are made once for a graph, and shared.
_NOT_COMPARED = frozenset({"Placeholder", "Const"})


class Recomputed(BlockCall):
    """Keeps the inputs on the device."""

    # The operations of the first run, and their graph; none when executed eagerly.
    _graph: tf.Graph | None = None
    _made: Sequence[str] = ()

    def forward(self) -> PureResult:
        # No tape sees what happens inside: what a tape records is kept until the backward pass.
        with record.stop_recording():
            if tf.executing_eagerly():
                return self.block.run(self.trainable, self.state, self.tensors)
            self._graph = tf.compat.v1.get_default_graph()
            with record_operations(self._graph) as self._made:
                result = self.block.run(self.trainable, self.state, self.tensors)
            _check_effects(self.block.label, map(self._graph.get_operation_by_name, self._made))
            return result

    def inputs(self) -> list[tf.Tensor]:
        """The inputs again, in the backward pass."""
        return self.tensors

    def backward(self, cotangents: Sequence[tf.Tensor]) -> list[Any]:
        compiled = self.keeping.compiled
        self.keeping.order.begun.append(list(cotangents))
        # The second run reads copies that wait for the gradients of the outputs: without that, TensorFlow would run it
        # at once, or merge it with the first run, and everything would be kept after all.
        trainable, state, tensors = gated([self.trainable, self.state, self.inputs()], cotangents, compiled)
        # The two runs are compared only if they are in one graph: a gradient may be made in another one. And under XLA
        # it would not help: it merges operations by rules of its own.
        same = self._graph is not None and tf.compat.v1.get_default_graph() is self._graph and not compiled
        # `waiting_for` is for operations without inputs that could wait, such as random numbers.
        with self.autocast(), waiting_for(cotangents, compiled), tf.GradientTape() as tape, _recorded_if(same) as again:
            watch(tape, [*trainable, *tensors])
            result = self.block.run(trainable, state, tensors)
        with _recorded_if(same) as made:
            gradients = self.gradients(tape, result, [*trainable, *tensors], cotangents)
        if same:
            found = [t for t in tf.nest.flatten(gradients, expand_composites=True) if t is not None]
            keep_apart(self._graph, self._made, again, made, found)
        return released_together(gradients, compiled)


def _recorded_if(wanted: bool) -> contextlib.AbstractContextManager[list[str]]:
    return record_operations(tf.compat.v1.get_default_graph()) if wanted else contextlib.nullcontext([])


def _check_effects(block: str, operations: Iterable[tf.Operation]) -> None:
    for operation in operations:
        if operation.type in UNSEEDED:
            what = "draws random numbers that would be others the second time"
            remedy = "keras.random functions with a keras.random.SeedGenerator"
        elif operation.type in CHANGING:
            what = "changes a variable of TensorFlow, which would be done twice"
            remedy = "variables of the layer itself, made by `add_weight`"
        else:
            continue
        raise ImpureError(
            f"Received: block '{block}', which is to be run again and {what} (operation {operation.name}, "
            f"{operation.type}). Expected: {remedy}; or mode 'none' or 'swap' for this block."
        )


def keep_apart(
    graph: tf.Graph, first: Sequence[str], again: Sequence[str], backward: Sequence[str], gradients: Sequence[tf.Tensor]
) -> None:
    """Lets Grappler merge nothing across a tensor that, in plain training, the backward pass reads as well.

    Such a tensor gets an `EnsureShape` behind it, in the first run and where necessary in the second.

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
        # A loop of which a gradient is computed has more outputs: what it keeps for the gradient.
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
    named = [tensor.op for tensor in gradients if tensor.op.name in names]
    return upstream(named, lambda op: [tensor.op for tensor in op.inputs if tensor.op.name in names])


def _reads_shape(op: tf.Operation, tensor: tf.Tensor) -> bool:
    """Whether it becomes a constant before anything is merged."""
    return op.type in ("Shape", "ShapeN", "Size", "Rank") and tensor.shape.is_fully_defined()


def _part(tensor: tf.Tensor, readers: Sequence[tf.Operation]) -> None:
    """Lets operations read a tensor through an `EnsureShape`: it copies nothing, and Grappler does not remove it."""
    if tensor.shape.rank is None:
        return
    # No control dependencies: this is made in the backward pass, whose gates must not hold up the forward pass. The
    # name begins with that of the tensor, because Grappler sorts factors and terms by name before it moves constants
    # among them: the order must stay what it was.
    name = f"{tensor.op.name}/apart"
    with tf.control_dependencies(None), tf.device(tensor.op.device or None), tensor.graph.name_scope(None):
        same = tf.raw_ops.EnsureShape(input=tensor, shape=tensor.shape, name=name)
    for op in readers:
        for position, given in enumerate(op.inputs):
            if given is tensor:
                op._update_input(position, same)
