"""The callback that says how far a fit is: to the launcher after each step, to the log and Kubeflow now and then."""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import keras

from tfdist.runtime.meters.training import TrainingMeter
from tfdist.supervision.events import STANDARD_OUTPUT, VARIABLE, EventLog, own_name
from tfdist.supervision.progress import DONE, SAVING, TRAINING, VALIDATING, ProgressWriter
from tfdist.supervision.remaining import fraction_done, steps_left
from tfdist.supervision.time_spent import BETWEEN, FIRST_STEP, PREPARING, STEPS, VALIDATION, time_spent
from tfdist.supervision.trainjob_status import TrainJobStatus, status_of

# A line in the log costs some 50 microseconds. Long trainings write fewer of them, so that a week's log stays small.
_SHORTEST, _LONGEST = 1.0, 10.0
_SHARE = 0.01
# As many processes as this write as often as the chief. Of more, each one writes less often, so that all of them
# together write no more lines than these.
_AS_OFTEN = 4


class Pace:
    """When lines may be written, over all fits of this process: a program may call `fit` a thousand times."""

    def __init__(self) -> None:
        self._next = {"step": 0.0, "end": 0.0}

    def allows(self, what: str, now: float, interval: float) -> bool:
        """Whether it is time for a line; if so, the next one is due after the interval."""
        if now < self._next[what]:
            return False
        self._next[what] = now + interval
        return True


