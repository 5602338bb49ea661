"""Blocks that keep on the host what their backward pass needs.

`SwappedInputs` keeps its inputs there, and is run again. `Swapped` keeps everything there that its backward pass reads;
the idea is that of TensorFlow Large Model Support (arXiv 1807.02037): edges of the graph from the forward to the
backward pass are led through the host. `Streamed` also has its weights there ("Training Large Neural Networks with
Constant Memory using a New Execution Algorithm", Pudipeddi et al., arXiv 2002.05645, which calls it L2L, layer to
layer).

The way of one tensor to the host and back:

    device:  tensor                                                                    identity -> backward pass
    host:      identity (the copy, made at once)  ... waits for the gate ...  identity

TensorFlow sends a tensor as soon as it is there. So the gate is on the host, between two identities: it is the gradient
with which the block begins that goes back `prefetch` blocks earlier.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.layer_graph.costs import NOT_COMPUTED
from tfdist.layer_graph.pure_call import PureResult
from tfdist.memory.block_call import BlockCall, watch
from tfdist.memory.op_recorder import record_operations
from tfdist.memory.order import Keeping, gated, released_together, waiting_for
from tfdist.memory.recompute import Recomputed

_NOT_COPIED = frozenset({tf.resource, tf.variant, tf.string})


def is_data(tensor: tf.Tensor) -> bool:
    """Whether it may go to the host: no resource or text, and no shape.

    Grappler replaces shapes by constants before a step runs; through a copy on the host it could not.
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
    """Brings a tensor from the host to the device, not before the gate is open.

    Args:
        copy: as `to_host` has made it.
        device: on which the tensor was; empty if that is left to TensorFlow.
        keeping: of the model's call.
        gate: what the host waits for before it sends; by default what `keeping` says for the backward pass.
    """
    # The wait must be on the host, before the tensor is sent: a wait on the device would come after the transfer, when
    # the tensor takes memory there already.
    gate = keeping.order.fetch_after(keeping.prefetch) if gate is None else gate
    with tf.device(keeping.host), waiting_for(gate, keeping.compiled):
        sent = tf.identity(copy)
    with tf.device(device or None):
        return tf.identity(sent)


class SwappedInputs(Recomputed):
    """Keeps the inputs on the host: copied in the forward pass, fetched in the backward pass, before the second run."""

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


class Swapped(BlockCall):
    """Keeps everything on the host that its backward pass reads.

    The forward pass runs under a tape, as in plain training, and so makes the operations of the gradients. Then every
    edge from a tensor of the forward pass to an operation of the backward pass is replaced: the operation reads a
    copy that has been on the host. What nothing but the backward pass read is free on the device after its copy.
    """

    def __init__(self, *args: Any):
        if tf.executing_eagerly():
            raise ValueError(
                "Received: mode 'swap' outside of a graph (run_eagerly=True, or a tape without tf.function). What the "
                "backward pass reads is led through the host by changing a graph. Expected: run_eagerly=False; or mode "
                "'recompute' or 'recompute+swap'."
            )
        super().__init__(*args)
        self._graph = tf.compat.v1.get_default_graph()

    def forward(self) -> PureResult:
        with record_operations(self._graph) as made, tf.GradientTape(persistent=True) as self._tape:
            watch(self._tape, [*self.trainable, *self.tensors])
            self._result = self.block.run(self.trainable, self.state, self.tensors)
        self._made = {*made, *(tensor.op.name for tensor in self.tensors)}
        return self._result

    def backward(self, cotangents: Sequence[tf.Tensor]) -> list[Any]:
        self.keeping.order.begun.append(list(cotangents))
        with record_operations(self._graph) as made:
            gradients = self.gradients(self._tape, self._result, [*self.trainable, *self.tensors], cotangents)
        self._reroute(made)
        # Only now there are copies to wait for: which tensors the gradients read was not known in the forward pass.
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
    return is_data(tensor) and tensor.op.type not in NOT_COMPUTED


class Fetched(Recomputed):
    """Takes the values of its variables from the host; where nothing is trained, this is all there is to do."""

    remedy = "another strategy than HostOffloadStrategy"

    def __init__(self, *args: Any):
        super().__init__(*args)
        # The block computes where its inputs are; its variables are on the host.
        self._device = self.tensors[0].device if self.tensors else ""

    def forward(self) -> PureResult:
        with self._variables_on_device(self._start_of_an_earlier_block()):
            result = super().forward()
            on_device = self.state
        # A state that the block has not changed is still on the host: give that back, not the copy on the device.
        triples = zip(result.state, on_device, self.state, strict=True)
        return result._replace(state=[on_host if new is old else new for new, old, on_host in triples])

    @contextlib.contextmanager
    def _variables_on_device(self, gate: Sequence[Any]) -> Iterator[None]:
        """While the block runs, its variables' values are copies on the device, which leave the host after the gate."""
        on_host = self.trainable, self.state
        self.trainable, self.state = (
            [from_host(value, self._device, self.keeping, gate) for value in values] for values in on_host
        )
        try:
            yield
        finally:
            self.trainable, self.state = on_host

    def _start_of_an_earlier_block(self) -> list[tf.Operation]:
        """The gate of the weights in the forward pass: the first operation of the block `prefetch` blocks before.

        Without it, the weights of all blocks would be sent at the beginning of the step.
        """
        place = self.place - self.keeping.prefetch
        first = self.keeping.order.first[place] if place >= 0 else None
        return [first] if first is not None else []


class Streamed(Fetched, SwappedInputs):
    """Fetches its inputs and the values of its variables once more in the backward pass, and runs again.

    Nothing that was fetched in the forward pass stays on the device until then.
    """

    inference = Fetched

    def backward(self, cotangents: Sequence[tf.Tensor]) -> list[Any]:
        order = self.keeping.order
        # The second run needs the weights on the device, fetched behind the same gate as the inputs.
        with self._variables_on_device(order.fetch_after(self.keeping.prefetch, [list(cotangents)])):
            gradients = super().backward(cotangents)
        count = len(self.trainable)
        # Gradients of weights go to the host, where the optimizer updates; those of inputs go on to the next block.
        with tf.device(self.keeping.host):
            on_host = tf.nest.map_structure(_copy, gradients[:count], expand_composites=True)
        order.sent.append([t for t in tf.nest.flatten(on_host, expand_composites=True) if t is not None])
        # Back-pressure: the next block waits until the gradients of the block before this one are on the host. Without
        # it the device would compute faster than the link can send, and gradients would pile up on it.
        earlier = order.sent[-2] if len(order.sent) > 1 else []
        [passed] = gated([[g for g in gradients[count:] if g is not None]], earlier, self.keeping.compiled)
        rest = iter(passed)
        return [*on_host, *(None if g is None else next(rest) for g in gradients[count:])]


def _copy(tensor: tf.Tensor | None) -> tf.Tensor | None:
    return None if tensor is None else tf.identity(tensor)
