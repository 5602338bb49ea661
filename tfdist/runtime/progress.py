"""How far a fit is, and how fast: for the launcher after each step, for the log and Kubeflow now and then.

Keras takes the next batch within the training function, so code outside of it does not see the waiting. Here the graph
itself reads the clock before and after it takes a batch, and adds the difference to a variable of this process.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat.keras import hooks_of
from tfdist.compat.upstream import framework_config as config
from tfdist.supervision.events import STANDARD_OUTPUT, VARIABLE, EventLog, own_name
from tfdist.supervision.progress import DONE, SAVING, TRAINING, VALIDATING, ProgressWriter
from tfdist.supervision.time_spent import BETWEEN, FIRST_STEP, PREPARING, STEPS, VALIDATION, time_spent
from tfdist.supervision.trainjob_status import URL, TrainJobStatus, status_of

# A line in the log costs some 50 microseconds. Long trainings write fewer of them, so that a week's log stays small.
_SHORTEST, _LONGEST = 1.0, 10.0
_SHARE = 0.01
# As many processes as this write as often as the chief. Of more, each one writes less often, so that all of them
# together write no more lines than these.
_AS_OFTEN = 4


# From when on lines may be written, over all fits of this process: a program may call `fit` a thousand times.
_NEXT = {"step": 0.0, "end": 0.0}


class ProgressReporter(keras.callbacks.Callback):
    """Counts the steps of a fit. The launcher hears of each one, the event log at most once a second, and so Kubeflow.

    It comes before the other callbacks: what they do at the end of an epoch then counts as saving, which may take
    long, and a step is counted even if a callback fails at it.

    Args:
        writer: tells the launcher; None if none watches this process. All callbacks of the process share it.
        events: the log for epoch, step, loss and speed; None if nobody wants them.
        next_lines: from when on lines may be written, by their kind; shared by all fits of the process.
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
        next_lines: dict[str, float] = _NEXT,
        clock: Callable[[], float] = time.monotonic,
        rank: int = 0,
        size: int = 1,
        trainjob: TrainJobStatus | None = None,
    ) -> None:
        super().__init__()
        self._writer = writer
        self._events = events
        self._trainjob = trainjob
        self._next_lines = next_lines
        self._clock = clock
        self._factor = max(size / _AS_OFTEN, 1.0) if rank else 1.0
        self._where = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid()}
        # None where nobody reads what it measures, and in a loop of the user's own that leaves out `on_train_begin`.
        self._meter: TrainingMeter | None = None
        # Steps of the fit, as far as this process knows, and those of them before the current epoch.
        self._total = self._before_epoch = self._epoch = 0
        # After how many of them this process has begun, once it has.
        self._begun_after, self._has_begun = 0, False
        self._steps: int | None = None
        self._interrupted = ""
        self._spent_before: str | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._total = self._before_epoch = self._epoch = 0
        self._steps = self.params.get("steps")
        self._has_begun = False
        if self._writer is not None:
            self._writer.begin()
        if self._events is None and self._trainjob is None:
            return  # measuring takes some 20 microseconds a step
        self._began = self._clock()
        self._metrics: dict[str, Any] = {}
        # Steps and time when the first execution was over, which takes longer than the others: speed counts from there.
        self._base: tuple[int, float] | None = None
        time_spent().fit_begins()
        self._meter = TrainingMeter(self.model, self._clock)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch, self._before_epoch = epoch, self._total
        if self._meter is not None:
            self._meter.epoch_begins()
            time_spent().goes_into(PREPARING if self._base is None else STEPS)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        resumed = self._writer.claim_resumption() if self._writer is not None else None
        if resumed is None and self._epoch and not self._has_begun and self._writer is not None:
            resumed = self._taken_up(batch)
        if resumed is not None:
            # In the middle of an epoch the first batch is not number 0.
            self._before_epoch, self._total = resumed - batch, resumed
        if not self._has_begun:
            self._has_begun = True
            self._begun_after = batch if resumed is None else resumed
            time_spent().goes_into(FIRST_STEP)

    def _taken_up(self, batch: int) -> int:
        """Where a fit is taken up that begins behind the first epoch: by Keras' own BackupAndRestore, say."""
        # Nobody knows yet how many steps an epoch of a generator has.
        step = self._epoch * self._steps + batch if self._steps else int(self.model.optimizer.iterations)
        self._writer.resumed(step)
        self._writer.claim_resumption()
        if self._events is not None:
            self._events.write("resumed", checkpoint="", epoch=self._epoch, step=step, seconds=None)
        return step

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._steps:
            # Keras counts the last execution of an epoch as if it was a whole one.
            batch = min(batch, self._steps - 1)
        self._total = self._before_epoch + batch + 1
        self._report(TRAINING, self._total)
        if self._meter is None:
            return
        now = self._clock()
        if self._base is None:
            self._base = self._total, now
            time_spent().goes_into(STEPS)
        self._meter.step(batch)
        self._metrics.update(logs or {})
        interval = min(max(_SHARE * (now - self._began), _SHORTEST), _LONGEST) * self._factor
        if self._is_time_for("step", now, interval):
            self._log(now)
            self._tell_trainjob(now)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._report(SAVING, self._total)
        if self._meter is None:
            return
        self._meter.pause()
        self._steps = self._steps or self._total - self._before_epoch
        # These are the metrics of all processes; within an epoch each one knows its own rows only.
        self._metrics.update(logs or {})
        time_spent().goes_into(BETWEEN)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._report(DONE, self._total)
        time_spent().goes_into(None)
        if self._meter is None:
            return
        now = self._clock()
        if self._is_time_for("end", now, _SHORTEST):
            self._log(now)
        self._tell_trainjob(now, is_last=True)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self._meter is not None:
            self._meter.pause()
        self._spent_before = time_spent().goes_into(VALIDATION)
        if self._writer is not None:
            self._interrupted = self._writer.phase or DONE
        self._report(VALIDATING)

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._report(VALIDATING)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        time_spent().goes_into(self._spent_before)
        self._report(self._interrupted)

    on_predict_begin = on_test_begin
    on_predict_batch_end = on_test_batch_end
    on_predict_end = on_test_end

    def _report(self, phase: str, step: int | None = None) -> None:
        """Tells the launcher, after so many steps; the same as before by default."""
        if self._writer is not None:
            self._writer.report(phase, self._writer.step if step is None else step)

    def _is_time_for(self, line: str, now: float, interval: float) -> bool:
        """Whether a line may be written; if so, the next one may after the interval."""
        is_time = now >= self._next_lines[line]
        if is_time:
            self._next_lines[line] = now + interval
        return is_time

    @property
    def _step(self) -> int:
        """How many steps of the epoch are done."""
        return self._total - self._before_epoch

    def _seconds_left(self, now: float) -> float | None:
        """Seconds to the end of the fit at its speed so far, with everything between steps; None if unknown."""
        epochs = self.params.get("epochs")
        if self._base is None or self._total <= self._base[0] or not epochs or not self._steps:
            return None
        each = (now - self._base[1]) / (self._total - self._base[0])
        return max((epochs - self._epoch) * self._steps - self._step, 0) * each

    def _log(self, now: float) -> None:
        if self._events is None:
            return
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
            seconds_left=self._seconds_left(now),
            steps_per_second=_rounded(lap.steps_per_second),
            data_wait=_rounded(lap.data_wait),
            steps_alone=hooks_of(getattr(self.model, "distribute_strategy", None)).steps_alone(self.model),
            # What `tfdist goodput` adds up: the last three begin with the process, and are never set back.
            trained=self._total - self._begun_after,
            fit=spent.fits,
            spent=spent.read(),
            **self._where,
        )

    def _tell_trainjob(self, now: float, is_last: bool = False) -> None:
        if self._trainjob is None:
            return
        epochs, fraction, left = self.params.get("epochs"), None, self._seconds_left(now)
        if is_last:
            fraction, left = 1.0, 0.0
        elif epochs:
            # Where the number of steps is not known yet, the epochs before are what counts.
            of_epoch = min(self._step / self._steps, 1.0) if self._steps else 0.0
            fraction = min((self._epoch + of_epoch) / epochs, 1.0)
        place = {"epoch": self._epoch + 1, "epochs": epochs, "step": self._step}
        self._trainjob.report(status_of(fraction, left, {**self._metrics, **place}, time.time()))


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def add_reporter(callbacks: list[keras.callbacks.Callback], model: Any) -> None:
    """Puts a reporter before the callbacks if it has somewhere to report to, and there is none yet."""
    if any(isinstance(callback, ProgressReporter) for callback in callbacks):
        return
    writer = ProgressWriter.from_environment()
    folder, path = os.environ.get("TFDIST_LOG_DIR"), os.environ.get(VARIABLE, "")
    peers = hooks_of(getattr(model, "distribute_strategy", None)).peers
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
    trainjob = TrainJobStatus.from_environment() if tells and URL in os.environ else None
    if writer is not None or events is not None or trainjob is not None:
        callbacks.insert(0, ProgressReporter(writer, events, rank=rank, size=size, trainjob=trainjob))


