"""The log of steps that all programs write in one format, and that says when which process did what."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

_LOG = "steps"
_STOP = "stop-after"


class Step(NamedTuple):
    """A training step that a process has done.

    Attributes:
        time: on the clock of `time.monotonic`, which all processes of a machine share.
        rank: of the process.
        step: number of the step, from 1, over restarts.
        pid: of the process.
    """

    time: float
    rank: int
    step: int
    pid: int


class StepWriter:
    """One process's access to the log.

    Args:
        folder: where the log is; all processes write into the same file.
        rank: of this process.
    """

    def __init__(self, folder: str, rank: int) -> None:
        self._rank = rank
        self._stop = Path(folder, _STOP)
        # A write that appends is in one piece, whoever else writes.
        self._file = os.open(os.path.join(folder, _LOG), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def write(self, step: int) -> bool:
        """Notes a step that is done; returns whether it was the last one."""
        os.write(self._file, f"{time.monotonic():.4f} {self._rank} {step} {os.getpid()}\n".encode())
        return self._stop.exists() and step >= int(self._stop.read_text())


class StepReader:
    """Follows the log of a run.

    Args:
        folder: where the log is, or will be.

    Attributes:
        steps: all steps that were read, in the order in which they were done.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read = 0
        self.steps: list[Step] = []

    def read(self) -> list[Step]:
        """Reads what is new, and returns all steps."""
        path = self._folder / _LOG
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._read)
                text = file.read()
            complete = text[: text.rfind(b"\n") + 1]
            self._read += len(complete)
            self.steps += parse(complete.decode())
        return self.steps

    @property
    def last(self) -> int:
        """The furthest step so far; 0 if there is none."""
        return max((step.step for step in self.read()), default=0)


def parse(text: str) -> list[Step]:
    """The steps in complete lines of a log.

    Example:
        >>> parse("12.5 0 7 4711\\n")
        [Step(time=12.5, rank=0, step=7, pid=4711)]
    """
    return [Step(float(when), *map(int, numbers)) for when, *numbers in map(str.split, text.splitlines())]


def stop_after(folder: Path, step: int) -> None:
    """Ends the training after a step; it has to be one that no process has reached."""
    temporary = folder / f"{_STOP}.tmp"
    temporary.write_text(str(step))
    temporary.replace(folder / _STOP)
