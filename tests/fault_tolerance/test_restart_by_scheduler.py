"""Without `tfdist run`: whatever starts each process again where it ends, as Kubernetes does, finishes the training."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.processes import forked
from tfdist.cluster.ports import reserve

# Half a minute each, most of it TensorFlow's own waiting for heartbeats.
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
EPOCHS, DEADLINE = 150, 120
# Until the processes that are left have ended by themselves: a new one of theirs cannot join them.
WITHIN = 15
PAUSE = 3


class Scheduler:
    """Starts two processes, and each of them again, some seconds after it has failed."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._ports = reserve(2)
        addresses = [f"127.0.0.1:{port}" for port in self._ports.ports]
        self._cluster = {"worker": addresses}
        self.processes = [self.start(index) for index in range(2)]
        self.starts = 2

    def start(self, index: int) -> Any:
        task = {"cluster": self._cluster, "task": {"type": "worker", "index": index}}
        own = {"TF_CONFIG": json.dumps(task), "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
        words = ["-m", "tests.fault_tolerance.restarted_program", str(self._folder), str(EPOCHS)]
        return forked(words, self._folder / f"log of {index}", ROOT, {**os.environ, **own}, rank=index)

    def epoch(self, index: int) -> int:
        path = self._folder / f"epoch of {self.processes[index].pid}"
        text = path.read_text() if path.exists() else ""
        return int(text) if text else -1

    def logs(self) -> str:
        return "\n".join(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted(self._folder.glob("log of *")))

    def until(self, done: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, f"not within {seconds} s\n{self.logs()}"
            time.sleep(0.05)

    def finish(self) -> None:
        """Starts again what fails, until both have ended well."""

        def ended() -> bool:
            for index, process in enumerate(self.processes):
                if process.poll() not in (None, 0):
                    time.sleep(PAUSE)
                    self.processes[index] = self.start(index)
                    self.starts += 1
            return all(process.poll() == 0 for process in self.processes)

        self.until(ended, DEADLINE)

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait(10)
        self._ports.close()


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[Scheduler]:
    started = Scheduler(tmp_path)
    yield started
    started.close()


@pytest.mark.parametrize("killed", [1, 0])
def test_one_is_killed(scheduler: Scheduler, tmp_path: Path, killed: int):
    scheduler.until(lambda: scheduler.epoch(killed) >= 5, DEADLINE)
    other = scheduler.processes[1 - killed]
    scheduler.processes[killed].kill()
    scheduler.until(lambda: other.poll() is not None, WITHIN)
    assert other.returncode != 0
    assert f"worker {killed} (127.0.0.1:" in scheduler.logs()
    scheduler.finish()
    assert scheduler.starts == 4
    with np.load(tmp_path / "weights.npz") as found, np.load(_undisturbed(tmp_path)) as expected:
        for name in expected:
            np.testing.assert_array_equal(found[name], expected[name])


def test_one_is_killed_while_the_chief_waits_for_it(scheduler: Scheduler, tmp_path: Path):
    """Between steps no collective fails: the chief asks whether the other process is still there."""
    chief, other = scheduler.processes
    (tmp_path / f"stop {other.pid}").touch()
    scheduler.until(lambda: scheduler.epoch(0) >= 0 and scheduler.epoch(1) >= 0, DEADLINE)
    other.kill()
    scheduler.until(lambda: chief.poll() is not None, WITHIN)
    assert chief.returncode != 0
    assert "to finish the epoch, and that process is gone. Look into its output for why." in scheduler.logs()


def _undisturbed(tmp_path: Path) -> Path:
    (folder := tmp_path / "undisturbed").mkdir()
    scheduler = Scheduler(folder)
    try:
        scheduler.finish()
    finally:
        scheduler.close()
    assert scheduler.starts == 2, scheduler.logs()
    return folder / "weights.npz"