class InputMeter:
    """Counts what the iterators of a strategy hand to compiled functions. Make it outside of the strategy's scope.

    Functions that are traced while `wanted` is false count nothing: counting takes some 20 microseconds a step.

    Attributes:
        wanted: whether the counts are read.

    Example:
        >>> InputMeter().read()
        array([0., 0., 0., 0.])
    """

    def __init__(self) -> None:
        self.wanted = False
        with tf.init_scope(), tf.device("CPU:0"):
            self._totals = tf.Variable(tf.zeros([4], tf.float64), trainable=False)

    @property
    def is_counting(self) -> bool:
        """Whether a function that is traced now has to count."""
        # A clock is not deterministic: TensorFlow refuses it.
        return self.wanted and not tf.executing_eagerly() and not config.is_op_determinism_enabled()

    def read(self) -> np.ndarray:
        """What compiled functions have taken so far: seconds that they waited, rows, batches, and batches of own rows.

        The rows are those of the global batches; where a process does not know the others' rows
        (`AutoShardPolicy.OFF`), its own.
        """
        return self._totals.numpy()

    def timed(self, take: Callable[[], Any]) -> tuple[Any, tf.Tensor]:
        """In a graph: calls `take()`, and reads the clock (`tf.timestamp`, on the CPU) before and after its operations.

        Control dependencies give the order: the first reading, the operations of `take`, the second reading.

        Returns:
            What `take` returned, and how long that took, in seconds. The operations that use the data have to depend on
            this number (`after`): with a single thread, the second reading could otherwise come after the step.
        """
        with tf.device("CPU:0"):
            began = tf.timestamp()
        with tf.control_dependencies([began]):
            taken = take()
        with tf.control_dependencies(list(filter(tf.is_tensor, _flat(taken)))), tf.device("CPU:0"):
            return taken, tf.timestamp() - began

    def count(self, rows: tf.Tensor, manual: bool, seconds: tf.Tensor) -> None:
        """In a graph: adds a batch of so many rows, and the time waited for it; on the CPU, where the variable is."""
        with tf.device("CPU:0"):
            rows = tf.cast(rows, tf.float64)
            self._totals.assign_add(tf.stack([seconds, rows, 1.0, float(manual)]), read_value=False)


