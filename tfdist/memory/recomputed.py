"""Blocks that are run again in the backward pass, from inputs that are kept on the device or on the host.

Source: "Training Deep Nets with Sublinear Memory Cost" (Chen et al., arXiv 1604.06174). Other than `keras.remat` and
`tf.recompute_grad`, the second run has the seeds and the statistics of the first one, and changes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record

from tfdist.layer_graph.effects import CHANGING, UNSEEDED
from tfdist.layer_graph.pure_call import ImpureError, PureResult
from tfdist.memory.block_call import BlockCall, watch
from tfdist.memory.fusion import keep_apart
from tfdist.memory.gates import gated, released_together, waiting_for
from tfdist.memory.host_copies import from_host, to_host
from tfdist.memory.noted import noted


class Recomputed(BlockCall):
    """Keeps the inputs."""

    # What the first run has made, and where; nothing outside of a graph.
    _graph: tf.Graph | None = None
    _made: Sequence[str] = ()

    def forward(self) -> PureResult:
        with record.stop_recording():
            if tf.executing_eagerly():
                return self.block.run(self.trainable, self.state, self.tensors)
            self._graph = tf.compat.v1.get_default_graph()
            with noted(self._graph) as self._made:
                result = self.block.run(self.trainable, self.state, self.tensors)
            _check_effects(self.block.label, map(self._graph.get_operation_by_name, self._made))
            return result

    def inputs(self) -> list[tf.Tensor]:
        """The inputs again, in the backward pass."""
        return self.tensors

    def backward(self, cotangents: Sequence[tf.Tensor]) -> list[Any]:
        compiled = self.keeping.compiled
        self.keeping.order.begun.append(list(cotangents))
        trainable, state, tensors = gated([self.trainable, self.state, self.inputs()], cotangents, compiled)
        # The gradient may be asked for elsewhere; and XLA merges as it likes.
        same = self._graph is not None and tf.compat.v1.get_default_graph() is self._graph and not compiled
        # The context is for what has no inputs that could wait: random numbers, say.
        with self.autocast(), waiting_for(cotangents, compiled), tf.GradientTape() as tape, _noted(same) as again:
            watch(tape, [*trainable, *tensors])
            result = self.block.run(trainable, state, tensors)
        with _noted(same) as made:
            gradients = self.gradients(tape, result, [*trainable, *tensors], cotangents)
        if same:
            found = [t for t in tf.nest.flatten(gradients, expand_composites=True) if t is not None]
            keep_apart(self._graph, self._made, again, made, found)
        return released_together(gradients, compiled)


def _noted(wanted: bool) -> contextlib.AbstractContextManager[list[str]]:
    return noted(tf.compat.v1.get_default_graph()) if wanted else contextlib.nullcontext([])


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


class Parked(Recomputed):
    """Keeps the inputs on the host."""

    def __init__(self, block: Any, trainable: list, state: list, tensors: list, keeping: Any):
        super().__init__(block, trainable, state, tensors, keeping)
        self._devices = [tensor.device for tensor in self.tensors]
        self._copies = [to_host(t, self.place, keeping) if keeping.moves(t) else None for t in tensors]

    def forward(self) -> PureResult:
        result = super().forward()
        self.tensors = [t if copy is None else None for t, copy in zip(self.tensors, self._copies, strict=True)]
        return result

    def inputs(self) -> list[tf.Tensor]:
        kept = zip(self.tensors, self._copies, self._devices, strict=True)
        return [t if copy is None else from_host(copy, device, self.keeping) for t, copy, device in kept]
