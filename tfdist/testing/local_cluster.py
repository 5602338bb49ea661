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

_LAST_LINES = 40
# Started by its path: it finds the parent's modules only after it has read where the parent found them.
_CHILD = str(Path(__file__).with_name("child.py"))


class LocalRunError(RuntimeError):
    """A process of `run_local` failed or did not end in time; the message holds the logs' last lines.

    Attributes:
        ranks: ranks that failed, first the one that is to blame.
    """

    def __init__(self, message: str, ranks: Sequence[int]):
        super().__init__(message)
        self.ranks = tuple(ranks)


def run_local(
    fn: Callable[..., Any],
    workers: int = 2,
    *,
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
        args: arguments of `fn`, equal for every process.
        devices_per_worker: number of logical CPU devices of each process.
        timeout: seconds after which all processes are killed.
        env: environment variables to set in every process, in addition to this process' own.

    Returns:
        What `fn` returned, by rank.

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
        reserve(workers) as ports,
        Guardian() as guardian,
    ):
        root = Path(folder)
        parts = (list(sys.path), devices_per_worker, (fn, tuple(args)))
        (root / "call").write_bytes(b"".join(cloudpickle.dumps(part) for part in parts))
        jobs = {"worker": [f"127.0.0.1:{port}" for port in ports.ports]}
        processes: list[subprocess.Popen] = []
        try:
            for rank in range(workers):
                processes.append(_start(root, ClusterConfig(jobs, "worker", rank), rank, env or {}))
                guardian.add(processes[-1].pid)
            codes = _wait(processes, timeout)
        finally:
            for process in processes:
                _kill(process)
                guardian.remove(process.pid)
        return _collect(root, codes, timeout)


def _start(root: Path, config: ClusterConfig, rank: int, env: Mapping[str, str]) -> subprocess.Popen:
    settings = {"TF_CONFIG": config.to_json(), "TFDIST_CLUSTER": config.to_json(), "PYTHONUNBUFFERED": "1"}
    threads = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "4", "TF_CPP_MIN_LOG_LEVEL": "2"}
    with open(root / f"log-{rank}", "wb") as log:
        return subprocess.Popen(
            [sys.executable, _CHILD, str(root / "call"), str(root / f"result-{rank}")],
            env={**threads, **os.environ, **settings, **env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait(processes: list[subprocess.Popen], timeout: float) -> list[int | None]:
    """Waits until all have ended, one has failed, or time is up; returns the exit codes, `None` for who still runs."""
    deadline = time.monotonic() + timeout
    while None in (codes := [p.poll() for p in processes]) and time.monotonic() < deadline:
        if any(codes):
            # The others fail as a consequence, with messages of their own if they get a moment.
            time.sleep(1.0)
            break
        time.sleep(0.02)
    return codes


def _kill(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _collect(root: Path, codes: list[int | None], timeout: float) -> list[Any]:
    """Returns the results by rank, or blames whoever raised first, or died first, or did not end."""
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
    if len(results) == len(codes):
        return [results[rank] for rank in range(len(codes))]
    raised = sorted(errors, key=lambda rank: errors[rank][0])
    died = [rank for rank, code in enumerate(codes) if code and rank not in errors]
    late = [rank for rank, code in enumerate(codes) if code is None and rank not in errors]
    # A process that died without an exception was there first: the others' exceptions are about its absence.
    blamed = died or raised or late
    lines = [f"Rank {blamed[0]} of {len(codes)} " + ("did not end." if blamed == late else "failed.")]
    if blamed == late:
        lines.append(f"Ranks {late} had not ended after {timeout:.0f} s and were killed.")
    for rank, code in enumerate(codes):
        log = (root / f"log-{rank}").read_text(errors="replace").splitlines()[-_LAST_LINES:]
        state = "killed" if code is None else f"exit code {code}"
        lines += [f"--- rank {rank}, {state}, last lines:", *log]
    cause = errors[raised[0]][1] if raised else None
    ranks = [*blamed, *(rank for rank in (*died, *raised, *late) if rank not in blamed)]
    raise LocalRunError("\n".join(lines), ranks) from cause
