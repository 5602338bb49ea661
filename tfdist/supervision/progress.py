"""How far a process has got, told to the launcher through a little shared memory.

A report costs about a microsecond, never waits and survives the death of the process, however violent.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from types import TracebackType

# Names the file in the environment of a process that the launcher watches; empty or missing: nobody watches.
VARIABLE = "TFDIST_PROGRESS"

# `fit` was called, its first step is not done.
STARTING = "starting"
TRAINING = "training"
# `evaluate` or `predict` is at work, within `fit` or on its own.
VALIDATING = "validating"
# Callbacks are at work at the end of an epoch, or a checkpoint is being written.
SAVING = "saving"
# `fit` has returned; whatever the program does now is not watched.
DONE = "done"

# Number of the report, time, step, step resumed from, phase, and the number once more: while the two differ, somebody
# is writing.
_LAYOUT = struct.Struct("<Qdqq16sQ")
_NOT_RESUMED = -1
_READ_ATTEMPTS = 100


@dataclass(frozen=True)
class Progress:
    """A process's last report.

    Attributes:
        time: when it was made, on the clock of `time.monotonic`, which all processes of a machine share.
        reports: how many there have been.
        phase: one of the phases of this module.
        step: training steps of the current fit since its very beginning, over restarts.
        resumed_step: the step at which this process took the training up again; None if it began it anew.
    """

    time: float
    reports: int
    phase: str
    step: int
    resumed_step: int | None = None

    @property
    def has_trained(self) -> bool:
        """Whether this process has done a step itself.

        Example:
            >>> [Progress(0.0, 1, TRAINING, step, resumed_step=120).has_trained for step in (120, 121)]
            [False, True]
        """
        return self.step > (self.resumed_step or 0)


class ProgressWriter:
    """The watched process's side; get it with `from_environment`, which gives the same one to all callers.

    Attributes:
        phase: of the last report; empty before the first one.
        step: of the last report.

    Example:
        >>> with ProgressFile() as file:
        ...     ProgressWriter(file.path).report(TRAINING, 3)
        ...     file.read().step
        3
    """

    def __init__(self, path: str) -> None:
        """Raises OSError or ValueError if there is no such file or it is not one made by `ProgressFile`."""
        self.phase = ""
        self.step = 0
        self._reports = 0
        self._resumed_step = _NOT_RESUMED
        self._unclaimed_resumption: int | None = None
        # A background thread that saves may report, too.
        self._lock = threading.Lock()
        self._memory = _map(path, mmap.PROT_READ | mmap.PROT_WRITE)

    @classmethod
    def from_environment(cls) -> ProgressWriter | None:
        """This process's writer, or None when no launcher watches it."""
        return _open(os.environ.get(VARIABLE, ""))

    def begin(self) -> None:
        """Says that a fit begins; `resumed` may follow."""
        with self._lock:
            self._resumed_step, self._unclaimed_resumption = _NOT_RESUMED, None
            self._write(STARTING, 0)

    def report(self, phase: str, step: int) -> None:
        """Says that the process is alive and how far it is.

        Args:
            phase: one of the phases of this module.
            step: training steps of the current fit since its very beginning, over restarts.
        """
        with self._lock:
            self._write(phase, step)

    def resumed(self, step: int) -> None:
        """Says that the training goes on from a step, which is the base of the steps that follow.

        Call it before the first batch is trained on.
        """
        with self._lock:
            self._resumed_step = self._unclaimed_resumption = step
            self._write(self.phase or STARTING, step)

    def claim_resumption(self) -> int | None:
        """The step given to `resumed`, once; for whoever counts the steps."""
        step, self._unclaimed_resumption = self._unclaimed_resumption, None
        return step

    def _write(self, phase: str, step: int) -> None:
        self.phase, self.step = phase, step
        self._reports += 1
        _LAYOUT.pack_into(
            self._memory, 0, self._reports, time.monotonic(), step, self._resumed_step, phase.encode(), self._reports
        )


class ProgressFile:
    """The launcher's side: the memory to which one process reports. It has no name that could be left behind.

    Attributes:
        path: value of the variable TFDIST_PROGRESS for the process; valid until `close`.

    Example:
        >>> with ProgressFile() as file:
        ...     print(file.read())
        None
    """

    def __init__(self) -> None:
        if sys.platform == "linux":
            self._descriptor = os.memfd_create("tfdist-progress")
            self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
            self._named = False
        else:
            self._descriptor, self.path = tempfile.mkstemp(prefix="tfdist-progress-")
            self._named = True
        os.ftruncate(self._descriptor, _LAYOUT.size)
        self._memory = mmap.mmap(self._descriptor, _LAYOUT.size)

    def read(self) -> Progress | None:
        """The last report, or None before the first one."""
        return _read(self._memory)

    def close(self) -> None:
        """Gives the memory back; the process can go on reporting into its own mapping. A second call does nothing."""
        if self._descriptor >= 0:
            self._memory.close()
            os.close(self._descriptor)
            self._descriptor = -1
            if self._named:
                os.unlink(self.path)

    def __enter__(self) -> ProgressFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def read_progress(path: str) -> Progress | None:
    """A process's last report; None before the first one, and where there is no such file.

    Args:
        path: what the process has in its variable TFDIST_PROGRESS.

    Example:
        >>> print(read_progress("/does/not/exist"))
        None
    """
    try:
        memory = _map(path, mmap.PROT_READ)
    except (OSError, ValueError):
        return None
    with memory:
        return _read(memory)


@functools.cache
def _open(path: str) -> ProgressWriter | None:
    try:
        return ProgressWriter(path) if path else None
    except (OSError, ValueError):
        return None  # the launcher that set the variable is gone, or is on another machine


def _map(path: str, protection: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR if protection & mmap.PROT_WRITE else os.O_RDONLY)
    try:
        return mmap.mmap(descriptor, _LAYOUT.size, prot=protection)
    finally:
        os.close(descriptor)


def _read(memory: mmap.mmap) -> Progress | None:
    for _ in range(_READ_ATTEMPTS):
        reports, when, step, resumed, phase, check = _LAYOUT.unpack_from(memory)
        if reports == check:
            break
    if reports == 0:
        return None
    resumed_step = None if resumed == _NOT_RESUMED else resumed
    return Progress(when, reports, phase.rstrip(b"\0").decode(errors="replace"), step, resumed_step)
