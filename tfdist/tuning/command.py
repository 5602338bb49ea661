"""The command `tfdist tune`."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from tfdist.launcher.arguments import TARGET, TRANSPORT_OPTION, CountOrAuto, ScriptCommand, Target, read_env

_LOCAL, _SLURM, _KUBERNETES = SCHEDULERS = ("local", "slurm", "kubernetes")
_TUNERS_HELP = "Number of tuners, which run trials at the same time.  [default: number of GPUs; 2 without GPUs]"
_PROCESSES_HELP = "Processes of each trial, which train together by a strategy such as MultiWorkerMirroredStrategy."
_SCHEDULER_HELP = "slurm, kubernetes: this is one element of a job array, or one pod of an Indexed Job, of -n tuners."
_RESTARTS_HELP = "How often a trial is tried again whose tuner was killed; 0: the search ends then."
_LOG_HELP = "Folder of the logs; on a cluster, one that all see.  [default: tfdist-logs/<date-time>-<pid>]"
_GRACE_HELP = "Seconds between a signal that is passed on and SIGKILL."


@click.command(cls=ScriptCommand, short_help="Run a KerasTuner search with several tuners.")
@click.option("-n", "--tuners", type=click.IntRange(min=1), help=_TUNERS_HELP)
@click.option("--workers-per-trial", type=click.IntRange(min=1), default=1, show_default=True, help=_PROCESSES_HELP)
@click.option("--cpus-per-worker", type=CountOrAuto(1), default="auto", show_default=True, help="Cores of each one.")
@click.option("--gpus-per-worker", type=CountOrAuto(0), default="auto", show_default=True, help="GPUs of each one.")
@click.option("--scheduler", type=click.Choice(SCHEDULERS), default=_LOCAL, show_default=True, help=_SCHEDULER_HELP)
@TRANSPORT_OPTION
@click.option("--env", multiple=True, metavar="KEY=VALUE", callback=read_env, help="Set a variable (repeatable).")
@click.option("--log-dir", metavar="DIR", help=_LOG_HELP)
@click.option("--grace", type=click.FloatRange(min=0), default=10, show_default=True, help=_GRACE_HELP)
@click.option("--output", type=click.Choice(["first", "all"]), default="first", help="Whose output to show.")
@click.option("--max-restarts", type=click.IntRange(min=0), default=3, show_default=True, help=_RESTARTS_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print the trials as JSON, and the script's output as errors.")
@click.pass_context
def tune(ctx: click.Context, **options: Any) -> None:
    """Run SCRIPT, an unchanged KerasTuner search, with several tuners at the same time.

    SCRIPT is a Python file or -m MODULE; all that follows it is passed to it. Each tuner is a process, or
    --workers-per-trial of them. All of them run SCRIPT up to its call of search(), and then take trials from the oracle
    of the first one, which alone goes on behind that call. A tuner that is killed is started again, and takes up its
    trial. At the end, the best trials are shown. The exit code is 0 when the script has ended well, otherwise that of
    the tuner that failed. 1: the script does not search.
    """
    from tfdist.cluster.errors import ClusterError
    from tfdist.launcher.run_plan import PlanError

    try:
        code = _run(ctx.meta[TARGET], **options)
    except PlanError as error:
        raise click.UsageError(str(error)) from None
    except (ClusterError, OSError) as error:
        print(f"tfdist: {error}", file=sys.stderr)
        code = 1
    ctx.exit(code)


def _run(
    target: Target,
    tuners: int | None,
    workers_per_trial: int,
    cpus_per_worker: int | str,
    gpus_per_worker: int | str,
    scheduler: str,
    transport: str,
    env: Mapping[str, str],
    log_dir: str | None,
    grace: float,
    output: str,
    max_restarts: int,
    as_json: bool,
) -> int:
    from tfdist.cluster.ports import reserve
    from tfdist.launcher.machine import Machine
    from tfdist.launcher.run_plan import default_workers
    from tfdist.launcher.terminal import Terminal, hidden_lines
    from tfdist.tuning.member import Member
    from tfdist.tuning.placement import place
    from tfdist.tuning.results import files_in
    from tfdist.tuning.tune_plan import TuneOptions, announcement, plan_tuners
    from tfdist.tuning.tune_run import TuneRun

    command = _command(target)
    machine = Machine.this_one()
    local_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    count = tuners
    if tuners is None and scheduler == _LOCAL:
        count = max(default_workers(machine, gpus_per_worker) // workers_per_trial, 1)
    found = place(scheduler, count, log_dir, local_id, os.environ)
    shares = (cpus_per_worker, gpus_per_worker, env, transport)
    options = TuneOptions(found.tuners, found.here, workers_per_trial, *shares)
    folder = found.folder or _default_folder(local_id)
    folder.mkdir(parents=True, exist_ok=True)
    first = Member(
        *(0, 0, found.tuners, workers_per_trial, secrets.token_hex(4), found.search_id, str(folder), max_restarts),
        alone=scheduler == _LOCAL,
    )
    with ExitStack() as stack:
        ports = ()
        if workers_per_trial > 1:
            ports = stack.enter_context(reserve(options.processes, host="127.0.0.1")).ports
        plans = plan_tuners(options, command, machine, ports, os.environ, first, show_all=output == "all")
        live = next(iter(plans.values()))[0].name
        hidden = hidden_lines(output == "all", {**os.environ, **env})
        if as_json:
            terminal = Terminal(sys.stderr.buffer, is_tty=False, live=live, hidden=hidden)
        else:
            terminal = Terminal.standard(live=live, env=os.environ, hidden=hidden)
        shown = _shortest(folder)
        terminal.message(announcement(options, str(shown)))
        if 0 in plans:
            for stale in files_in(folder):
                stale.unlink()
        code = TuneRun(plans, found.search_id, max_restarts, shown, terminal, grace).run()
    if 0 in plans:
        _show(folder, as_json)
    return code


def _command(target: Target) -> tuple[str, ...]:
    """The argument vector of each process.

    Raises:
        PlanError: there is nothing to run, or it is no Python program, or KerasTuner is missing.
    """
    from tfdist.launcher.run_plan import PlanError

    if target.kind == "command":
        raise PlanError(
            f"-- {target.words[0] if target.words else ''}: expected a Python file or -m MODULE, in which "
            "`tfdist tune` finds KerasTuner. Leave -- out."
        )
    try:
        python, unbuffered, *words = target.command()
    except ValueError as error:
        raise PlanError(str(error).replace("tfdist run -n 2 train.py", "tfdist tune -n 2 search.py")) from None
    if importlib.util.find_spec("keras_tuner") is None:
        raise PlanError("KerasTuner is not installed here: expected the package keras-tuner. pip install keras-tuner")
    return (python, unbuffered, "-m", "tfdist.tuning.program", *words)


def _default_folder(name: str) -> Path:
    from tfdist.log_folders import default_log_dir

    return default_log_dir(name, os.getcwd(), tempfile.gettempdir()).absolute()


def _shortest(folder: Path) -> Path:
    return folder.relative_to(os.getcwd()) if folder.is_relative_to(os.getcwd()) else folder


def _show(folder: Path, as_json: bool) -> None:
    from tfdist.plain_text import plain_text
    from tfdist.tuning.results import searches_in, summary_of, table_of

    searches = searches_in(folder)
    if as_json:
        print(json.dumps(searches, indent=1))
        return
    for search in searches:
        print(f"{summary_of(search)}\n\n{plain_text(table_of(search)).rstrip()}")
