"""Schedules of pipeline parallelism: in which order each device computes forwards and backwards, and how long it takes.

This module imports neither TensorFlow nor NumPy, so that `tfdist plan` can use it and start at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple


class Instruction(NamedTuple):
    """One computation: the forward or the backward of one micro-batch through one chunk of the model.

    Where a schedule has "weights", these are the gradients of weights, and its backwards are those of inputs alone.

    Example:
        >>> Instruction("forward", chunk=0, microbatch=3).kind
        'forward'
    """

    kind: Literal["forward", "backward", "weights"]
    chunk: int
    microbatch: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What each device computes, in order. Chunk `c` of the model is on device `c % devices`.

    Attributes:
        name: name of the schedule, such as "1f1b".
        devices: number of devices, K.
        microbatches: number of micro-batches of a step, M.
        chunks_per_device: number of chunks on each device, V.
        orders: instructions of each device.

    Example:
        >>> schedule = make_schedule("1f1b", devices=2, microbatches=4)
        >>> schedule.in_flight(), schedule.bubble()
        ((2, 1), 0.2)
    """

    name: str
    devices: int
    microbatches: int
    chunks_per_device: int
    orders: tuple[tuple[Instruction, ...], ...]

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of weights are instructions of their own."""
        return any(i.kind == "weights" for order in self.orders for i in order)

    @property
    def chunks(self) -> int:
        """The number of chunks of the model."""
        return self.devices * self.chunks_per_device

    def device_of(self, chunk: int) -> int:
        """The device that a chunk is on."""
        return chunk % self.devices

    def requirements(self, instruction: Instruction) -> list[Instruction]:
        """The instructions that must be done before this one can begin.

        Those of the neighbouring chunks are enough, also where connections skip chunks: they need what lies before.

        Example:
            >>> make_schedule("gpipe", 2, 1).requirements(Instruction("backward", 0, 0))
            [Instruction(kind='forward', chunk=0, microbatch=0), Instruction(kind='backward', chunk=1, microbatch=0)]
        """
        kind, chunk, microbatch = instruction
        if kind == "weights":
            return [Instruction("backward", chunk, microbatch)]
        if kind == "forward":
            return [Instruction("forward", chunk - 1, microbatch)] if chunk > 0 else []
        own = [Instruction("forward", chunk, microbatch)]
        return [*own, Instruction("backward", chunk + 1, microbatch)] if chunk + 1 < self.chunks else own

    def linear_order(self) -> list[tuple[int, Instruction]]:
        """All instructions with their devices, in one order that one program can follow.

        It keeps the order of each device, and puts each instruction behind all that it requires. The devices take
        turns, so that a program that starts the computations in this order, without waiting for them, keeps all devices
        busy.

        Raises:
            ValueError: if the schedule deadlocks.

        Example:
            >>> [(device, i.kind) for device, i in make_schedule("gpipe", 2, 1).linear_order()]
            [(0, 'forward'), (1, 'forward'), (1, 'backward'), (0, 'backward')]
        """
        result: list[tuple[int, Instruction]] = []
        done: set[Instruction] = set()
        positions = [0] * self.devices
        while waiting := [(d, order[positions[d]]) for d, order in enumerate(self.orders) if positions[d] < len(order)]:
            ready = [(d, i) for d, i in waiting if done.issuperset(self.requirements(i))]
            if not ready:
                raise ValueError(
                    f"Schedule {self.name!r} deadlocks. Received: {waiting} next. Expected: one that can begin."
                )
            for device, instruction in ready:
                positions[device] += 1
                done.add(instruction)
            result += ready
        return result

    def in_flight(self) -> tuple[int, ...]:
        """For each chunk, the most micro-batches at a time between forward and backward: their activations need memory.

        Where the gradients of weights come later than the backward, activations are needed until then.
        Micro-batches without a backward, as in `evaluate`, do not count: nothing has to be kept for them.
        """
        most = [0] * self.chunks
        now = [0] * self.chunks
        returning = {(i.chunk, i.microbatch) for order in self.orders for i in order if i.kind == "backward"}
        changes = {"forward": 1, "weights" if self.splits_backward else "backward": -1}
        for order in self.orders:
            for kind, chunk, microbatch in order:
                if (chunk, microbatch) in returning:
                    now[chunk] += changes.get(kind, 0)
                    most[chunk] = max(most[chunk], now[chunk])
        return tuple(most)

    def bubble(self) -> float:
        """The ideal idle share (K-1)/(V*M+K-1): for chunks that take equally long, and transfers that take no time.

        An interleaved schedule reaches it only if the number of micro-batches is a multiple of the number of devices.
        Where the gradients of weights, of inputs and the forward take a third of the time each, they fill two thirds of
        the bubble: then it is (K-1)/(3M+K-1).
        """
        parts = (3 if self.splits_backward else 1) * self.chunks_per_device
        return (self.devices - 1) / (parts * self.microbatches + self.devices - 1)


# K devices, M micro-batches, V chunks (a, b, ...) on each device. A device begins with some forwards, then it takes one
# forward and one backward in turn. All schedules take micro-batch 0 first in both directions (GPipe's paper takes the
# backwards in reverse): so they add up gradients in the same order, and get the same sums bit for bit.
#
# schedule     forwards first on device d   in flight on d   picture
#
# gpipe        all                          M                stage 0 |F0 F1 F2 F3             B0 B1 B2 B3
#              arXiv 1811.06965                              stage 1 |   F0 F1 F2 F3       B0 B1 B2 B3
#                                                            stage 2 |      F0 F1 F2 F3 B0 B1 B2 B3
#
# 1f1b         K-1-d                        K-d              stage 0 |F0 F1 F2       B0 F3 B1    B2    B3
#              PipeDream-flush, arXiv 1806.03377             stage 1 |   F0 F1    B0 F2 B1 F3 B2    B3
#                                                            stage 2 |      F0 B0 F1 B1 F2 B2 F3 B3
#
# eager-1f1b   2(K-1-d): there is work      2(K-d)-1         stage 0 |F0 F1 F2 F3 F4 B0 F5 B1    B2    B3    B4    B5
#              while a result travels,                       stage 1 |   F0 F1 F2 B0 F3 B1 F4 B2 F5 B3    B4    B5
#              arXiv 2211.05322                              stage 2 |      F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
#
# interleaved  2(K-1-d) + (V-1)K, to feed the later chunks (with V = 1 as 1f1b): a shorter bubble for more transfers and
#              activations. Where M is no multiple of K, this is the schedule for the next multiple, less the
#              micro-batches that do not exist. Megatron-LM, arXiv 2104.04473
#
#              stage 0 |F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a     B2b     B3b B2a B3a
#              stage 1 |    F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a
#
# zb-h1        K-1-d; W0, the gradients of  K                stage 0 |F0 F1 F2       B0 W0 F3 B1 W1 B2 W2 B3 W3
#              weights, comes after Bd                       stage 1 |   F0 F1    B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
#              arXiv 2401.10241                              stage 2 |      F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3
#
# forward_only all, without backwards: for evaluate and predict
_FORWARDS_FIRST = {
    "gpipe": lambda k, d, v, visits: visits,
    "1f1b": lambda k, d, v, visits: k - 1 - d,
    "zb-h1": lambda k, d, v, visits: k - 1 - d,
    "eager-1f1b": lambda k, d, v, visits: 2 * (k - 1 - d),
    "interleaved": lambda k, d, v, visits: (2 if v > 1 else 1) * (k - 1 - d) + (v - 1) * k,
}


def make_schedule(name: str, devices: int, microbatches: int, chunks_per_device: int = 1) -> Schedule:
    """The schedule of a name: "gpipe", "1f1b", "zb-h1", "eager-1f1b" or "interleaved", drawn above.

    Example:
        >>> make_schedule("gpipe", 4, 8).bubble() == 3 / 11
        True
    """
    visits, orders = _visits(devices, microbatches, chunks_per_device), []
    for device in range(devices):
        forwards = [Instruction("forward", v * devices + device, m) for v, m in visits]
        backwards = [Instruction("backward", (chunks_per_device - 1 - v) * devices + device, m) for v, m in visits]
        first = _FORWARDS_FIRST[name](devices, device, chunks_per_device, len(visits))
        in_turn = [i for pair in zip(forwards[first:], backwards, strict=False) for i in pair]
        order = [*forwards[:first], *in_turn, *backwards[len(forwards[first:]) :]]
        if name == "zb-h1":
            order = _with_weights(order, backwards, later=device)
        orders.append(tuple(i for i in order if i.microbatch < microbatches))
    return Schedule(name, devices, microbatches, chunks_per_device, tuple(orders))


def _with_weights(order: list[Instruction], backwards: list[Instruction], later: int) -> list[Instruction]:
    """Lets gradients of weights follow the backward that comes `later` backwards after their own, or at the end.

    The stage before waits for a backward, and nobody for these. The later a stage is, the earlier its backwards begin,
    and the more of these gradients it puts off until the end, where it would wait otherwise.
    """
    weights = [instruction._replace(kind="weights") for instruction in backwards]
    following = dict(zip(backwards[later:], weights, strict=False))
    result = [i for one in order for i in (one, following.get(one)) if i is not None]
    return result + weights[len(following) :]


def forward_only(devices: int, microbatches: int, chunks_per_device: int = 1) -> Schedule:
    """Forwards alone, for `evaluate` and `predict`."""
    schedule = make_schedule("gpipe", devices, microbatches, chunks_per_device)
    orders = tuple(tuple(i for i in order if i.kind == "forward") for order in schedule.orders)
    return dataclasses.replace(schedule, name="forward_only", orders=orders)


def _visits(devices: int, microbatches: int, chunks_per_device: int) -> list[tuple[int, int]]:
    """The order in which a device takes `(chunk of the device, micro-batch)`, in groups of one micro-batch per device.

    The last group is always full: the caller leaves out the micro-batches that do not exist.
    """
    if chunks_per_device == 1:
        return [(0, microbatch) for microbatch in range(microbatches)]
    return [
        (chunk, first + member)
        for first in range(0, microbatches, devices)
        for chunk in range(chunks_per_device)
        for member in range(devices)
    ]


class Interval(NamedTuple):
    """An instruction on a device, from `begin` to `end`, in seconds.

    Example:
        >>> Interval(0, Instruction("forward", 0, 0), begin=0.0, end=1.5).end
        1.5
    """

    device: int
    instruction: Instruction
    begin: float
    end: float


def simulate(
    schedule: Schedule,
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: float = 0.0,
    weights: Sequence[float] = (),
) -> list[Interval]:
    """When each instruction begins and ends, if it begins as soon as its device is free and its inputs are there.

    Args:
        schedule: the schedule.
        forward: seconds of the forward of one micro-batch through each chunk.
        backward: the same for the backward.
        transfer: seconds that a result takes to another device; the devices go on computing meanwhile.
        weights: the same for the gradients of weights, where these are no part of the backward; by default as long.

    Example:
        >>> makespan(simulate(make_schedule("gpipe", 2, 3), [1, 1], [2, 2]))
        12.0
    """
    times = {"forward": forward, "backward": backward, "weights": weights or backward}
    free = [0.0] * schedule.devices
    ends: dict[Instruction, float] = {}
    intervals = []
    for device, instruction in schedule.linear_order():
        begin = free[device]
        for required in schedule.requirements(instruction):
            is_elsewhere = schedule.device_of(required.chunk) != device
            begin = max(begin, ends[required] + (transfer if is_elsewhere else 0.0))
        free[device] = ends[instruction] = begin + times[instruction.kind][instruction.chunk]
        intervals.append(Interval(device, instruction, begin, free[device]))
    return intervals


def makespan(intervals: Sequence[Interval]) -> float:
    """Seconds from the first begin to the last end."""
    return max(i.end for i in intervals) - min(i.begin for i in intervals)


def speed_up(intervals: Sequence[Interval]) -> float:
    """How many devices compute at a time on average: the sum of their busy times by the makespan.

    Example:
        >>> speed_up(simulate(make_schedule("gpipe", 2, 3), [1, 1], [2, 2]))
        1.5
    """
    return sum(i.end - i.begin for i in intervals) / makespan(intervals)


def idle_share(intervals: Sequence[Interval]) -> float:
    """The share of the devices' time in which they compute nothing, from 0 to 1.

    Example:
        >>> idle_share(simulate(make_schedule("gpipe", 2, 3), [1, 1], [2, 2]))
        0.25
    """
    return 1.0 - speed_up(intervals) / len({i.device for i in intervals})
