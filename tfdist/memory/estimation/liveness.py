"""How many bytes are held while the operations of a graph run, in a certain order.

Nothing is run: an operation takes memory for its outputs, and gives a tensor's memory back when nobody reads it again.

Several orders are possible: TensorFlow's executor runs what is ready, in an order that differs from run to run. Where
peaks of memory were measured, they lie between those of the two orders here (`as_made`, `newest_first`), or near
them.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
from collections.abc import Callable, Sequence

# Operations that read or write at most this many bytes are cheap: the executor runs them at once, and gives the others
# to its threads.
_LITTLE = 16384
# The order of TensorFlow's executor differs from run to run, and with it the peak, by up to about a tenth.
MARGIN = 1.1


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a graph.

    Attributes:
        device: where it runs.
        inputs: the tensors that it reads, by number.
        outputs: the tensors that it makes, by number.
        sizes: of the outputs, in bytes.
        waits: positions of the operations of which it does not read anything, but for which it waits.
        is_view: whether its outputs share the memory of its first input.
        is_in_place: whether an output may overwrite an input that nobody else reads.
        inside: bytes that it needs only while it runs.
        label: what its outputs count as, such as the name of a block.
        name: its name in the graph.
    """

    device: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    sizes: tuple[int, ...]
    waits: tuple[int, ...] = ()
    is_view: bool = False
    is_in_place: bool = False
    inside: int = 0
    label: str = ""
    name: str = ""


def as_made(operations: Sequence[Operation]) -> list[int]:
    """The given order, except that an operation waits for those that it needs: updates of weights come last.

    Returns:
        Their positions.

    Raises:
        ValueError: if operations wait for each other.
    """
    return _in_order(operations, lambda position, ready: position)


def newest_first(operations: Sequence[Operation]) -> list[int]:
    """Cheap operations first; of the others, the one that became ready last: updates follow their gradients.

    Returns:
        Their positions.

    Raises:
        ValueError: if operations wait for each other.
    """
    size = {tensor: size for op in operations for tensor, size in zip(op.outputs, op.sizes, strict=True)}
    costs = [max(sum(op.sizes), *(size.get(tensor, 0) for tensor in op.inputs), 0) for op in operations]
    # What waits for nothing is run at the beginning, whatever it costs.
    is_first = [not op.waits and not any(tensor in size for tensor in op.inputs) for op in operations]
    is_cheap = [first or cost <= _LITTLE for first, cost in zip(is_first, costs, strict=True)]
    # Cheap operations before the others; of the cheap ones the oldest first, of the others the newest.
    return _in_order(operations, lambda position, ready: ready if is_cheap[position] else 2 * len(operations) - ready)


def _in_order(operations: Sequence[Operation], rank: Callable[[int, int], int]) -> list[int]:
    """Runs what is ready, the lowest rank first.

    Args:
        operations: of a graph.
        rank: of an operation that is ready, by its position, and by how many became ready before it.
    """
    maker = {tensor: position for position, op in enumerate(operations) for tensor in op.outputs}
    followers: list[list[int]] = [[] for _ in operations]
    missing = [0] * len(operations)
    for position, op in enumerate(operations):
        for before in {*(maker[tensor] for tensor in op.inputs if tensor in maker), *op.waits}:
            followers[before].append(position)
            missing[position] += 1
    ready = [(rank(n, count), n) for count, n in enumerate(n for n, needed in enumerate(missing) if not needed)]
    seen = len(ready)
    heapq.heapify(ready)
    order = []
    while ready:
        _, position = heapq.heappop(ready)
        order.append(position)
        for following in followers[position]:
            missing[following] -= 1
            if not missing[following]:
                heapq.heappush(ready, (rank(following, seen), following))
                seen += 1
    if len(order) != len(operations):
        raise ValueError(
            f"Received: {len(operations) - len(order)} operations that wait for each other. Expected: a graph without "
            "cycles."
        )
    return order


@dataclasses.dataclass
class Usage:
    """What one device holds.

    Attributes:
        peak: bytes at the peak.
        at_peak: bytes at the peak by label.
        timeline: bytes by label after each operation, of all devices, in their order.
    """

    peak: int = 0
    at_peak: dict[str, int] = dataclasses.field(default_factory=dict)
    timeline: list[dict[str, int]] = dataclasses.field(default_factory=list)


