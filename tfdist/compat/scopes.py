"""Leaving `strategy.scope()` for a while: what one process of several does alone must not need the others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tfdist.compat.upstream import distribute_lib, ops


@contextlib.contextmanager
def outside_of_scope() -> Iterator[None]:
    """Within the block, eager code runs as if no strategy's scope were open.

    In the scope of several processes every new variable is a broadcast. Keras makes some where nobody expects any: to
    save a model, it makes an optimizer and a metric, whose attributes it compares with the model's.
    """
    graph = ops.get_default_graph()
    creators, graph._variable_creator_stack = graph._variable_creator_stack, []
    distribute_lib._push_per_thread_mode(distribute_lib._get_default_replica_mode())
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()
        graph._variable_creator_stack = creators
