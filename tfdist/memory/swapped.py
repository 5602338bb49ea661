"""Blocks of which all that the backward pass reads spends the time until then on the host.

The idea is that of TensorFlow Large Model Support (arXiv 1807.02037): edges of the graph from the forward to the
backward pass are led through the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.layer_graph.pure_call import PureResult
from tfdist.memory.block_call import BlockCall, watch
from tfdist.memory.gates import released_together
from tfdist.memory.host_copies import from_host, is_data, to_host
from tfdist.memory.noted import noted

_LEFT = frozenset({"ReadVariableOp", "Const", "VarHandleOp", "Placeholder"})


class Swapped(BlockCall):
    """Keeps everything on the host."""

    def __init__(self, *args: Any):
        if tf.executing_eagerly():
            raise ValueError(
                "Received: mode 'swap' outside of a graph (run_eagerly=True, or a tape without tf.function). What the "
                "backward pass reads is led through the host by changing a graph. Expected: run_eagerly=False; or mode "
                "'recompute' or 'park'."
            )
        super().__init__(*args)
        self._graph = tf.compat.v1.get_default_graph()

    def forward(self) -> PureResult:
        with noted(self._graph) as made, tf.GradientTape(persistent=True) as self._tape:
            watch(self._tape, [*self.trainable, *self.tensors])
            self._result = self.block.run(self.trainable, self.state, self.tensors)
        self._made = {*made, *(tensor.op.name for tensor in self.tensors)}
        return self._result

    def backward(self, cotangents: Sequence[tf.Tensor]) -> list[Any]:
        self.keeping.order.begun.append(list(cotangents))
        with noted(self._graph) as made:
            gradients = self.gradients(self._tape, self._result, [*self.trainable, *self.tensors], cotangents)
        self._reroute(made)
        self.keeping.order.hold_back(self.place)
        return released_together(gradients, compiled=False)

    def _reroute(self, names: Sequence[str]) -> None:
        """Lets the operations of the backward pass read from the host what the forward pass has made."""
        back: dict[int, tf.Tensor] = {}
        for operation in map(self._graph.get_operation_by_name, names):
            for position, tensor in enumerate(operation.inputs):
                if tensor.op.name not in self._made or not _is_kept(tensor) or not self.keeping.moves(tensor):
                    continue
                if id(tensor) not in back:
                    back[id(tensor)] = from_host(to_host(tensor, self.place, self.keeping), tensor.device, self.keeping)
                operation._update_input(position, back[id(tensor)])


def _is_kept(tensor: tf.Tensor) -> bool:
    """Whether it is the result of a computation, which is kept for the backward pass."""
    return is_data(tensor) and tensor.op.type not in _LEFT