def simulate(operations: Sequence[Operation], order: Sequence[int]) -> dict[str, Usage]:
    """Goes through the operations in this order, and counts the bytes that each device holds.

    A tensor that is read on another device is copied there, as soon as it is made. Tensors that no operation makes
    (weights, the batch) take no memory: they are there before the step, and stay.

    Args:
        operations: of a graph.
        order: their positions, each after those that it needs.

    Returns:
        What each device holds.

    Example:
        >>> chain = [Operation("a", (), (0,), (8,)), Operation("a", (0,), (1,), (4,)), Operation("a", (1,), (2,), (1,))]
        >>> simulate(chain, range(3))["a"].peak
        12
    """
    run = _Run(operations)
    for position in order:
        run.step(operations[position])
    return run.usage


@dataclasses.dataclass
class _Buffer:
    device: str
    size: int
    label: str
    readers: int = 0


class _Run:
    """What is held so far: a buffer for each tensor that is still read, on each device where it is read."""

    def __init__(self, operations: Sequence[Operation]):
        self.usage = {op.device: Usage() for op in operations}
        self._labels = {device: collections.Counter[str]() for device in self.usage}
        self._now = dict.fromkeys(self.usage, 0)
        self._buffers: dict[tuple[int, str], _Buffer] = {}
        # How many operations of a device read a tensor.
        self._readers: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        for op in operations:
            for tensor in set(op.inputs):
                self._readers[tensor][op.device] += 1

    def step(self, op: Operation) -> None:
        """Runs one operation: makes its outputs, copies them to where they are read, and frees what nobody reads."""
        taken = [self._buffers.get((tensor, op.device)) for tensor in dict.fromkeys(op.inputs)]
        made: list[_Buffer] = []
        for size in op.sizes:
            buffer = self._shared(op, size, taken, made)
            if buffer is None:
                # A view of a tensor that is always there (a weight, the batch) takes no memory.
                buffer = self._allocate(op.device, 0 if op.is_view else size, op.label)
            made.append(buffer)
        self._note_peak(op.device, op.inside, op.label)
        for tensor, buffer in zip(op.outputs, made, strict=True):
            buffer.readers += self._readers[tensor][op.device]
            self._buffers[tensor, op.device] = buffer
            for device in self._readers[tensor].keys() - {op.device}:
                copy = self._allocate(device, buffer.size, op.label)
                copy.readers = self._readers[tensor][device]
                self._buffers[tensor, device] = copy
                self._note_peak(device)
        for buffer in taken:
            if buffer is not None:
                buffer.readers -= 1
        for buffer in (*taken, *made):
            if buffer is not None and not buffer.readers:
                self._free(buffer)
        for device, usage in self.usage.items():
            usage.timeline.append({label: size for label, size in self._labels[device].items() if size})

    def _shared(self, op: Operation, size: int, taken: Sequence[_Buffer | None], made: list) -> _Buffer | None:
        """The buffer of an input that an output is in."""
        if op.is_view:
            return taken[0] if taken else None
        if op.is_in_place:
            for buffer in taken:
                if buffer is not None and buffer.readers == 1 and buffer.size == size and buffer not in made:
                    # The output overwrites the input, whose label no longer counts.
                    self._labels[op.device][buffer.label] -= size
                    self._labels[op.device][op.label] += size
                    buffer.label = op.label
                    return buffer
        return None

    def _allocate(self, device: str, size: int, label: str) -> _Buffer:
        self._now[device] += size
        self._labels[device][label] += size
        return _Buffer(device, size, label)

    def _free(self, buffer: _Buffer) -> None:
        self._now[buffer.device] -= buffer.size
        self._labels[buffer.device][buffer.label] -= buffer.size
        buffer.size = 0

    def _note_peak(self, device: str, inside: int = 0, label: str = "") -> None:
        usage = self.usage[device]
        if self._now[device] + inside > usage.peak:
            usage.peak = self._now[device] + inside
            at_peak = self._labels[device] + collections.Counter({label: inside})
            usage.at_peak = {name: size for name, size in at_peak.items() if size}
