"""Times at which the instructions of one training step begin and end, measured where they run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist.strategies.pipeline.schedule import Instruction
from tfdist.strategies.pipeline.simulation import Interval


class Clock:
    """Collects time stamps while a step is traced; a variable holds those of the step that ran last."""

    def __init__(self) -> None:
        self._graph: tf.Graph | None = None
        self._labels: list[tuple[int, Instruction]] = []
        self._begins: list[tf.Tensor] = []
        self._ends: list[tf.Tensor] = []
        # Made here: while a step is traced, no variables can be. How many times there are is known afterwards.
        with tf.device("/CPU:0"):
            self._times = tf.Variable(tf.zeros([2, 0], tf.float64), trainable=False, shape=[2, None])
        self._function = tf.function(tf.timestamp).get_concrete_function()

    def begin(self, stage: int, instruction: Instruction) -> tf.Tensor:
        """Adds the time stamp at which an instruction begins, on the current device's machine."""
        began = self._now()
        if began.graph is not self._graph:
            # The step is traced anew, for another kind of batch.
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
        """The time stamps at which instructions end that are in the graph already."""
        ends = {instruction: end for (_, instruction), end in zip(self._labels, self._ends, strict=False)}
        return [ends[instruction] for instruction in instructions]

    def store(self) -> None:
        """Adds the operation that keeps the times of a step."""
        with tf.device("/CPU:0"):
            self._times.assign(tf.stack([tf.stack(self._begins), tf.stack(self._ends)]))

    @property
    def has_times(self) -> bool:
        """Whether a step has run with this clock."""
        return self._times.read_value().shape[1] > 0

    def intervals(self, offsets: Sequence[float] | None = None) -> list[Interval]:
        """When each instruction of the last step ran, in seconds since the first one began.

        Args:
            offsets: by how much the clock of each stage's machine is ahead; `None`: they all have the same time.
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
        """The time, as what TensorFlow takes for a function without side effects.

        It lets operations with side effects wait for each other, so that no stage would work beside another one.
        """
        (now,) = tf.raw_ops.PartitionedCall(args=[], Tout=[tf.float64], f=self._function)
        return now
