"""In which order the operations of a graph run, where several orders are possible.

TensorFlow's executor runs what is ready, in an order that differs from run to run. Peaks of memory lie between those of
the two orders here, or near them, where they were measured.
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Sequence

from tfdist.memory.estimation.operation import Operation

# The executor runs what costs little at once, and leaves the rest to its threads. In bytes that are read or written.
_LITTLE = 16384


def as_made(operations: Sequence[Operation]) -> list[int]:
    """Everything after what it needs, and otherwise in the given order: updates of weights come last.

    Args:
        operations: of a graph.

    Returns:
        Their positions.

    Raises:
        ValueError: if operations wait for each other.
    """
    graph = _Dependencies(operations)
    ready = graph.roots()
    order = []
    while ready:
        position = heapq.heappop(ready)
        order.append(position)
        for following in graph.done(position):
            heapq.heappush(ready, following)
    return _checked(order, operations)


def newest_first(operations: Sequence[Operation]) -> list[int]:
    """What costs little at once, and of the rest what has become ready last: updates follow their gradients.

    Args:
        operations: of a graph.

    Returns:
        Their positions.

    Raises:
        ValueError: if operations wait for each other.
    """
    graph = _Dependencies(operations)
    size = {tensor: size for op in operations for tensor, size in zip(op.outputs, op.sizes, strict=True)}
    costs = [max(sum(op.sizes), *(size.get(tensor, 0) for tensor in op.inputs), 0) for op in operations]
    cheap = collections.deque(graph.roots())
    others: list[int] = []
    order = []
    while cheap or others:
        position = cheap.popleft() if cheap else others.pop()
        order.append(position)
        for following in graph.done(position):
            (cheap if costs[following] <= _LITTLE else others).append(following)
    return _checked(order, operations)


class _Dependencies:
    """Which operations become ready when another one is done."""

    def __init__(self, operations: Sequence[Operation]):
        maker = {tensor: position for position, op in enumerate(operations) for tensor in op.outputs}
        self._followers: list[list[int]] = [[] for _ in operations]
        self._missing = [0] * len(operations)
        for position, op in enumerate(operations):
            for before in {*(maker[tensor] for tensor in op.inputs if tensor in maker), *op.waits}:
                self._followers[before].append(position)
                self._missing[position] += 1

    def roots(self) -> list[int]:
        return [position for position, count in enumerate(self._missing) if not count]

    def done(self, position: int) -> list[int]:
        for following in self._followers[position]:
            self._missing[following] -= 1
        return [following for following in self._followers[position] if not self._missing[following]]


def _checked(order: list[int], operations: Sequence[Operation]) -> list[int]:
    if len(order) != len(operations):
        raise ValueError(
            f"Received: {len(operations) - len(order)} operations that wait for each other. Expected: a graph without "
            "cycles."
        )
    return order
