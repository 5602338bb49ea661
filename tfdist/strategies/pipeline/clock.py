"""Times at which the instructions of one training step begin and end, measured where they run."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfdist.strategies.pipeline.schedule import Instruction
from tfdist.strategies.pipeline.simulation import Interval


class Clock:
    """Collects time stamps while a step is traced; a variable holds those of the step that ran last."""

    def __init__(self) -> None:
        self._labels: list[tuple[int, Instruction]] = []
        self._begins: list[tf.Tensor] = []
        self._ends: list[tf.Tensor] = []
        self._times: tf.Variable | None = None

    def restart(self) -> None:
        """Forgets what was collected: the step is traced anew."""
        self._labels, self._begins, self._ends, self._times = [], [], [], None

    def begin(self, stage: int, instruction: Instruction) -> tf.Tensor:
        """Adds the time stamp at which an instruction begins, on the current device's machine."""
        self._labels.append((stage, instruction))
        self._begins.append(tf.timestamp())
        return self._begins[-1]

    def end(self, stage: int, instruction: Instruction) -> tf.Tensor:
        """Adds the time stamp at which the instruction that began last ends."""
        assert self._labels[-1] == (stage, instruction)
        self._ends.append(tf.timestamp())
        return self._ends[-1]

    def store(self) -> None:
        """Adds the operation that keeps the times of a step."""
        with tf.init_scope(), tf.device("/CPU:0"):
            self._times = tf.Variable(tf.zeros([2, len(self._labels)], tf.float64), trainable=False)
        with tf.device("/CPU:0"):
            self._times.assign(tf.stack([tf.stack(self._begins), tf.stack(self._ends)]))

    @property
    def has_times(self) -> bool:
        """Whether a step was traced with this clock."""
        return self._times is not None

    def intervals(self) -> list[Interval]:
        """When each instruction of the last step ran, in seconds since the first one began."""
        times = np.asarray(self._times)
        times = times - times[0].min()
        return [
            Interval(stage, instruction, float(begin), float(end))
            for (stage, instruction), begin, end in zip(self._labels, times[0], times[1], strict=True)
        ]