class ProgressReporter(keras.callbacks.Callback):
    """Counts the steps of a fit. The launcher hears of each one, the event log at most once a second, and so Kubeflow.

    It comes before the other callbacks: what they do at the end of an epoch then counts as saving, which may take
    long, and a step is counted even if a callback fails at it.

    Args:
        writer: tells the launcher; None if none watches this process. All callbacks of the process share it.
        events: the log for epoch, step, loss and speed; None if nobody wants them.
        pace: shared by all fits of the process.
        clock: tells the time.
        rank: of this process among those that train.
        size: number of processes that train.
        trainjob: tells Kubeflow; None outside of a TrainJob, and on all processes but the chief.

    Example:
        >>> callbacks, model = [], keras.Sequential()
        >>> add_reporter(callbacks, model)  # does nothing outside of `tfdist run` and `tfdist submit`
        >>> callbacks
        []
    """

    def __init__(
        self,
        writer: ProgressWriter | None,
        events: EventLog | None = None,
        pace: Pace | None = None,
        clock: Callable[[], float] = time.monotonic,
        rank: int = 0,
        size: int = 1,
        trainjob: TrainJobStatus | None = None,
    ) -> None:
        super().__init__()
        self._writer = writer
        self._events = events
        self._trainjob = trainjob
        self._is_asked = events is not None or trainjob is not None
        self._pace = pace or Pace()
        self._clock = clock
        self._factor = max(size / _AS_OFTEN, 1.0) if rank else 1.0
        self._where = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid()}
        self._meter: TrainingMeter | None = None
        # Steps of the fit, as far as this process knows, and those of them before the current epoch.
        self._total = self._before_epoch = 0
        # After how many of them this process has begun, once it has.
        self._begun_after, self._has_begun = 0, False
        self._steps: int | None = None
        self._interrupted = ""

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._total = self._before_epoch = self._epoch = 0
        self._steps = self.params.get("steps")
        self._has_begun = False
        if self._writer is not None:
            self._writer.begin()
        if self._is_asked:
            self._began = self._clock()
            self._metrics: dict[str, Any] = {}
            # Steps and time when the first execution was over, which takes longer than the others: speed counts from
            # there.
            self._base: tuple[int, float] | None = None
            time_spent().fit_begins()
        if self._events is not None:
            self._meter = TrainingMeter(self.model, self._steps, self._clock)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch, self._before_epoch = epoch, self._total
        if self._meter is not None:
            self._meter.epoch_begins()
        if self._is_asked:
            time_spent().goes_into(PREPARING if self._base is None else STEPS)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        resumed = self._writer.claim_resumption() if self._writer is not None else None
        if resumed is not None:
            # In the middle of an epoch the first batch is not number 0.
            self._before_epoch, self._total = resumed - batch, resumed
        if not self._has_begun:
            self._has_begun = True
            self._begun_after = batch if resumed is None else resumed
            if self._is_asked:
                time_spent().goes_into(FIRST_STEP)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._steps:
            # Keras counts the last execution of an epoch as if it was a whole one.
            batch = min(batch, self._steps - 1)
        self._total = self._before_epoch + batch + 1
        if self._writer is not None:
            self._writer.report(TRAINING, self._total)
        if not self._is_asked:
            return
        now = self._clock()
        if self._base is None:
            self._base = self._total, now
            time_spent().goes_into(STEPS)
        if self._meter is not None:
            self._meter.step(batch)
        self._metrics.update(logs or {})
        interval = min(max(_SHARE * (now - self._began), _SHORTEST), _LONGEST) * self._factor
        if self._pace.allows("step", now, interval):
            self._tell(now)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._writer is not None:
            self._writer.report(SAVING, self._total)
        if self._meter is not None:
            self._meter.pause()
        if self._is_asked:
            self._steps = self._steps or self._total - self._before_epoch
            # These are the metrics of all processes; within an epoch each one knows its own rows only.
            self._metrics.update(logs or {})
            time_spent().goes_into(BETWEEN)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._writer is not None:
            self._writer.report(DONE, self._total)
        if self._is_asked:
            time_spent().goes_into(None)
            now = self._clock()
            if self._events is not None and self._pace.allows("end", now, _SHORTEST):
                self._log(now)
            if self._trainjob is not None:
                self._tell_trainjob(now, is_last=True)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self._meter is not None:
            self._meter.pause()
        if self._is_asked:
            time_spent().begin(VALIDATION)
        if self._writer is not None:
            self._interrupted = self._writer.phase or DONE
        self._report_again(VALIDATING)

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._report_again(VALIDATING)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._is_asked:
            time_spent().end(VALIDATION)
        self._report_again(self._interrupted)

    on_predict_begin = on_test_begin
    on_predict_batch_end = on_test_batch_end
    on_predict_end = on_test_end

    def _report_again(self, phase: str) -> None:
        if self._writer is not None:
            self._writer.report(phase, self._writer.step)

    def _tell(self, now: float) -> None:
        if self._events is not None:
            self._log(now)
        if self._trainjob is not None:
            self._tell_trainjob(now)

    @property
    def _step(self) -> int:
        """How many steps of the epoch are done."""
        return self._total - self._before_epoch

    def _seconds_per_step(self, now: float) -> float | None:
        if self._base is None or self._total <= self._base[0]:
            return None
        return (now - self._base[1]) / (self._total - self._base[0])

    def _log(self, now: float) -> None:
        lap = self._meter.lap()
        spent = time_spent()
        spent.waited += lap.waited or 0.0
        loss = self._metrics.get("loss")
        self._events.write(
            "progress",
            epoch=self._epoch + 1,
            epochs=self.params.get("epochs"),
            step=self._step,
            steps=self._steps,
            loss=float(loss) if isinstance(loss, (int, float)) else None,
            seconds_per_step=self._seconds_per_step(now),
            steps_per_second=_rounded(lap.steps_per_second),
            data_wait=_rounded(lap.data_wait),
            # What `tfdist goodput` adds up: the last three begin with the process, and are never set back.
            trained=self._total - self._begun_after,
            fit=spent.fits,
            spent=spent.read(),
            # Seconds since the host was started: nobody sets this clock.
            clock=round(time.clock_gettime(time.CLOCK_BOOTTIME), 3),
            **self._where,
        )

    def _tell_trainjob(self, now: float, is_last: bool = False) -> None:
        epoch, epochs = self._epoch + 1, self.params.get("epochs")
        fraction = 1.0 if is_last else fraction_done(epoch, epochs, self._step, self._steps)
        each, left = self._seconds_per_step(now), None
        if is_last:
            left = 0.0
        elif each is not None and epochs and self._steps:
            left = steps_left(epoch, epochs, self._step, self._steps) * each
        place = {"epoch": epoch, "epochs": epochs, "step": self._step}
        self._trainjob.report(status_of(fraction, left, {**self._metrics, **place}, time.time()), is_last)


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def add_reporter(callbacks: list[keras.callbacks.Callback], model: Any) -> None:
    """Puts a reporter before the callbacks if somebody wants to know, and there is none yet."""
    if any(isinstance(callback, ProgressReporter) for callback in callbacks):
        return
    writer = ProgressWriter.from_environment()
    folder, path = os.environ.get("TFDIST_LOG_DIR"), os.environ.get(VARIABLE, "")
    peers = getattr(getattr(model, "distribute_strategy", None), "_peers", None)
    rank, size, name = 0, 1, own_name()
    if peers is not None:
        rank, size = peers.rank, len(peers.names)
        # The name of the process without its address, which changes; each tuner of a search has a worker 0.
        name = name if os.environ.get("TFDIST_TUNE") else peers.names[rank].partition(" (")[0]
    # On the standard output only the chief writes: nobody would put together what each of them prints.
    wanted = (folder or path) and not (path == STANDARD_OUTPUT and rank > 0)
    events = EventLog(folder, name, path) if wanted else None
    # Of pods that train alone, side by side, the first one tells Kubeflow.
    tells = rank == 0 and (peers is not None or os.environ.get("JOB_COMPLETION_INDEX", "0") == "0")
    trainjob = TrainJobStatus.from_environment() if tells else None
    if writer is not None or events is not None or trainjob is not None:
        callbacks.insert(0, ProgressReporter(writer, events, _pace(), rank=rank, size=size, trainjob=trainjob))


@functools.cache
def _pace() -> Pace:
    return Pace()
