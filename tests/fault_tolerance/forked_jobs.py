"""Training jobs in processes of their own: started, waited for, and killed by the tests."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import pickle
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.fault_tolerance.job import Job
from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.ports import reserve
from tfdist.launcher.local.fork_server import ForkedProcess, ForkServer
from tfdist.supervision.exit_codes import PREEMPTED

SOURCE = Path(__file__).parents[2]
# For the others to notice that one has failed. They end by themselves, but for those whose test stops them.
_MOMENT = 60.0


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


@dataclasses.dataclass
class Started:
    """A process that was started, and where it prints and writes what it observes; it ends by SIGALRM in time."""

    process: ForkedProcess
    log_path: Path
    result_path: Path

    def kill(self) -> None:
        """Kills it, if it still runs."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)

    def wait(self) -> Ended:
        """Waits for its end."""
        code = self.process.wait()
        result = pickle.loads(self.result_path.read_bytes()) if self.result_path.exists() else None
        return Ended(code, self.log_path.read_text(errors="replace"), result)


class ForkedJobs:
    """Starts training jobs; a context manager. Threads may share it.

    Args:
        environment: of all jobs, beside that of this process.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = {**os.environ, "PYTHONPATH": str(SOURCE), "TF_CPP_MIN_LOG_LEVEL": "3"}
        # A library's threads do not survive a fork, and several processes run at a time.
        self._environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1"}
        self._environment |= {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2", **(environment or {})}
        self._server = ForkServer(self._environment)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)

    def start(self, job: Job, folder: Path, environment: Mapping[str, str] | None = None) -> Started:
        """Starts a job whose working directory is `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        with self._lock:
            number = next(self._numbers)
            asked, log, result = (folder / f"{what}-{number}" for what in ("job", "log", "result"))
            asked.write_text(json.dumps(dataclasses.asdict(job)))
            words = ["-m", "tests.fault_tolerance.training", str(asked), str(result)]
            with log.open("ab") as output:
                env = {**self._environment, **(environment or {})}
                process = self._server.start(words, env, output.fileno(), str(folder))
        assert process is not None, "the fork server has ended"
        return Started(process, log, result)

    def run(self, job: Job, folder: Path) -> Ended:
        """Runs a job to its end."""
        return self.start(job, folder).wait()

    def run_workers(self, jobs: Sequence[Job], folder: Path) -> list[Ended]:
        """Runs one job on each worker of a cluster.

        Once one has failed, the others get a moment to say what they make of it, and are killed.
        """
        with reserve(len(jobs)) as ports:
            addresses = [f"127.0.0.1:{port}" for port in ports.ports]
            started = []
            for rank, job in enumerate(jobs):
                cluster = ClusterConfig({"worker": addresses}, "worker", rank).to_json()
                variables = {"TF_CONFIG": cluster, "TFDIST_CLUSTER": cluster, "TFDIST_LOG_DIR": str(folder)}
                started.append(self.start(job, folder, variables))
            end = math.inf
            while None in (codes := [one.process.poll() for one in started]) and time.monotonic() < end:
                if end == math.inf and not {*codes} <= {None, 0, PREEMPTED}:
                    end = time.monotonic() + _MOMENT
                time.sleep(0.02)
            for one in started:
                one.kill()
            return [one.wait() for one in started]

    def __enter__(self) -> ForkedJobs:
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.close()
