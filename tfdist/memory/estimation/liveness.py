"""What is held at a time when the operations of a graph run in a certain order.

Nothing runs: an operation takes memory for what it makes, and what nobody needs any more is given back.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Sequence

from tfdist.memory.estimation.operation import Operation

# The order in which TensorFlow's executor runs what is ready differs, and the peak by up to about a tenth.
MARGIN = 1.1


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


def simulate(operations: Sequence[Operation], order: Sequence[int], kept: Collection[int] = ()) -> dict[str, Usage]:
    """Runs through the operations and counts, by device.

    A tensor that is read on another device is copied there, as soon as it is made. Tensors that no operation makes
    take no memory: they are there before, and stay.

    Args:
        operations: of a graph.
        order: their positions, each after those that it needs.
        kept: tensors that are needed after the end.

    Example:
        >>> chain = [Operation("a", (), (0,), (8,)), Operation("a", (0,), (1,), (4,)), Operation("a", (1,), (2,), (1,))]
        >>> simulate(chain, range(3))["a"].peak
        12
    """
    return _Run(operations, kept).through(order)


@dataclasses.dataclass
class _Buffer:
    device: str
    size: int
    label: str
    readers: int = 0


class _Run:
    def __init__(self, operations: Sequence[Operation], kept: Collection[int]):
        self._operations = operations
        self._usage = {op.device: Usage() for op in operations}
        self._labels = {device: collections.Counter[str]() for device in self._usage}
        self._now = dict.fromkeys(self._usage, 0)
        self._buffers: dict[tuple[int, str], _Buffer] = {}
        # How many operations of a device read a tensor.
        self._readers: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        for op in operations:
            for tensor in set(op.inputs):
                self._readers[tensor][op.device] += 1
            for tensor in {*op.outputs} & {*kept}:
                self._readers[tensor][op.device] += 1

    def through(self, order: Sequence[int]) -> dict[str, Usage]:
        for position in order:
            self._run(self._operations[position])
        return self._usage

    def _run(self, op: Operation) -> None:
        taken = [self._buffers.get((tensor, op.device)) for tensor in dict.fromkeys(op.inputs)]
        made: list[_Buffer] = []
        for size in op.sizes:
            buffer = self._shared(op, size, taken, made)
            if buffer is None:
                # What is seen of something that is there anyhow takes nothing.
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
        for device, usage in self._usage.items():
            usage.timeline.append({label: size for label, size in self._labels[device].items() if size})

    def _shared(self, op: Operation, size: int, taken: Sequence[_Buffer | None], made: list) -> _Buffer | None:
        """The buffer of an input that an output is in."""
        if op.is_view:
            return taken[0] if taken else None
        if op.is_in_place:
            for buffer in taken:
                if buffer is not None and buffer.readers == 1 and buffer.size == size and buffer not in made:
                    # What was there is gone.
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
        usage = self._usage[device]
        if self._now[device] + inside > usage.peak:
            usage.peak = self._now[device] + inside
            at_peak = self._labels[device] + collections.Counter({label: inside})
            usage.at_peak = {name: size for name, size in at_peak.items() if size}
