"""Runs a function in several real processes that form a cluster on this machine."""

from __future__ import annotations

import io
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.ports import reserve
from tfdist.launcher.guardian import Guardian
from tfdist.launcher.local.calls import LaunchError, call_command, read_outcome, write_call
from tfdist.launcher.local.fork_server import ForkedProcess, fork, own_environment
from tfdist.launcher.output import Terminal
from tfdist.launcher.plan import ProcessPlan, RunOptions, jobs_of
from tfdist.launcher.process import Process, ProcessGroup, start_unpinned
from tfdist.supervision.process_folders import process_folder

_LAST_LINES = 40


class LocalRunError(LaunchError):
    """A process of `run_local` failed or did not end in time; the message holds the logs' last lines.

    Attributes:
        ranks: ranks that failed, first the one that is to blame. With parameter servers: positions in the order
            chief, workers, parameter servers.
    """


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

    It is for tests: silent unless something fails, within a time limit, and with the result of every rank.
    `tfdist.launch` is for functions that train, in notebooks and scripts: it shows what the first process prints.

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

    What `fn` has started, and left running, is killed a second after its process has ended.

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
    options = RunOptions(workers, ps)
    with process_folder("local") as root, reserve(len(options.tasks)) as ports, Guardian() as guardian:
        write_call(root / "call", fn, args, devices_per_worker)
        plans = _plans(root, options, ports.ports, env or {})

        def start(plan: ProcessPlan, output: int) -> ForkedProcess | subprocess.Popen[bytes]:
            return fork(plans.index(plan), plan.command[1:], plan.env, output) or start_unpinned(plan, output)

        # Nothing is shown.
        with ProcessGroup(plans, root, Terminal(io.BytesIO(), is_tty=False), guardian, start_program=start) as group:
            codes = _wait(group, timeout)
        return _collect(root, group.processes, codes, timeout, returning=1 if ps else workers)


def _plans(root: Path, options: RunOptions, ports: Sequence[int], env: Mapping[str, str]) -> list[ProcessPlan]:
    jobs = jobs_of(options, [f"127.0.0.1:{port}" for port in ports])
    plans = []
    for rank, (job, index) in enumerate(options.tasks):
        config = ClusterConfig(jobs, job, index).to_json()
        whole = {**own_environment(), "TF_CONFIG": config, "TFDIST_CLUSTER": config, **env}
        command = call_command(root / "call", root / f"result-{rank}")
        # Nobody asks how far they are: as processes that serve, they make no reports.
        plans.append(ProcessPlan(job if options.ps else "rank", index, command, whole, serves=True))
    return plans


def _wait(group: ProcessGroup, timeout: float) -> list[int | None]:
    """Waits until all have ended, one has failed, or time is up; returns the exit codes, `None` for who still runs."""
    deadline = time.monotonic() + timeout
    while None in (codes := [process.status for process in group.processes]) and time.monotonic() < deadline:
        if any(codes):
            # The others fail as a consequence, with messages of their own if they get a moment.
            time.sleep(1.0)
            break
        group.tick()
    return codes


def _collect(
    root: Path, processes: Sequence[Process], codes: Sequence[int | None], timeout: float, returning: int
) -> list[Any]:
    """Returns the results of the first ones, or blames whoever raised first, or died first, or did not end.

    Args:
        root: the folder with the results.
        processes: all of them, with their logs.
        codes: their exit codes.
        timeout: that was given.
        returning: how many of them return something; of the others exit code 0 is expected.
    """
    outcomes = {rank: read_outcome(root / f"result-{rank}") for rank in range(len(codes))}
    results = {rank: outcome.value for rank, outcome in outcomes.items() if outcome and outcome.succeeded}
    errors = {rank: outcome for rank, outcome in outcomes.items() if outcome and not outcome.succeeded}
    if set(range(returning)) <= set(results) and not any(code != 0 for code in codes[returning:]):
        return [results[rank] for rank in range(returning)]
    names = [process.plan.name for process in processes]
    raised = sorted(errors, key=lambda rank: errors[rank].moment)
    died = [rank for rank, code in enumerate(codes) if code and rank not in errors]
    late = [rank for rank, code in enumerate(codes) if code is None and rank not in errors]
    # A process that died without an exception was there first: the others' exceptions are about its absence.
    blamed = died or raised or late
    first = names[blamed[0]].capitalize()
    lines = [f"{first} of {len(codes)} " + ("did not end." if blamed == late else "failed.")]
    if blamed == late:
        lines.append(f"Killed after {timeout:.0f} s: {', '.join(names[rank] for rank in late)}.")
    for rank, code in enumerate(codes):
        log = processes[rank].log_path.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        state = "killed" if code is None else f"exit code {code}"
        lines += [f"--- {names[rank]}, {state}, last lines:", *log]
    cause = errors[raised[0]].value if raised else None
    ranks = [*blamed, *(rank for rank in (*died, *raised, *late) if rank not in blamed)]
    raise LocalRunError("\n".join(lines), ranks) from cause
