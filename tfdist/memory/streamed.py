"""Blocks whose weights are on the host, and on the device only while the block is.

Source: "Training Large Neural Networks with Constant Memory using a New Execution Algorithm" (Pudipeddi et al., arXiv
2002.05645), which calls it L2L, layer to layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.layer_graph.pure_call import PureResult
from tfdist.memory.gates import gated
from tfdist.memory.host_copies import from_host
from tfdist.memory.recomputed import Parked, Recomputed


class Fetched(Recomputed):
    """Takes the values of its variables from the host; where nothing is trained, this is all there is to do."""

    remedy = "another strategy than HostOffloadStrategy"

    def __init__(self, *args: Any):
        super().__init__(*args)
        # The block is where its inputs are: the variables are elsewhere.
        self._device = self.tensors[0].device if self.tensors else ""

    def forward(self) -> PureResult:
        with self._variables_on_device(self._start_of_an_earlier_block()):
            result = super().forward()
            on_device = self.state
        # What the block has not changed is still on the host, and must not be sent back.
        triples = zip(result.state, on_device, self.state, strict=True)
        return result._replace(state=[on_host if new is old else new for new, old, on_host in triples])

    @contextlib.contextmanager
    def _variables_on_device(self, gate: Sequence[Any]) -> Iterator[None]:
        """For as long as the block runs, its values are copies on the device, which leave the host after the gate."""
        on_host = self.trainable, self.state
        self.trainable, self.state = (
            [from_host(value, self._device, self.keeping, gate) for value in values] for values in on_host
        )
        try:
            yield
        finally:
            self.trainable, self.state = on_host

    def _start_of_an_earlier_block(self) -> list[tf.Operation]:
        """Without it, all weights of the model would be sent at the begin of the step."""
        place = self.place - self.keeping.prefetch
        first = self.keeping.order.first[place] if place >= 0 else None
        return [first] if first is not None else []


class Streamed(Fetched, Parked):
    """Fetches its inputs and the values of its variables once more in the backward pass, and runs again.

    What it has fetched in the forward pass is gone by then: nothing of a block stays on the device.
    """

    inference = Fetched

    def backward(self, cotangents: Sequence[tf.Tensor]) -> list[Any]:
        order, prefetch = self.keeping.order, self.keeping.prefetch
        begun = [*order.begun, list(cotangents)]
        with self._variables_on_device(begun[max(0, len(begun) - 1 - prefetch)]):
            gradients = super().backward(cotangents)
        count = len(self.trainable)
        with tf.device(self.keeping.host):
            on_host = tf.nest.map_structure(_copy, gradients[:count], expand_composites=True)
        order.sent.append([t for t in tf.nest.flatten(on_host, expand_composites=True) if t is not None])
        # Back-pressure: else the device would go on, and gradients would wait there for their way to the host.
        earlier = order.sent[-2] if len(order.sent) > 1 else []
        [passed] = gated([[g for g in gradients[count:] if g is not None]], earlier, self.keeping.compiled)
        rest = iter(passed)
        return [*on_host, *(None if g is None else next(rest) for g in gradients[count:])]


def _copy(tensor: tf.Tensor | None) -> tf.Tensor | None:
    return None if tensor is None else tf.identity(tensor)