def after(seconds: tf.Tensor, batch: Any) -> Any:
    """In a graph: the same batch, whose tensors become available only after that number.

    Each tensor gets an identity on its own device that has the number as a control dependency.
    """

    def wait(leaf: Any) -> Any:
        if not tf.is_tensor(leaf):
            return leaf
        with leaf.graph.colocate_with(leaf.op):
            return tf.identity(leaf)

    with tf.control_dependencies([seconds]):
        return tf.nest.pack_sequence_as(batch, list(map(wait, _flat(batch))), expand_composites=True)


def _flat(value: Any) -> list:
    return tf.nest.flatten(value, expand_composites=True)


@dataclasses.dataclass(frozen=True)
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
        clock: tells the time, in seconds.
    """

    def __init__(self, model: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._input = hooks_of(getattr(model, "distribute_strategy", None)).input_meter
        if self._input is not None:
            self._input.wanted = True
        self._clock = clock
        self._has_begun = False
        self._stopped: tuple[float, np.ndarray] | None = None
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
        if self._has_begun:
            self._steps += max(batch + 1 - self._batch, 0)
        else:
            self._has_begun, self._base = True, self._now()
        self._batch = batch + 1

    def lap(self) -> Lap:
        """Ends the lap: what was measured since the last one."""
        end, counts = now = self._stopped or self._now()
        (began, base), self._base = self._base, now
        steps, self._steps = self._steps, 0
        if not self._has_begun:
            return Lap(0.0, 0)
        waited, *numbers = (counts - base).tolist()
        rows, batches, of_own_rows = map(int, numbers)
        if batches == 0:
            return Lap(end - began, steps)
        return Lap(end - began, batches, waited, rows, own_rows=of_own_rows > 0)

    def _now(self) -> tuple[float, np.ndarray]:
        return self._clock(), np.zeros(4) if self._input is None else self._input.read()
