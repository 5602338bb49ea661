"""Tells whoever watches the run how far it is: lines in its event log, which every process that trains writes."""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import keras

from tfdist.callbacks.training_meter import TrainingMeter
from tfdist.supervision.events import STANDARD_OUTPUT, VARIABLE, EventLog, own_name

# A line costs some 50 microseconds. Long trainings write fewer of them, so that a week's log is still a small file.
_SHORTEST, _LONGEST = 1.0, 10.0
_SHARE = 0.01
# As many as this write as often as the chief; of more, each one writes less often, and all together no more than that.
_AS_OFTEN = 4


class Pace:
    """When lines may be written, over all fits of this process: a program may call `fit` a thousand times."""

    def __init__(self) -> None:
        self._next = {"step": 0.0, "end": 0.0}

    def allows(self, what: str, now: float, interval: float) -> bool:
        """Whether it is time for one; if so, the next is due after the interval."""
        if now < self._next[what]:
            return False
        self._next[what] = now + interval
        return True


class ProgressLog(keras.callbacks.Callback):
    """Writes epoch, step, loss and speed: at most once a second, and when a fit is over.

    Args:
        events: where to write.
        pace: shared by all fits of the process.
        clock: tells the time.
        rank: of this process among those that train.
        size: number of processes that train.

    Example:
        >>> callbacks = []
        >>> add_progress_log(callbacks, model)  # does nothing outside of `tfdist run` and `tfdist submit`
        >>> callbacks
        []
    """

    def __init__(
        self,
        events: EventLog,
        pace: Pace,
        clock: Callable[[], float] = time.monotonic,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        super().__init__()
        self._events = events
        self._pace = pace
        self._clock = clock
        self._factor = max(size / _AS_OFTEN, 1.0) if rank else 1.0
        self._meter: TrainingMeter | None = None
        self._where = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid()}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._began = self._clock()
        self._epoch = self._step = 0
        self._steps: int | None = self.params.get("steps")
        self._loss: Any = None
        # Where this process has counted from, and when: its first step, which takes longer, is behind it then.
        self._base: tuple[int, float] | None = None
        self._done = 0
        self._meter = TrainingMeter(self.model, self._steps, self._clock)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch, self._step = epoch, 0
        self._meter.epoch_begins()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        now = self._clock()
        # Several steps may have been executed at once, and an epoch may have been taken up in its middle.
        self._done += batch + 1 - self._step if self._base is not None and batch >= self._step else 1
        self._step = batch + 1
        if self._base is None:
            self._base = self._done, now
        self._meter.step(batch)
        if logs:
            self._loss = logs.get("loss")
        interval = min(max(_SHARE * (now - self._began), _SHORTEST), _LONGEST) * self._factor
        if self._pace.allows("step", now, interval):
            self._write(now)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self._meter is not None:
            self._meter.pause()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._meter.pause()
        self._steps = self._steps or self._step
        # That of all processes; within an epoch each one knows its own rows only.
        self._loss = (logs or {}).get("loss", self._loss)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        now = self._clock()
        if self._pace.allows("end", now, _SHORTEST):
            self._write(now)

    def _write(self, now: float) -> None:
        each = None
        if self._base is not None and self._done > self._base[0]:
            each = (now - self._base[1]) / (self._done - self._base[0])
        lap = self._meter.lap()
        self._events.write(
            "progress",
            epoch=self._epoch + 1,
            epochs=self.params.get("epochs"),
            # Keras counts the steps of an execution as if it was always whole.
            step=min(self._step, self._steps or self._step),
            steps=self._steps,
            loss=float(self._loss) if isinstance(self._loss, (int, float)) else None,
            seconds_per_step=each,
            steps_per_second=_rounded(lap.steps_per_second),
            data_wait=_rounded(lap.data_wait),
            **self._where,
        )


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def add_progress_log(callbacks: list[keras.callbacks.Callback], model: Any) -> None:
    """Puts one before the callbacks if there is a log to write to, and none yet."""
    folder, path = os.environ.get("TFDIST_LOG_DIR"), os.environ.get(VARIABLE, "")
    if not (folder or path) or any(isinstance(callback, ProgressLog) for callback in callbacks):
        return
    peers = getattr(getattr(model, "distribute_strategy", None), "peers", None)
    rank, size, name = 0, 1, own_name()
    if peers is not None:
        rank, size = peers.rank, len(peers.names)
        # Without the address, which changes.
        name = peers.names[rank].partition(" (")[0]
    if path == STANDARD_OUTPUT and rank > 0:
        return  # nobody would put together what each of them prints
    callbacks.insert(0, ProgressLog(EventLog(folder, name, path), _pace(), rank=rank, size=size))


@functools.cache
def _pace() -> Pace:
    return Pace()
