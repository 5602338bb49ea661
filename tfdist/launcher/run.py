"""`tfdist run` from its options to the exit code."""

from __future__ import annotations

import functools
import os
import secrets
import tempfile
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
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
    shares,
    shares_gpus,
    versions,
)
from tfdist.launcher.policy import RestartPolicy, counted
from tfdist.launcher.process import start_afresh
from tfdist.launcher.supervisor import ClusterRun, Patience, announcement
from tfdist.strategies.horovod import installation


def run(
    target: Target,
    given: Collection[str],
    hosts: str | None,
    hostfile: str | None,
    ssh: str,
    remote_python: str | None,
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
) -> int:
    """Runs a program as a cluster, on this machine or on several hosts, and returns the exit code.

    `given` names the options that do not have their defaults by themselves.

    Raises:
        PlanError: the options ask for something that is not there.
        ClusterError: there are no free ports.
        OSError: the logs cannot be written, the program cannot be started, or a host cannot be reached.
    """
    option = "--hosts" if hosts is not None else "--hostfile" if hostfile is not None else ""
    if option and "host" in given:
        raise PlanError(
            f"--host and {option}: expected only one of them: each host has the address at which ssh has reached it; "
            "TFDIST_INTERFACE names another network. Leave --host out."
        )
    for name in ("ssh", "remote_python"):
        if name in given and not option:
            raise PlanError(f"--{name.replace('_', '-')}: expected --hosts or --hostfile, too. Leave it out without.")
    parts = stages_of(workers, stages, replicas, ps, chief)
    # None: as many as there are places for.
    fewest, most = (parts.workers, parts.workers) if parts else workers or (None, None)
    if ps > 0 and fewest != most:
        raise PlanError(
            f"-n {fewest}:{most} and --ps {ps}: expected one number of workers. With parameter servers a worker "
            f"that is lost is replaced, and the others go on meanwhile: use -n {most}."
        )
    missing = installation.problem(versions()["tensorflow"]) if transport == HOROVOD else None
    if missing is not None:
        raise PlanError(f"--transport {transport}: {missing}")
    options = RunOptions(
        workers=1 if most is None else most,
        ps=ps,
        chief=chief,
        cpus_per_worker=cpus_per_worker,
        gpus_per_worker=gpus_per_worker,
        env=env,
        host=host if "host" in given else own_loopback(),
        stages=parts,
        transport=transport,
        replace_workers=replace_workers,
    )
    command = target.command()
    run_id, show_all = new_run_id(), output == "all"
    folder = log_folder(log_dir, run_id)
    shown_folder = shortest(folder)
    policy = RestartPolicy(max_restarts, fewest, regrow_after)
    patience = Patience(grace, hang_timeout, start_timeout)
    if option:
        from tfdist.launcher.hosts.run import run_on_hosts

        return run_on_hosts(
            hosts=hosts,
            hostfile=hostfile,
            ssh=ssh,
            remote_python=remote_python,
            options=options,
            fewest=fewest,
            most=most,
            command=command,
            run_id=run_id,
            folder=folder,
            shown_folder=shown_folder,
            show_all=show_all,
            policy=policy,
            patience=patience,
        )
    machine = Machine.this_one()
    options = replace(options, workers=most or default_workers(machine, gpus_per_worker))
    shares(options, machine)  # what is not there is found before anything is announced; fewer workers need less
    folder.mkdir(parents=True, exist_ok=True)
    hidden = hidden_lines(show_all, {**os.environ, **env})
    terminal = Terminal.standard(live="{} {}".format(*options.tasks[0]), env=os.environ, hidden=hidden)
    announce(options, machine, terminal, str(shown_folder), show_all)
    plan = functools.partial(
        plan_run,
        command=command,
        machine=machine,
        environ=os.environ,
        run_id=run_id,
        log_dir=str(folder),
        show_all=show_all,
    )
    return ClusterRun(options, plan, policy, shown_folder, terminal, patience, start_afresh).run()


def new_run_id() -> str:
    """A name for a run, and for the folder of its logs, by chance: in containers, all launchers have the same pid."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.randbelow(10**6)}"


def log_folder(given: str | os.PathLike[str] | None, run_id: str) -> Path:
    """The absolute folder of the logs: the one that the user has given, or the default."""
    return Path(given or default_log_dir(run_id, current_folder(), tempfile.gettempdir())).absolute()


def announce(options: RunOptions, machine: Machine, terminal: Terminal, log_dir: str, show_all: bool) -> None:
    """Says what runs, where the output is that is not shown, and whether processes share a GPU."""
    terminal.message(announcement(options, log_dir, show_all))
    if shares_gpus(options, machine):
        terminal.message(
            f"{counted(len(machine.gpus), 'GPU')} for {len(options.tasks_with_devices)} processes, which share them; "
            f"-n {len(machine.gpus)} gives each process its own"
        )


def shortest(folder: Path) -> Path:
    """Relative to the current folder where it lies below that."""
    here = current_folder()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder
