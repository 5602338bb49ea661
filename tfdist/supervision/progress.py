"""How far a process has got: it writes reports into shared memory, and the launcher reads the last one.

A report costs about a microsecond, never waits, and can be read after the process was killed.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import struct
import threading
import time
import zlib
from dataclasses import dataclass

from tfdist.supervision import anonymous_memory

# Names the memory in the environment of a process that the launcher watches; empty or missing: nobody watches. It may
# outlive the launcher, whose process id, a part of this, may then be another program's: the memory is used only if it
# has the random name that follows a colon.
VARIABLE = "TFDIST_PROGRESS"

# `fit` was called, its first step is not done.
STARTING = "starting"
TRAINING = "training"
# `evaluate` or `predict` is at work, within `fit` or on its own.
VALIDATING = "validating"
# Callbacks are at work at the end of an epoch, or a checkpoint is being written.
SAVING = "saving"
# `fit`, `evaluate` or `predict` has raised: the program is about to end, or does something else.
FAILED = "failed"
# `fit` has returned; whatever the program does now is not watched.
DONE = "done"
# The same, after a signal: what there is to save is saved, and the process is about to end with PREEMPTED.
SAVED = "saved"

# Number of the report, time, step, step resumed from, phase, what is waited for; a checksum follows.
#
#     | report 6 | its checksum | report 7 | its checksum |    report 8 replaces report 6
#
# A writer that the kernel stops in the middle of a report, for long on a busy machine, leaves the one before readable.
_RECORD = struct.Struct("<Qdqq16s48s")
_CHECKSUM = struct.Struct("<I")
_SLOT = _RECORD.size + _CHECKSUM.size
_SIZE = 2 * _SLOT
_NOT_RESUMED = -1
# The reader may have been stopped itself while two reports were written; then it reads again.
_READ_ATTEMPTS = 100


@dataclass(frozen=True)
class Progress:
    """A process's last report.

    Attributes:
        time: when it was made, on the clock of `time.monotonic`, which all processes of a machine share.
        reports: how many there have been.
        phase: one of the phases of this module.
        step: training steps of the current fit since its very beginning, over restarts.
        resumed_step: the step at which this process took the training up again; None if it began it.
        waits_to: what it waits for all others to do with it, such as "finish the epoch"; empty if it does not.
    """

    time: float
    reports: int
    phase: str
    step: int
    resumed_step: int | None = None
    waits_to: str = ""

    @property
    def has_trained(self) -> bool:
        """Whether this process has done a step itself.

        Example:
            >>> [Progress(0.0, 1, TRAINING, step, resumed_step=120).has_trained for step in (120, 121)]
            [False, True]
        """
        return self.step > (self.resumed_step or 0)

    @property
    def has_ended(self) -> bool:
        """Whether its fit has returned, or is left after a signal."""
        return self.phase in (DONE, SAVED)


class ProgressWriter:
    """Writes the reports of this process. `from_environment` gives the same writer to all callers.

    Attributes:
        phase: of the last report; empty before the first one.
        step: of the last report.

    Example:
        >>> with ProgressFile() as file:
        ...     ProgressWriter(file.value).report(TRAINING, 3)
        ...     file.read().step
        3
    """

    def __init__(self, value: str) -> None:
        """Raises OSError or ValueError if `value` is not that of a `ProgressFile` that exists."""
        self.phase = ""
        self.step = 0
        self._reports, self._time = 0, 0.0
        self._resumed_step = _NOT_RESUMED
        self._unclaimed_resumption: int | None = None
        # A background thread that saves may report, too.
        self._lock = threading.Lock()
        descriptor = anonymous_memory.attach(value)
        try:
            self._memory = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)

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

    def failed(self) -> None:
        """Says that what was reported ends by an exception; nothing if nothing was, or it has ended before."""
        with self._lock:
            if self.phase not in ("", DONE, SAVED):
                self._write(FAILED, self.step)

    def resumed(self, step: int) -> None:
        """Says that the training goes on after a step, from which later steps are counted.

        Call it before the first batch is trained on.
        """
        with self._lock:
            self._resumed_step = self._unclaimed_resumption = step
            self._write(self.phase or STARTING, step)

    def claim_resumption(self) -> int | None:
        """The step given to `resumed`, for the callback that counts the steps; a second call returns None."""
        step, self._unclaimed_resumption = self._unclaimed_resumption, None
        return step

    def waits(self, purpose: str = "") -> None:
        """Says what this process waits for all others to do, in the midst of its phase; empty: it waits no longer."""
        with self._lock:
            if self.phase:
                self._write(self.phase, self.step, purpose)

    def _write(self, phase: str, step: int, waits_to: str | None = None) -> None:
        self.phase, self.step = phase, step
        self._reports += 1
        # Who waits has got no farther: it is as silent as before.
        self._time = time.monotonic() if waits_to is None else self._time
        texts = (phase.encode(), (waits_to or "").encode()[:48])
        record = _RECORD.pack(self._reports, self._time, step, self._resumed_step, *texts)
        place = self._reports % 2 * _SLOT
        self._memory[place : place + _SLOT] = record + _CHECKSUM.pack(zlib.crc32(record))


class ProgressFile(contextlib.AbstractContextManager):
    """The launcher's side: the memory to which one process reports. It has no file name that could be left behind.

    Attributes:
        value: value of the variable TFDIST_PROGRESS for the process, until `close`.

    Example:
        >>> with ProgressFile() as file:
        ...     print(file.read())
        None
    """

    def __init__(self) -> None:
        self._descriptor, self.value = anonymous_memory.make("progress", _SIZE)
        self._memory = mmap.mmap(self._descriptor, _SIZE)

    def read(self) -> Progress | None:
        """The last report, or None before the first one."""
        for _ in range(_READ_ATTEMPTS):
            whole = self._memory[:]
            records = filter(None, (_record(whole[place : place + _SLOT]) for place in (0, _SLOT)))
            latest = max(records, default=None)
            if latest is not None or not any(whole):
                break
        if latest is None:
            return None
        reports, when, step, resumed, *texts = latest
        phase, waits_to = (text.rstrip(b"\0").decode(errors="replace") for text in texts)
        resumed_step = None if resumed == _NOT_RESUMED else resumed
        return Progress(when, reports, phase, step, resumed_step, waits_to)

    def close(self) -> None:
        """Gives the memory back; the process can go on reporting into its own mapping."""
        self._memory.close()
        os.close(self._descriptor)

    def __exit__(self, *error: object) -> None:
        self.close()


@functools.cache
def _open(value: str) -> ProgressWriter | None:
    try:
        return ProgressWriter(value) if value else None
    except (OSError, ValueError):
        return None  # the launcher that set the variable is gone, or is on another machine


def _record(slot: bytes) -> tuple | None:
    """What is in a slot; `None` if nothing, or only a part, is."""
    record, (checksum,) = slot[: _RECORD.size], _CHECKSUM.unpack(slot[_RECORD.size :])
    return _RECORD.unpack(record) if zlib.crc32(record) == checksum else None
