"""Runs processes that belong together and sees to it that all of them end."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdist.launch.guardian import Guardian
from tfdist.launch.output import last_lines

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
    logs = [folder / f"log-{rank}" for rank in range(len(commands))]
    processes: list[subprocess.Popen] = []
    with Guardian() as guardian:
        try:
            for command, log in zip(commands, logs, strict=True):
                processes.append(_start(command, log))
                guardian.add(processes[-1].pid)
            problem = _wait(processes, deadline)
        finally:
            _end(processes)
            for process in processes:
                guardian.remove(process.pid)
    if problem:
        tails = [f"--- {log.name}:\n" + "\n".join(last_lines(log.read_bytes(), _LAST_LINES)) for log in logs]
        raise TrialError("\n".join([problem, *tails]))


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


def _wait(processes: Sequence[subprocess.Popen], deadline: float) -> str | None:
    """Waits until all have ended, one has failed, or time is up; returns what is wrong."""
    end = time.monotonic() + deadline
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code not in (None, 0):
                return f"process {rank} ended with {code}; expected 0. See its log:"
        if None not in codes:
            return None
        if time.monotonic() > end:
            return f"not done after {deadline:g} s; expected less. Give more time by --deadline, or train fewer steps."
        time.sleep(_TICK)


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
