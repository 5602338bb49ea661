"""When the instructions of one training step begin and end, measured on the devices that run them.

`Clock` adds time stamps to the graph of a step. The machines of a pipeline have clocks of their own:
`clock_offsets` estimates by how much they are ahead, so that all times fit on one time line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.strategies.pipeline.schedule import Instruction
from tfdist.strategies.pipeline.timeline import Interval

# The quickest answer counts: the others were delayed, and it is unknown whether on the way there or on the way back.
_READINGS = 16
# What a float64 that counts seconds since 1970 can tell apart, in seconds, with a margin.
_RESOLUTION = 1e-6


class Clock:
    """Adds time stamps to the graph of a training step, and keeps the times of the step that ran last.

    While a step is traced, `begin` and `end` add operations that read the time on the device of an instruction.
    `store` adds the last operation: it collects all times in one variable, on this process' CPU.
    """

    def __init__(self) -> None:
        self._graph: tf.Graph | None = None
        self._labels: list[tuple[int, Instruction]] = []
        self._begins: list[tf.Tensor] = []
        self._ends: list[tf.Tensor] = []
        # No variables can be made while a step is traced. Its width is open: the number of instructions is known later.
        with tf.device("/CPU:0"):
            self._times = tf.Variable(tf.zeros([2, 0], tf.float64), trainable=False, shape=[2, None])
        self._function = tf.function(tf.timestamp).get_concrete_function()

    def begin(self, stage: int, instruction: Instruction) -> tf.Tensor:
        """Adds the time stamp at which an instruction begins, on the current device's machine."""
        began = self._now()
        if began.graph is not self._graph:
            # The step is traced again, for batches of another shape.
            self._graph, self._labels, self._begins, self._ends = began.graph, [], [], []
        self._labels.append((stage, instruction))
        self._begins.append(began)
        return began

    def end(self, stage: int, instruction: Instruction) -> tf.Tensor:
        """Adds the time stamp at which the instruction that began last ends."""
        assert self._labels[-1] == (stage, instruction)
        self._ends.append(self._now())
        return self._ends[-1]

    def ends_of(self, instructions: Sequence[Instruction]) -> list[tf.Tensor]:
        """The time stamps of the ends of instructions that are in the graph already."""
        ends = {instruction: end for (_, instruction), end in zip(self._labels, self._ends, strict=False)}
        return [ends[instruction] for instruction in instructions]

    def store(self) -> None:
        """Adds the operation that writes the times of a step to the variable."""
        with tf.device("/CPU:0"):
            self._times.assign(tf.stack([tf.stack(self._begins), tf.stack(self._ends)]))

    @property
    def has_times(self) -> bool:
        """Whether a step has run with this clock."""
        return self._times.read_value().shape[1] > 0

    def intervals(self, offsets: Sequence[float] | None = None) -> list[Interval]:
        """When each instruction of the last step ran, in seconds since the first one began.

        Args:
            offsets: by how much the clock of each stage's machine is ahead, in seconds; `None`: all have the same time.
        """
        times = self._times.numpy().copy()
        if offsets is not None:
            times -= np.array([offsets[stage] for stage, _ in self._labels])
        times -= times[0].min()
        return [
            Interval(stage, instruction, float(begin), float(end))
            for (stage, instruction), begin, end in zip(self._labels, times[0], times[1], strict=True)
        ]

    def _now(self) -> tf.Tensor:
        """The current time, read by an operation that TensorFlow takes for a function without side effects.

        `tf.timestamp` itself counts as an operation with side effects. TensorFlow runs such operations one after the
        other, in the order in which they were traced: the stages would not work side by side any more.
        """
        (now,) = tf.raw_ops.PartitionedCall(args=[], Tout=[tf.float64], f=self._function)
        return now


class Reading(NamedTuple):
    """The times of one question for the time and its answer, in seconds.

    Attributes:
        sent: when the question left, by our clock.
        there: when it was answered, by the other clock.
        received: when the answer came back, by our clock.

    Example:
        >>> Reading(sent=10.0, there=15.1, received=10.2).there
        15.1
    """

    sent: float
    there: float
    received: float


def offset_of(readings: Sequence[Reading]) -> float:
    """By how much another clock is ahead of ours, in seconds, as NTP estimates it (RFC 5905).

    Returns:
        0 if the readings do not contradict it: two processes on one machine have one clock.

    Example:
        >>> round(offset_of([Reading(10.0, 15.1, 10.2), Reading(11.0, 16.9, 11.9)]), 6)
        5.0
        >>> offset_of([Reading(10.0, 10.15, 10.2)])
        0.0
    """
    sent, there, received = min(readings, key=lambda reading: reading.received - reading.sent)
    offset = there - (sent + received) / 2
    return offset if abs(offset) > (received - sent) / 2 + _RESOLUTION else 0.0


def clock_offsets(devices: Sequence[str]) -> list[float]:
    """By how much the clock of each device's machine is ahead of this one's, in seconds.

    Example:
        >>> clock_offsets(["/device:CPU:0"])
        [0.0]
    """
    hosts = [tf.DeviceSpec.from_string(d).replace(device_type="CPU", device_index=0).to_string() for d in devices]
    offsets = {host: offset_of(_ask(host)) for host in dict.fromkeys(hosts)}
    return [offsets[host] for host in hosts]


def _ask(host: str) -> list[Reading]:
    @tf.function(autograph=False)
    def read() -> tf.Tensor:
        # Each reading waits for the one before it: here, on the other machine, and here again.
        with tf.device("/CPU:0"):
            sent = tf.timestamp()
        with tf.control_dependencies([sent]), tf.device(host):
            there = tf.timestamp()
        with tf.control_dependencies([there]), tf.device("/CPU:0"):
            received = tf.timestamp()
            return tf.stack([sent, there, received])

    return [Reading(*read().numpy().tolist()) for _ in range(_READINGS)]
