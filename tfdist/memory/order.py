"""In which order the blocks of a step go forward and back, and what waits for what.

In a graph an operation waits for its inputs and for nothing else. Without more edges, everything that the backward pass
fetches from the host would be fetched at its beginning, and all blocks would be run again at once. `Order` knows what a
block has to wait for; `gated` and `waiting_for` put that into the graph, as control dependencies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

_ATTRIBUTE = "_tfdist_orders"


def gated(groups: Sequence[Sequence[tf.Tensor]], gate: Sequence[tf.Tensor], compiled: bool) -> list[list[tf.Tensor]]:
    """Returns copies of tensors, so that whatever is computed from the copies runs after the gate.

    Each copy is an `identity` with control dependencies on the gate, on the device of the surrounding code.

    XLA (`compiled`) drops control dependencies, and merges what is computed twice. With its optimization barriers
    instead, a step on a CPU needed as much as without any recomputation.

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
    """Lets every operation that is made in this context wait, also those without inputs, such as random numbers."""
    return contextlib.nullcontext() if compiled else tf.control_dependencies(list(gate))


def released_together(gradients: Sequence[Any], compiled: bool) -> list[Any]:
    """The same gradients; each can be used only when all are there.

    All of them are computed from what the second run has made. If the gradient of the inputs were used at once, the
    executor might compute those of the weights much later, and keep until then what they are computed from.
    """
    flat = tf.nest.flatten(gradients, expand_composites=True)
    [passed] = gated([[t for t in flat if t is not None]], [t for t in flat if t is not None], compiled)
    rest = iter(passed)
    passed = [None if t is None else next(rest) for t in flat]
    return tf.nest.pack_sequence_as(list(gradients), passed, expand_composites=True)


def _never(gate: Sequence[tf.Tensor]) -> tf.Tensor:
    """False, but XLA cannot know that before it has computed the gate: `x == x and x != x`."""
    # At most one element of each tensor: a sum over all elements would read all of them once more.
    heads = [tf.cast(tf.reshape(tensor, [-1])[:1], tf.float32) for tensor in gate]
    number = tf.reduce_sum(tf.concat(heads, 0))
    return tf.logical_and(tf.equal(number, number), tf.not_equal(number, number))


class Order:
    """The blocks of one step, on one replica.

    Attributes:
        first: for each block, in the order of the forward pass, the operation that it begins with.
        copies: for each block, the operations that copy to the host what it keeps there.
        begun: for each block, in the order of the backward pass, the gradients that it begins with.
        sent: for each block, in the order of the backward pass, the gradients of its weights that are on the host.
        on_host: what has been copied to the host, by id of the tensor, with the tensor, so that the id stays its own.
        gathering: for each block that gathers its weights, what does so for its backward pass.
        sources: the names of the operations that have made weights and inputs of blocks, if these have gradients.
    """

    def __init__(self) -> None:
        self.first: list[tf.Operation | None] = []
        self.copies: list[list[tf.Operation]] = []
        self.begun: list[list[tf.Tensor]] = []
        self.sent: list[list[tf.Tensor]] = []
        self.on_host: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}
        self.gathering: dict[int, Callable[[Sequence[Any]], None]] = {}
        self.sources: set[str] = set()

    def begin_block(self) -> int:
        """Adds a block to the forward pass; returns its place."""
        self.first.append(None)
        self.copies.append([])
        return len(self.first) - 1

    def to_wait_for(self, place: int) -> list[tf.Operation]:
        """What a block waits for before it begins: the copies of the block before the last one.

        Without it the device would compute faster than the link to the host can send, and tensors that are to leave
        would pile up on the device.
        """
        return self.copies[place - 2] if place >= 2 else []

    def hold_back(self, place: int) -> None:
        """Lets the block after the next one wait for the copies of a block, where these are added in the backward pass.

        Then the forward pass is in the graph already: the edges are added to operations that exist.
        """
        if place + 2 < len(self.first) and self.first[place + 2] is not None:
            self.first[place + 2]._add_control_inputs(self.copies[place])

    def fetch_after(self, prefetch: int, beginning: Sequence[list[tf.Tensor]] = ()) -> list[tf.Tensor]:
        """What fetching from the host waits for, for the block whose backward pass begins now.

        It waits for the gradients with which the block began whose backward pass came `prefetch` blocks earlier. So
        fetching overlaps with the computation of `prefetch` blocks, and no more than these are on the device.

        `beginning`: gradients of a block that is about to begin, and is not in `begun` yet.
        """
        begun = [*self.begun, *beginning]
        return begun[max(0, len(begun) - 1 - prefetch)]


def current_order() -> Order:
    """The order of the graph that is being made. Each replica is traced by a thread of its own, and has its own order.

    Outside of a graph everything happens in the order of the program, and each call gets a new order.
    """
    if tf.executing_eagerly():
        return Order()
    # Stored on the graph itself: the tensors of an order refer to their graph, and a table of graphs, even with weak
    # keys, would never let it go.
    graph = tf.compat.v1.get_default_graph()
    if not hasattr(graph, _ATTRIBUTE):
        setattr(graph, _ATTRIBUTE, {})
    return getattr(graph, _ATTRIBUTE).setdefault(threading.get_ident(), Order())


@dataclasses.dataclass(frozen=True)
class Keeping:
    """How the blocks of one call of a model are called.

    Attributes:
        order: of the blocks.
        host: the device that takes what does not stay.
        prefetch: how many blocks ahead something is fetched.
        min_bytes: what is known to be smaller stays.
        compiled: whether XLA compiles the call.
    """

    order: Order
    host: str = "CPU:0"
    prefetch: int = 1
    min_bytes: int = 0
    compiled: bool = False

    def moves(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor is large enough to be sent to the host."""
        count = tensor.shape.num_elements()
        return count is None or count * tensor.dtype.size >= self.min_bytes
