"""Windows of steps: how long they take, and how much computing time of each process."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from benchmarks.process_files import cpu_milliseconds

# Long enough for computing times, which are told in units of 10 ms.
_SECONDS = 1.2
_LEAST, _MOST = 2, 100


def steps_of_window(step_seconds: float) -> int:
    """How many steps a window has.

    Example:
        >>> steps_of_window(0.1), steps_of_window(5.0)
        (12, 2)
    """
    return min(max(round(_SECONDS / step_seconds), _LEAST), _MOST)


class Windows:
    """Samples of one variant.

    Args:
        pids: the processes.

    Attributes:
        record: what was measured: milliseconds a step of each window ("samples_ms"), and those of computing for each
            process ("cpu_ms"); the cores that each process may use ("cores").
    """

    def __init__(self, pids: Sequence[int]):
        cores = [sorted(os.sched_getaffinity(pid)) for pid in pids]
        self.record: dict = {"samples_ms": [], "cpu_ms": [], "cores": cores}
        self._pids = pids

    def begin(self) -> None:
        """A window begins."""
        self._cpu, self._time = cpu_milliseconds(self._pids), time.perf_counter()

    def end(self, steps: int) -> None:
        """It ends, after that many steps."""
        self.record["samples_ms"].append(1e3 * (time.perf_counter() - self._time) / steps)
        used = zip(self._cpu, cpu_milliseconds(self._pids), strict=True)
        self.record["cpu_ms"].append([(after - before) / steps for before, after in used])
