"""How fast a fit trains, and how long it waits for its data."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tfdist.runtime.meters.input import InputCounts


@dataclass(frozen=True)
class Lap:
    """Some training steps of this process.

    Attributes:
        seconds: how long they took; validation, and what callbacks do at the ends of epochs, are not in it.
        steps: how many they were.
        waited: for how many of these seconds the process has waited for data; None where that cannot be measured.
        rows: of their global batches; None where nobody has counted them.
        own_rows: whether `rows` are those of this process alone.

    Example:
        >>> lap = Lap(2.0, 10, waited=0.5, rows=640)
        >>> lap.steps_per_second, lap.data_wait
        (5.0, 0.25)
    """

    seconds: float
    steps: int
    waited: float | None = None
    rows: int | None = None
    own_rows: bool = False

    @property
    def steps_per_second(self) -> float | None:
        """None if there was no step."""
        return self.steps / self.seconds if self.steps and self.seconds > 0 else None

    @property
    def data_wait(self) -> float | None:
        """Share of the time in which the process waited for data, in [0, 1]."""
        if self.waited is None or self.seconds <= 0:
            return None
        # The clocks of the graph and of Python tick differently, and the former may be set back.
        return min(max(self.waited / self.seconds, 0.0), 1.0)


class TrainingMeter:
    """Measures the laps of a fit. A callback tells it when steps and epochs begin and end.

    The first execution of the training function, which traces it, is in no lap. Waiting and rows are counted only where
    a tfdist strategy for data parallelism hands the data to a compiled training function. They are not counted in
    functions that were traced before there was a meter, or with deterministic operations. `evaluate`, called by the
    callbacks of a step, counts as training.

    Args:
        model: the model that is trained.
        steps: how many an epoch has, if it is known.
        clock: tells the time, in seconds.
    """

    def __init__(self, model: Any, steps: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._input = getattr(getattr(model, "distribute_strategy", None), "_input_meter", None)
        if self._input is not None:
            self._input.wanted = True
        self._steps_of_epoch = steps
        self._clock = clock
        self._has_begun = False
        self._stopped: tuple[float, InputCounts] | None = None
        self._batch = self._steps = 0
        self._base = self._now()

    def epoch_begins(self) -> None:
        """Says that the training goes on."""
        self._batch = 0
        if self._stopped is not None:
            (stopped_at, stopped), (now, counts) = self._stopped, self._now()
            began, base = self._base
            self._base = began + now - stopped_at, counts - (stopped - base)
            self._stopped = None

    def pause(self) -> None:
        """Says that what follows is no training, until the next epoch begins."""
        if self._stopped is None:
            self._stopped = self._now()

    def step(self, batch: int) -> None:
        """Says that an execution is over. Its last batch had this number, from 0, in the epoch."""
        if self._steps_of_epoch:
            # Keras counts the last execution of an epoch as if it was a whole one.
            batch = min(batch, self._steps_of_epoch - 1)
        if not self._has_begun:
            self._has_begun, self._batch = True, batch + 1
            self._base = self._now()
            return
        self._steps += max(batch + 1 - self._batch, 0)
        self._batch = batch + 1

    def lap(self) -> Lap:
        """Ends the lap: what was measured since the last one."""
        end, counts = now = self._stopped or self._now()
        (began, base), self._base = self._base, now
        steps, self._steps = self._steps, 0
        if not self._has_begun:
            return Lap(0.0, 0)
        taken = counts - base
        if taken.batches == 0:
            return Lap(end - began, steps)
        return Lap(end - began, taken.batches, taken.seconds, taken.rows, own_rows=taken.manual > 0)

    def _now(self) -> tuple[float, InputCounts]:
        counts = self._input.read() if self._input is not None else InputCounts(0.0, 0, 0, 0)
        return self._clock(), counts
