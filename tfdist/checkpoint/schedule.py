"""When a fit saves (`save_freq` and the signal of a preemption), and the thread that writes."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType
from typing import Any

import keras

_UNITS = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")


class SaveSchedule:
    """Decides whether a save is due.

    Args:
        save_freq: `"epoch"`, a number of steps, or a duration such as `"10min"`, `"30s"` or `"1.5h"`.

    Attributes:
        every_steps: the number of steps; `None` for the other forms.
        every_seconds: the duration in seconds; `None` for the other forms.

    Raises:
        ValueError: for anything else.

    Example:
        >>> SaveSchedule(100).every_steps, SaveSchedule("10min").every_seconds, SaveSchedule("epoch").every_epoch
        (100, 600.0, True)
    """

    def __init__(self, save_freq: str | int):
        self.every_epoch = save_freq == "epoch"
        self.every_steps: int | None = None
        self.every_seconds: float | None = None
        if isinstance(save_freq, int) and not isinstance(save_freq, bool):
            self.every_steps = save_freq
        elif isinstance(save_freq, str) and (match := _DURATION.fullmatch(save_freq)) and match[2] in _UNITS:
            self.every_seconds = float(match[1]) * _UNITS[match[2]]
        if not (self.every_epoch or (self.every_steps or 0) > 0 or (self.every_seconds or 0.0) > 0.0):
            raise ValueError(
                f"Received: save_freq={save_freq!r}. Expected 'epoch', a number of steps from 1, or a duration above "
                "0, such as '10min', '30s' or '2h'."
            )
        self.saved(0)

    def saved(self, step: int) -> None:
        """Notes a save after `step` training steps, or that training begins there."""
        self._step = step
        self._time = time.monotonic()

    def due_after_step(self, step: int) -> bool:
        """Whether `every_steps` asks for a save after `step` training steps: the same on every process."""
        return self.every_steps is not None and step - self._step >= self.every_steps

    @property
    def due_by_time(self) -> bool:
        """Whether `every_seconds` asks for a save now. Clocks differ, so processes have to agree about it."""
        return self.every_seconds is not None and time.monotonic() - self._time >= self.every_seconds


class BackgroundWriter:
    """Runs one job at a time, in a thread beside the training.

    An interpreter that exits, since an exception has ended the training, waits for the last job.

    Args:
        asynchronous: whether `submit` does not wait for the job.
        on_error: called with what a job raised, in the caller's thread: by `submit`, `is_busy` or `wait`.
    """

    def __init__(self, asynchronous: bool, on_error: Callable[[BaseException], None]):
        # One thread for all jobs: starting one takes milliseconds while both cores compute.
        self._executor = ThreadPoolExecutor(1, "tfdist-backup")
        self._asynchronous, self._on_error = asynchronous, on_error
        self._job: Future[None] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a job is still running."""
        if self._job is not None and self._job.done():
            self.wait()
        return self._job is not None

    def submit(self, job: Callable[[], None]) -> None:
        """Runs a job; waits for the one before, if that has not ended."""
        self.wait()
        self._job = self._executor.submit(job)
        if not self._asynchronous:
            self.wait()

    def wait(self) -> None:
        """Waits until the job has ended."""
        job, self._job = self._job, None
        if job is not None and (error := job.exception()) is not None:
            self._on_error(error)

    def close(self) -> None:
        """Waits, and ends the thread."""
        self.wait()
        self._executor.shutdown()


class PreemptionSignal:
    """Notes a signal that arrives while `fit` runs, instead of letting it end the process.

    Outside of `fit` (an exception ended it, say) the signal does what it did before.

    Args:
        number: the signal; `None` notes nothing.
        model: the model whose `fit` it is.

    Attributes:
        received: whether it came.
    """

    def __init__(self, number: signal.Signals | None, model: keras.Model):
        self._number = number
        self._model = model
        self._previous: Any = None
        self._installed = False
        self._process = os.getpid()
        self.received = False

    def install(self) -> None:
        """Begins to listen. Only Python's main thread may; in another one nothing is noted.

        It comes after the strategy, because TensorFlow installs a handler of its own, which swallows SIGTERM.
        """
        if self._number is None or threading.current_thread() is not threading.main_thread():
            return
        self._previous = signal.signal(self._number, self._receive)
        self._installed = True

    def _receive(self, number: int, frame: FrameType | None) -> None:
        # A fork from within the fit is to end: a pool of processes in a callback waits for that.
        if os.getpid() == self._process and frame_of_fit(self._model, frame) is not None:
            self.received = True
            return
        self.uninstall()
        os.kill(os.getpid(), number)

    def uninstall(self) -> None:
        """Puts the previous handler back."""
        if self._installed:
            self._installed = False
            # None: installed by something other than Python; TensorFlow's would swallow the signal.
            signal.signal(self._number, signal.SIG_DFL if self._previous is None else self._previous)

    def give_back(self) -> None:
        """Puts the previous handler back, and lets it have a signal that came, and that nobody has obeyed."""
        self.uninstall()
        if self.received:
            signal.raise_signal(self._number)


def frame_of_fit(model: keras.Model, frame: FrameType | None) -> FrameType | None:
    """The frame of Keras' `fit` of a model, if that has called this frame."""
    while frame is not None:
        if frame.f_code.co_name == "fit" and frame.f_locals.get("self") is model:
            return frame
        frame = frame.f_back
    return None
