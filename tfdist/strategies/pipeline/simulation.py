"""Simulation of a schedule: when each device computes what, if computations take given times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tfdist.strategies.pipeline.schedule import Instruction, Schedule


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
    schedule: Schedule, forward: Sequence[float], backward: Sequence[float], transfer: float = 0.0
) -> list[Interval]:
    """When each instruction begins and ends, if it begins as early as its device and its inputs allow.

    Args:
        schedule: the schedule.
        forward: seconds of the forward of one micro-batch through each chunk.
        backward: the same for the backward.
        transfer: seconds until a result is on another device; devices compute meanwhile.

    Raises:
        ValueError: if there is not one time per chunk, a time is negative, or the schedule deadlocks.

    Example:
        >>> from tfdist.strategies.pipeline.schedule import gpipe
        >>> max(interval.end for interval in simulate(gpipe(2, 3), [1, 1], [2, 2]))
        12.0
    """
    times = {"forward": forward, "backward": backward}
    for name, values in times.items():
        if len(values) != schedule.chunks:
            raise ValueError(
                f"{name} has {len(values)} times, but schedule {schedule.name!r} has {schedule.chunks} chunks: "
                "give one time per chunk."
            )
    if (shortest := min(*forward, *backward, transfer)) < 0:
        raise ValueError(f"A time is {shortest} s: forward, backward and transfer must all be 0 or more.")
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
    """Seconds from the first begin to the last end.

    Raises:
        ValueError: if there are no intervals, or they take no time.
    """
    if not intervals:
        raise ValueError("There are no intervals, but at least one is needed: record or simulate a step first.")
    seconds = max(i.end for i in intervals) - min(i.begin for i in intervals)
    if seconds <= 0:
        raise ValueError(f"The intervals take {seconds} s in all, but must take more than 0: check the clock.")
    return seconds


def speed_up(intervals: Sequence[Interval]) -> float:
    """How many devices compute at a time on average: the sum of their busy times by the makespan.

    Raises:
        ValueError: if there are no intervals, or they take no time.

    Example:
        >>> from tfdist.strategies.pipeline.schedule import gpipe
        >>> speed_up(simulate(gpipe(2, 3), [1, 1], [2, 2]))
        1.5
    """
    return sum(_busy(intervals)) / makespan(intervals)


def idle_share(intervals: Sequence[Interval]) -> float:
    """The share of the devices' time in which they compute nothing, from 0 to 1.

    Raises:
        ValueError: if there are no intervals, or they take no time.

    Example:
        >>> from tfdist.strategies.pipeline.schedule import gpipe
        >>> idle_share(simulate(gpipe(2, 3), [1, 1], [2, 2]))
        0.25
    """
    return 1.0 - speed_up(intervals) / len(_busy(intervals))


def _busy(intervals: Sequence[Interval]) -> list[float]:
    """For each device, the seconds in which it computes; measured intervals of a device may overlap."""
    busy = [0.0] * (max((i.device for i in intervals), default=-1) + 1)
    until = [float("-inf")] * len(busy)
    for device, _, begin, end in sorted(intervals, key=lambda interval: interval.begin):
        busy[device] += max(0.0, end - max(begin, until[device]))
        until[device] = max(until[device], end)
    return busy
