"""What Linux tells about processes: their computing time and their memory. And which processes those of a run are."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

_PATIENCE = 60.0
# What a process writes there makes the peak of its memory what it has now (man 5 proc).
_RESET_PEAK = "5"


def announce(folder: str, rank: int) -> None:
    """Writes this process' id where the others of the run find it."""
    part = Path(folder, f"pid-{rank}.part")
    part.write_text(str(os.getpid()))
    part.rename(Path(folder, f"pid-{rank}"))


def announced(folder: str, count: int) -> list[int]:
    """The ids of all processes of the run, by rank.

    Raises:
        TimeoutError: if one has not announced itself within a minute.
    """
    files = [Path(folder, f"pid-{rank}") for rank in range(count)]
    end = time.monotonic() + _PATIENCE
    while not all(file.exists() for file in files):
        if time.monotonic() > end:
            missing = [rank for rank, file in enumerate(files) if not file.exists()]
            raise TimeoutError(
                f"no process id of rank {missing} in {folder} after {_PATIENCE:g} s; expected one of each of the "
                f"{count} processes. See their logs for why they did not start."
            )
        time.sleep(0.01)
    return [int(file.read_text()) for file in files]


def cpu_milliseconds(pids: Sequence[int]) -> list[float]:
    """Computing time of each process so far, all its threads together; it grows in steps of 10 ms."""
    return [1000.0 * sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids]


def resident(pid: int) -> int:
    """Bytes of memory that a process has now."""
    return status_bytes(Path(f"/proc/{pid}/status").read_text(), "VmRSS")


def reset_peak(pid: int) -> None:
    """Has `peak` tell about what comes from now on."""
    Path(f"/proc/{pid}/clear_refs").write_text(_RESET_PEAK)


def peak(pid: int) -> int:
    """Bytes of memory that a process had at most, since `reset_peak`."""
    return status_bytes(Path(f"/proc/{pid}/status").read_text(), "VmHWM")


def status_bytes(status: str, field: str) -> int:
    """A size in /proc/PID/status.

    Raises:
        ValueError: if it is not there.

    Example:
        >>> status_bytes("Name: a\\nVmHWM:\\t    2048 kB\\n", "VmHWM")
        2097152
    """
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise ValueError(f"no {field} in /proc/PID/status; expected one. Memory is measured on Linux only.")


def busy_cores(seconds: float = 1.0) -> float:
    """How many cores all processes of this machine use, on average over a while."""
    before = _busy_ticks(Path("/proc/stat").read_text())
    time.sleep(seconds)
    ticks = _busy_ticks(Path("/proc/stat").read_text()) - before
    return ticks / os.sysconf("SC_CLK_TCK") / seconds


def _busy_ticks(stat: str) -> int:
    user, nice, system, _, _, interrupt, soft_interrupt, *_ = map(int, stat.splitlines()[0].split()[1:])
    return user + nice + system + interrupt + soft_interrupt
