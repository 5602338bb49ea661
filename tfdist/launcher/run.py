"""`tfdist run` from its options to the exit code."""

from __future__ import annotations

import functools
import os
import secrets
import tempfile
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from tfdist.cluster.ports import own_loopback
from tfdist.cluster.variables import HOROVOD
from tfdist.folders import current_folder, default_log_dir
from tfdist.launcher.arguments import Target, stages_of
from tfdist.launcher.output import Terminal, hidden_lines
from tfdist.launcher.plan import (
    Machine,
    PlanError,
    RunOptions,
    default_workers,
    plan_run,
    share_cpus,
    share_gpus,
    shares_gpus,
    versions,
)
from tfdist.launcher.policy import RestartPolicy, counted
from tfdist.launcher.process import start_afresh
from tfdist.launcher.supervisor import ClusterRun, Patience
from tfdist.strategies.horovod import installation


def run_local(
    target: Target,
    workers: tuple[int, int] | None,
    stages: int | None,
    replicas: int | None,
    ps: int,
    chief: bool,
    cpus_per_worker: int | str,
    gpus_per_worker: int | str,
    env: Mapping[str, str],
    log_dir: str | None,
    grace: float,
    output: str,
    host: str,
    max_restarts: int,
    hang_timeout: float | None,
    start_timeout: float,
    regrow_after: float,
    replace_workers: bool,
    transport: str,
    given: Collection[str] = (),
    **of_hosts: object,
) -> int:
    """Runs a program as a cluster on this machine and returns the exit code.

    `given` names the options that do not have their defaults by themselves; those of `of_hosts` do nothing here.

    Raises:
        PlanError: the options ask for something that is not there.
        ClusterError: there are no free ports.
        OSError: the logs cannot be written or the program cannot be started.
    """
    for name in of_hosts:
        if name in given:
            raise PlanError(f"--{name.replace('_', '-')}: expected --hosts or --hostfile, too. Leave it out without.")
    machine = Machine.this_one()
    try:
        parts = stages_of(workers, stages, replicas, ps, chief)
        count = parts.workers if parts else default_workers(machine, gpus_per_worker)
        fewest, most = workers or (count, count)
        check_workers(fewest, most, ps)
        host = host if "host" in given else own_loopback()
        devices = (cpus_per_worker, gpus_per_worker)
        options = RunOptions(most, ps, chief, *devices, env, host, parts, transport, replace_workers)
        command = target.command()
        check_transport(transport)
    except ValueError as error:
        raise PlanError(str(error)) from None
    run_id = new_run_id()
    folder = log_folder(log_dir, run_id)
    shown_folder = shortest(folder)
    show_all = output == "all"
    hidden = hidden_lines(show_all, {**os.environ, **env})
    check_shares(options, machine)
    folder.mkdir(parents=True, exist_ok=True)
    terminal = Terminal.standard(live="{} {}".format(*options.tasks[0]), env=os.environ, hidden=hidden)
    announce(options, machine, terminal, str(shown_folder), show_all)
    of_run = {"run_id": run_id, "log_dir": str(folder), "show_all": show_all}
    plan = functools.partial(plan_run, command=command, machine=machine, environ=os.environ, **of_run)
    policy = RestartPolicy(max_restarts, fewest if fewest < most else None, regrow_after)
    patience = Patience(grace, hang_timeout, start_timeout)
    return ClusterRun(options, plan, policy, shown_folder, terminal, patience, start_afresh).run()


def check_workers(fewest: int, most: int, ps: int) -> None:
    """Raises ValueError if fewer workers cannot go on."""
    if ps > 0 and fewest < most:
        raise ValueError(
            f"-n {fewest}:{most} and --ps {ps}: expected one number of workers. With parameter servers a worker "
            f"that is lost is replaced, and the others go on meanwhile: use -n {most}."
        )


def check_transport(transport: str) -> None:
    """Raises ValueError if what carries the sums is not installed."""
    missing = installation.problem(versions()["tensorflow"]) if transport == HOROVOD else None
    if missing is not None:
        raise ValueError(f"--transport {transport}: {missing}")


def new_run_id() -> str:
    """A name for a run, and for the folder of its logs, by chance: in containers, all launchers have the same pid."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.randbelow(10**6)}"


def log_folder(given: str | os.PathLike[str] | None, run_id: str) -> Path:
    """The absolute folder of the logs: the one that the user has given, or the default."""
    return Path(given or default_log_dir(run_id, current_folder(), tempfile.gettempdir())).absolute()


def check_shares(options: RunOptions, machine: Machine) -> None:
    """Finds what is not there before anything is announced; fewer workers need less.

    Raises:
        PlanError: there are not as many cores or GPUs as asked for.
    """
    for share in (share_cpus, share_gpus):
        share(options, machine)


def announce(options: RunOptions, machine: Machine, terminal: Terminal, log_dir: str, show_all: bool) -> None:
    """Says what runs, where the output is that is not shown, and whether processes share a GPU."""
    terminal.message(announcement(options, log_dir, show_all))
    if shares_gpus(options, machine):
        terminal.message(
            f"{len(machine.gpus)} GPU(s) for {len(options.tasks_with_devices)} processes, which share them; "
            f"-n {len(machine.gpus)} gives each process its own"
        )


def announcement(options: RunOptions, log_dir: str, show_all: bool, place: str = "this machine") -> str:
    """The line at the start: what runs, and where the output is that is not shown.

    Example:
        >>> announcement(RunOptions(), "logs", show_all=False)
        '2 workers on this machine; output of worker 1 goes to logs/'
    """
    jobs = [job for job, _ in options.tasks]
    counts = [counted(jobs.count(job), job, "" if job == "ps" else "s") for job in dict.fromkeys(jobs)]
    if options.stages:
        counts[0] += f" ({options.stages})"
    what = counts[0] if len(counts) == 1 else f"{', '.join(counts[:-1])} and {counts[-1]}"
    hidden = [f"{job} {index}" for job, index in options.tasks[1:]]
    if show_all or not hidden:
        where = f"complete logs in {log_dir}/"
    elif len(hidden) == 1:
        where = f"output of {hidden[0]} goes to {log_dir}/"
    else:
        where = f"output of the other {len(hidden)} goes to {log_dir}/"
    return f"{what} on {place}; {where}"


def shortest(folder: Path) -> Path:
    """Relative to the current folder where it lies below that."""
    here = current_folder()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder
