"""The order in which the blocks of a step go forward and back: what waits for what.

In a graph an operation waits for its inputs and for nothing else: without further ado, all that is fetched from the
host for the backward pass would be fetched at its beginning, and all blocks would be run again at once.
"""

from __future__ import annotations

import threading

import tensorflow as tf


class Order:
    """The blocks of one step, on one replica.

    Attributes:
        first: for each block, in the order of the forward pass, the operation that it begins with.
        copies: for each block, the operations that copy to the host what it keeps there.
        begun: for each block, in the order of the backward pass, the gradients that it begins with.
        sent: for each block, in the order of the backward pass, the gradients of its weights that are on the host.
        on_host: what has been copied to the host, by id of the tensor, with the tensor, so that the id stays its own.
    """

    def __init__(self) -> None:
        self.first: list[tf.Operation | None] = []
        self.copies: list[list[tf.Operation]] = []
        self.begun: list[list[tf.Tensor]] = []
        self.sent: list[list[tf.Tensor]] = []
        self.on_host: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}

    def begin_block(self) -> int:
        """Notes a further block of the forward pass; returns its place."""
        self.first.append(None)
        self.copies.append([])
        return len(self.first) - 1

    def to_wait_for(self, place: int) -> list[tf.Operation]:
        """What a block waits for before it begins: the copies of the block before the last one.

        Else the device would go on, and what is left behind would wait there for its way to the host.
        """
        return self.copies[place - 2] if place >= 2 else []

    def hold_back(self, place: int) -> None:
        """The same for copies of a block that are made afterwards, when others have begun already."""
        if place + 2 < len(self.first) and self.first[place + 2] is not None:
            self.first[place + 2]._add_control_inputs(self.copies[place])

    def fetch_after(self, prefetch: int) -> list[tf.Tensor]:
        """What the fetching for the block that goes back now waits for: the begin of the `prefetch`-th before it."""
        return self.begun[max(0, len(self.begun) - 1 - prefetch)]


def current_order() -> Order:
    """That of the graph that is being made; each replica has a thread, and an order of its own.

    Outside of a graph everything happens in the order of the program, and each call begins anew.
    """
    if tf.executing_eagerly():
        return Order()
    # On the graph itself, which its tensors keep: in a table of graphs they would keep it for ever.
    graph = tf.compat.v1.get_default_graph()
    if not hasattr(graph, _ATTRIBUTE):
        setattr(graph, _ATTRIBUTE, {})
    return getattr(graph, _ATTRIBUTE).setdefault(threading.get_ident(), Order())


_ATTRIBUTE = "_tfdist_orders"
