"""Runs processes that belong together and sees to it that all of them end."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from tfdist.launcher.guardian import Guardian
from tfdist.launcher.output import last_lines

ROOT = Path(__file__).resolve().parents[2]
_TICK = 0.05
_GRACE = 5.0
_LAST_LINES = 25


class TrialError(RuntimeError):
    """A trial failed or did not end in time; the text holds the last lines of its logs."""


@dataclass(frozen=True)
class Command:
    """One process.

    Attributes:
        words: argument vector.
        env: its complete environment.
        cores: the cores that it may run on.
    """

    words: tuple[str, ...]
    env: Mapping[str, str]
    cores: tuple[int, ...]


class Running:
    """Processes that run at the same time.

    Args:
        commands: what they run.
        folder: where their logs go.

    Attributes:
        pids: their ids, in the order of the commands.
    """

    def __init__(self, commands: Sequence[Command], folder: Path):
        self._commands = commands
        self._logs = [folder / f"log-{rank}" for rank in range(len(commands))]
        self._processes: list[subprocess.Popen] = []

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def check(self) -> bool:
        """Whether all have ended, with success.

        Raises:
            TrialError: if one has failed.
        """
        codes = [process.poll() for process in self._processes]
        for rank, code in enumerate(codes):
            if code not in (None, 0):
                raise self.error(f"process {rank} ended with {code}; expected 0. See its log:")
        return None not in codes

    def error(self, problem: str) -> TrialError:
        """An error with the last lines of all logs."""
        tails = [f"--- {log.name}:\n" + "\n".join(last_lines(log.read_bytes(), _LAST_LINES)) for log in self._logs]
        return TrialError("\n".join([problem, *tails]))

    def _start(self, guardian: Guardian) -> None:
        for command, log in zip(self._commands, self._logs, strict=True):
            self._processes.append(_start(command, log))
            guardian.add(self._processes[-1].pid)

    def _end(self, guardian: Guardian) -> None:
        _end(self._processes)
        for process in self._processes:
            guardian.remove(process.pid)


@contextlib.contextmanager
def running(commands: Sequence[Command], folder: Path) -> Iterator[Running]:
    """Starts processes, and ends at the end of the `with` block those that still run: none is left then.

    Args:
        commands: the processes.
        folder: where their logs go.

    Example:
        >>> with running([Command(("sleep", "60"), {}, (0,))], Path("/tmp")) as processes:
        ...     processes.check()
        False
    """
    processes = Running(commands, folder)
    with Guardian() as guardian:
        try:
            processes._start(guardian)
            yield processes
        finally:
            processes._end(guardian)


def run_together(commands: Sequence[Command], folder: Path, deadline: float) -> None:
    """Runs processes at the same time and returns when all have succeeded.

    Args:
        commands: the processes.
        folder: where their logs go.
        deadline: seconds after which they are ended, by SIGTERM and then SIGKILL.

    Raises:
        TrialError: if one fails, or time is up. No process is left then.

    Example:
        >>> run_together([Command(("true",), {}, (0,))], Path("/tmp"), deadline=10)
    """
    end = time.monotonic() + deadline
    with running(commands, folder) as processes:
        while not processes.check():
            if time.monotonic() > end:
                raise processes.error(
                    f"not done after {deadline:g} s; expected less. Give more time by --deadline, or train fewer steps."
                )
            time.sleep(_TICK)


def result_of(make: Callable[[Path, str], Sequence[Command]], deadline: float) -> Any:
    """Runs processes, and returns what one of them writes as JSON.

    Args:
        make: returns the processes, given a folder for what they write and the file for the result.
        deadline: seconds that they may take.

    Raises:
        TrialError: if one fails, or time is up.
    """
    with tempfile.TemporaryDirectory(prefix="tfdist-bench-") as folder:
        result = Path(folder, "result.json")
        run_together(make(Path(folder), str(result)), Path(folder), deadline)
        return json.loads(result.read_text())


def program(module: str, settings: Mapping[str, Any], result: str) -> tuple[str, ...]:
    """The words of a process that measures: see `benchmarks.worker`."""
    return (sys.executable, "-m", "benchmarks.worker", module, json.dumps(settings), result)


def end_on_sigterm() -> None:
    """Has SIGTERM unwind, as KeyboardInterrupt does, so that the processes that measure are ended."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def say(text: str) -> None:
    """Progress; to stderr, as stdout is the tables."""
    print(text, file=sys.stderr, flush=True)


def _start(command: Command, log: Path) -> subprocess.Popen:
    with log.open("wb") as file:
        return subprocess.Popen(
            command.words,
            cwd=ROOT,
            env=dict(command.env),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=functools.partial(os.sched_setaffinity, 0, command.cores),
        )


def _end(processes: Sequence[subprocess.Popen]) -> None:
    for process in processes:
        if process.poll() is None:
            _signal(process, signal.SIGTERM)
    end = time.monotonic() + _GRACE
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        time.sleep(_TICK)
    for process in processes:
        if process.poll() is None:
            _signal(process, signal.SIGKILL)
        process.wait()


def _signal(process: subprocess.Popen, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
