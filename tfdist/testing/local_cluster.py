"""Runs a function in several real processes that form a cluster on this machine."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.ports import reserve
from tfdist.launch.guardian import Guardian
from tfdist.launch.zygote import ForkedProcess
from tfdist.supervision import events, progress
from tfdist.testing.fork_server import fork

_LAST_LINES = 40
_OF_RUN = ("TFDIST_LOG_DIR", events.VARIABLE, progress.VARIABLE)
_THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "4", "TF_CPP_MIN_LOG_LEVEL": "2"}
# Started by its path: it finds the parent's modules only after it has read where the parent found them.
_CHILD = str(Path(__file__).with_name("child.py"))


class LocalRunError(RuntimeError):
    """A process of `run_local` failed or did not end in time; the message holds the logs' last lines.

    Attributes:
        ranks: ranks that failed, first the one that is to blame. With parameter servers: positions in the order
            chief, workers, parameter servers.
    """

    def __init__(self, message: str, ranks: Sequence[int]):
        super().__init__(message)
        self.ranks = tuple(ranks)


def run_local(
    fn: Callable[..., Any],
    workers: int = 2,
    *,
    ps: int = 0,
    args: Sequence[Any] = (),
    devices_per_worker: int = 1,
    timeout: float = 180.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Runs `fn(*args)` in `workers` new processes that discover each other as a cluster.

    Args:
        fn: any function, closures included (it travels by cloudpickle). It finds its cluster by `tfdist.discover()`,
            as a strategy does by itself.
        workers: number of processes.
        ps: number of parameter servers. With any, there is a chief, too, and `fn` is expected to return in the chief
            only: in the others `tfdist.ParameterServerStrategy()` serves, and ends the process with exit code 0.
        args: arguments of `fn`, equal for every process.
        devices_per_worker: number of logical CPU devices of each process.
        timeout: seconds after which all processes are killed.
        env: environment variables to set in every process, in addition to this process' own.

    Returns:
        What `fn` returned, by rank; with parameter servers a list of what it returned in the chief.

    Raises:
        LocalRunError: if a process raised, died, or did not end in time. The exception of the first process that
            raised one is its `__cause__`.

    Example:
        >>> from tfdist.testing import run_local
        >>> def rank():
        ...     import tfdist
        ...     return tfdist.discover().rank
        >>> run_local(rank, workers=2)
        [0, 1]
    """
    with (
        tempfile.TemporaryDirectory(prefix="tfdist-local-") as folder,
        reserve(workers + bool(ps) + ps) as ports,
        Guardian() as guardian,
    ):
        root = Path(folder)
        parts = (list(sys.path), devices_per_worker, (fn, tuple(args)))
        (root / "call").write_bytes(b"".join(cloudpickle.dumps(part) for part in parts))
        tasks, jobs = _cluster(workers, ps, ports.ports)
        processes: list[subprocess.Popen | ForkedProcess] = []
        try:
            for rank, task in enumerate(tasks):
                processes.append(_start(root, ClusterConfig(jobs, *task), rank, env or {}))
                guardian.add(processes[-1].pid)
            codes = _wait(processes, timeout)
        finally:
            for process in processes:
                _kill(process)
                guardian.remove(process.pid)
        names = [f"{job} {index}" if ps else f"rank {index}" for job, index in tasks]
        return _collect(root, codes, timeout, names, returning=1 if ps else workers)


def _cluster(workers: int, ps: int, ports: Sequence[int]) -> tuple[list[tuple[str, int]], dict[str, list[str]]]:
    """All tasks, and the addresses by job."""
    sizes = {"chief": 1, "worker": workers, "ps": ps} if ps else {"worker": workers}
    tasks = [(job, index) for job, size in sizes.items() for index in range(size)]
    jobs: dict[str, list[str]] = {job: [] for job in sizes}
    for (job, _), port in zip(tasks, ports, strict=True):
        jobs[job].append(f"127.0.0.1:{port}")
    return tasks, jobs


def own_environment() -> dict[str, str]:
    """What every process of `run_local` finds in its environment, whatever its cluster is."""
    # Where a run around this process writes its events and its progress is not for processes of another one.
    around = {name: value for name, value in os.environ.items() if name not in _OF_RUN}
    return {**_THREADS, **around, "PYTHONUNBUFFERED": "1"}


def _start(root: Path, config: ClusterConfig, rank: int, env: Mapping[str, str]) -> subprocess.Popen | ForkedProcess:
    cluster = {"TF_CONFIG": config.to_json(), "TFDIST_CLUSTER": config.to_json()}
    whole = {**own_environment(), **cluster, **env}
    words = [_CHILD, str(root / "call"), str(root / f"result-{rank}")]
    with open(root / f"log-{rank}", "wb") as log:
        return fork(rank, words, whole, log.fileno()) or subprocess.Popen(
            [sys.executable, *words],
            env=whole,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait(processes: list[subprocess.Popen | ForkedProcess], timeout: float) -> list[int | None]:
    """Waits until all have ended, one has failed, or time is up; returns the exit codes, `None` for who still runs."""
    deadline = time.monotonic() + timeout
    while None in (codes := [p.poll() for p in processes]) and time.monotonic() < deadline:
        if any(codes):
            # The others fail as a consequence, with messages of their own if they get a moment.
            time.sleep(1.0)
            break
        time.sleep(0.02)
    return codes


def _kill(process: subprocess.Popen | ForkedProcess) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _collect(root: Path, codes: list[int | None], timeout: float, names: list[str], returning: int) -> list[Any]:
    """Returns the results of the first ones, or blames whoever raised first, or died first, or did not end.

    Args:
        root: the folder with the results and logs.
        codes: exit codes.
        timeout: that was given.
        names: of the processes.
        returning: how many of them return something; of the others exit code 0 is expected.
    """
    results: dict[int, Any] = {}
    errors: dict[int, tuple[float, BaseException | None]] = {}
    for rank in range(len(codes)):
        path = root / f"result-{rank}"
        if path.exists():
            moment, succeeded, value = pickle.loads(path.read_bytes())
            if succeeded:
                results[rank] = value
            else:
                errors[rank] = (moment, value)
    if set(range(returning)) <= set(results) and not any(code != 0 for code in codes[returning:]):
        return [results[rank] for rank in range(returning)]
    raised = sorted(errors, key=lambda rank: errors[rank][0])
    died = [rank for rank, code in enumerate(codes) if code and rank not in errors]
    late = [rank for rank, code in enumerate(codes) if code is None and rank not in errors]
    # A process that died without an exception was there first: the others' exceptions are about its absence.
    blamed = died or raised or late
    first = names[blamed[0]].capitalize()
    lines = [f"{first} of {len(codes)} " + ("did not end." if blamed == late else "failed.")]
    if blamed == late:
        lines.append(f"Killed after {timeout:.0f} s: {', '.join(names[rank] for rank in late)}.")
    for rank, code in enumerate(codes):
        log = (root / f"log-{rank}").read_text(errors="replace").splitlines()[-_LAST_LINES:]
        state = "killed" if code is None else f"exit code {code}"
        lines += [f"--- {names[rank]}, {state}, last lines:", *log]
    cause = errors[raised[0]][1] if raised else None
    ranks = [*blamed, *(rank for rank in (*died, *raised, *late) if rank not in blamed)]
    raise LocalRunError("\n".join(lines), ranks) from cause
