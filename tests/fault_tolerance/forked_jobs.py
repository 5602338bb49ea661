"""Training jobs in processes of their own: started, waited for, and killed by the tests."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

from tests.fault_tolerance.job import Job
from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.ports import reserve
from tfdist.supervision.exit_codes import PREEMPTED

SOURCE = Path(__file__).parents[2]
SECONDS = 120
# For the others to notice that one has failed.
_MOMENT = 3.0


@dataclasses.dataclass(frozen=True)
class Ended:
    """A process that has ended.

    Attributes:
        code: its exit code, negative for a signal.
        log: what it printed.
        result: what it observed after `fit`; `None` if it did not get there.
    """

    code: int
    log: str
    result: dict[str, Any] | None


class ForkedJobs:
    """Starts training jobs; a context manager that leaves no process behind. Threads may share it."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(SOURCE), "TF_CPP_MIN_LOG_LEVEL": "3"}
        # A library's threads do not survive a fork, and several processes run at a time.
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1"}
        environment |= {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2"}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.fault_tolerance.fork_server"],
            cwd=SOURCE,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._started: dict[int, Future[int]] = {}
        self._ended: dict[int, Future[int]] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._server.stdout:
            number, what, value = line.split()
            {"started": self._started, "ended": self._ended}[what][int(number)].set_result(int(value))
        for future in [*self._started.values(), *self._ended.values()]:
            if not future.done():
                future.set_exception(RuntimeError("the fork server has ended"))

    def start(self, job: Job, folder: Path, environment: dict[str, str] | None = None) -> Started:
        """Starts a job whose working directory is `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        with self._lock:
            number = next(self._numbers)
            self._started[number], self._ended[number] = Future(), Future()
            log, result = folder / f"log-{number}", folder / f"result-{number}"
            request = {
                "number": number,
                "job": {**dataclasses.asdict(job), "folder": str(folder), "result": str(result)},
                "log": str(log),
                "environment": environment or {},
                "seconds": SECONDS,
            }
            print(json.dumps(request), file=self._server.stdin, flush=True)
        return Started(self._started[number], self._ended[number], log, result)

    def run(self, job: Job, folder: Path) -> Ended:
        """Runs a job to its end."""
        return self.start(job, folder).wait()

    def run_workers(self, jobs: Sequence[Job], folder: Path) -> list[Ended]:
        """Runs one job on each worker of a cluster.

        Once one has failed, the others get a moment to say what they make of it, and are killed.
        """
        with reserve(len(jobs)) as ports:
            started = []
            for rank, job in enumerate(jobs):
                addresses = [f"127.0.0.1:{port}" for port in ports.ports]
                cluster = ClusterConfig({"worker": addresses}, "worker", rank).to_json()
                variables = {"TF_CONFIG": cluster, "TFDIST_CLUSTER": cluster, "TFDIST_LOG_DIR": str(folder)}
                started.append(self.start(job, folder, variables))
            ends = [process.ended for process in started]
            while not all(end.done() for end in ends):
                wait(ends, SECONDS, FIRST_COMPLETED)
                ends = [end for end in ends if not end.done()]
                if any(process.has_failed for process in started):
                    wait(ends, _MOMENT)
                    for process in started:
                        process.kill()
                    break
            return [process.wait() for process in started]

    def __enter__(self) -> ForkedJobs:
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.stdin.close()
        try:
            self._server.wait(20)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._reader.join()


@dataclasses.dataclass
class Started:
    """A process that was started.

    Attributes:
        started: becomes its process id.
        ended: becomes its exit code.
        log_path: where it prints to.
        result_path: where it writes what it observes.
    """

    started: Future[int]
    ended: Future[int]
    log_path: Path
    result_path: Path

    @property
    def has_failed(self) -> bool:
        """Whether it has ended otherwise than complete or preempted."""
        return self.ended.done() and self.ended.result() not in (0, PREEMPTED)

    def kill(self) -> None:
        """Kills it, if it still runs."""
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.started.result(SECONDS), signal.SIGKILL)

    def wait(self) -> Ended:
        """Waits for its end; past its deadline the process ends by SIGALRM."""
        code = self.ended.result(2 * SECONDS)
        result = pickle.loads(self.result_path.read_bytes()) if self.result_path.exists() else None
        return Ended(code, self.log_path.read_text(errors="replace"), result)
