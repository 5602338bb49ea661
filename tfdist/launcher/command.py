"""The command line. Little is imported until it is known what to do."""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

import click
from click.core import ParameterSource

from tfdist import __version__
from tfdist.launcher.arguments import (
    FILE,
    FOLDER,
    SECONDS_OR_AUTO,
    TARGET,
    TRANSPORT_OPTION,
    PlanError,
    ScriptCommand,
    WorkerRange,
    count_or_auto,
    read_env,
    refused,
)
from tfdist.launcher.operating_system import open_standard_streams

_ELSEWHERE = {
    **dict.fromkeys(("submit", "status", "logs", "cancel", "monitor", "goodput"), "tfdist.jobs.command"),
    "plan": "tfdist.planning.command",
    "tune": "tfdist.tuning.command",
}
_POSITIVE = click.FloatRange(min=0, min_open=True)


class _Commands(click.Group):
    """The commands of this module and those of other packages, which are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_ELSEWHERE])

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _ELSEWHERE:
            return super().get_command(ctx, name)
        return getattr(importlib.import_module(_ELSEWHERE[name]), name)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="tfdist %(version)s", help="Version.")
def main() -> None:
    """Distributed training for Keras 3 on TensorFlow."""
    open_standard_streams()


@main.command(cls=ScriptCommand, short_help="Run a script as a cluster on this machine, or on hosts.")
@click.option(
    "-n",
    "--workers",
    type=WorkerRange(),
    help="Number of training processes; MIN:MAX begins with MAX, goes on with fewer when some die, and grows again.  "
    "[default: number of GPUs that CUDA_VISIBLE_DEVICES or nvidia-smi names; 2 without GPUs]",
)
@click.option(
    "--stages",
    type=click.IntRange(min=1),
    metavar="K",
    help="Instead of -n: a process for each of the K stages that tfdist.PipelineStrategy cuts a model into.",
)
@click.option(
    "--replicas",
    type=click.IntRange(min=1),
    metavar="R",
    help="With --stages: R copies of the whole pipeline, K*R processes in all.  [default: 1]",
)
@click.option(
    "--ps",
    type=int,
    default=0,
    show_default=True,
    help="Number of parameter servers; a chief is started as well, which drives the -n workers.",
)
@click.option("--chief", is_flag=True, help='Let the first worker be the job "chief".')
@TRANSPORT_OPTION
@click.option(
    "--hosts",
    metavar="HOST:N,...",
    help="Run on these hosts, which are reached by ssh: HOST, or HOST:PROCESSES, separated by commas.  "
    "[default of PROCESSES: a host's number of GPUs; 1 without GPUs]",
)
@click.option(
    "--hostfile",
    metavar="FILE",
    type=FILE,
    help="The same from a file, with a line for each host: HOST, HOST:8 or HOST slots=8; # begins a comment.",
)
@click.option(
    "--ssh",
    metavar="COMMAND",
    default="ssh",
    show_default=True,
    help="How to call ssh, with options: 'ssh -F my_config'.",
)
@click.option("--remote-python", metavar="PATH", help="Python of the other hosts.  [default: the path of this one]")
@click.option("--cpus-per-worker", type=count_or_auto(1), default="auto", show_default=True, help="Cores of each one.")
@click.option("--gpus-per-worker", type=count_or_auto(0), default="auto", show_default=True, help="GPUs of each one.")
@click.option("--env", multiple=True, metavar="KEY=VALUE", callback=read_env, help="Set a variable (repeatable).")
@click.option(
    "--log-dir", metavar="DIR", type=FOLDER, help="Folder of the logs.  [default: tfdist-logs/<date-time>-<number>]"
)
@click.option("--grace", type=click.FloatRange(min=0), default=30, show_default=True, help="Seconds before SIGKILL.")
@click.option("--output", type=click.Choice(["chief", "all"]), default="chief", help="Whose output to show.")
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="Address of the cluster.")
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="How often to start all processes again after one failed; with --ps, also a lost worker alone.",
)
@click.option(
    "--hang-timeout",
    type=SECONDS_OR_AUTO,
    default="auto",
    help="Without progress for so long, a process counts as hung.  [default: what is unusual for it, 30 at least]",
)
@click.option(
    "--start-timeout",
    type=_POSITIVE,
    default=600,
    show_default=True,
    help="Seconds from the call of fit to the first step, until the run counts as hung.",
)
@click.option(
    "--replace-workers",
    is_flag=True,
    help="Start a worker that fails again while the others go on: for LocalStepsStrategy(min_workers=...).",
)
@click.option(
    "--regrow-after",
    type=_POSITIVE,
    default=300,
    show_default=True,
    help="With -n MIN:MAX: seconds after which a run that lacks workers saves, and starts with more; inf: never.",
)
@click.pass_context
def run(ctx: click.Context, **options: Any) -> None:
    """Run SCRIPT, unchanged, as a cluster on this machine, or on several hosts (--hosts).

    SCRIPT is a Python file, -m MODULE, or -- COMMAND for any other program; all that follows it is passed to it.
    The output of the first process is shown, that of all goes to the logs. The exit code is 0 when all processes
    succeed, otherwise that of the first one that failed. 77: stopped, and saved; start it again. 74: stopped, and could
    not save. 78: it would fail again. 124: a hang. 255: a
    host is lost.

    TensorFlow listens on all addresses of this machine, whatever --host says, and asks nobody for a password. Where
    others can reach it, use a firewall, or a network of its own: unshare --net --map-root-user sh -c 'ip link set lo
    up; exec tfdist run ...'. tfdist check warns of public addresses.
    """
    from tfdist.cluster.errors import ClusterError
    from tfdist.launcher.run import run as run_target

    given = [name for name in options if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    try:
        code = run_target(ctx.meta[TARGET], given, **options)
    except PlanError as error:
        _tell_job(error, error.exit_code)
        raise
    except (ClusterError, OSError) as error:
        _tell_job(error, code := 1)
        print(f"tfdist: {error}", file=sys.stderr)
    ctx.exit(code)


def _tell_job(error: Exception, code: int) -> None:
    """Writes to the event log of a job, which names that file, why its run has not begun."""
    from tfdist.supervision.events import VARIABLE, EventLog

    if path := os.environ.get(VARIABLE):
        EventLog(None, "launcher", path).write("gave-up", reason=str(error), exit_code=code)


@main.command(cls=ScriptCommand, short_help="Try out whether a script survives kills, hangs, damaged backups, ...")
@click.option("-n", "--workers", type=click.IntRange(min=1), default=2, show_default=True, help="Training processes.")
@click.option(
    "--only",
    multiple=True,
    metavar="NAME",
    help="Only this fault (repeatable): kill-worker, kill-chief, hang, corrupt, truncate, disk-full, preempt or "
    "shrink.",
)
@click.option("--timeout", type=_POSITIVE, default=300, show_default=True, help="Seconds that each run may take.")
@click.option(
    "--hang-timeout",
    type=SECONDS_OR_AUTO,
    default="auto",
    help="For the fault that hangs a worker.  [default: from the time between two backups]",
)
@click.option("--keep-going", is_flag=True, help="Go on after a fault that the training did not survive unchanged.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option(
    "--log-dir",
    metavar="DIR",
    type=FOLDER,
    help="Folder of logs and backups.  [default: tfdist-logs/drill-<date-time>]",
)
@click.pass_context
def drill(ctx: click.Context, **options: Any) -> None:
    """Run SCRIPT once undisturbed and once for each fault, and compare how it ends.

    The script needs tfdist.callbacks.BackupAndRestore; its backups go to a folder of the drill. It is run here several
    times, with its own arguments: what else it writes is overwritten. The exit code is 0 if each disturbed run ends
    with the same weights, optimizer and history as the undisturbed one, bit for bit, otherwise 1. "shrink", which goes
    on with one worker fewer and grows again, has to do all steps.
    """
    from tfdist.launcher.drill.drill import run_drill

    with refused(OSError):
        ctx.exit(run_drill(ctx.meta[TARGET], **options))


@main.group()
def horovod() -> None:
    """Horovod, as the transport of tfdist.HorovodStrategy."""


@horovod.command(short_help="Build a wheel of Horovod for the installed TensorFlow.")
@click.option(
    "--wheel-dir",
    metavar="DIR",
    type=FOLDER,
    help="Where to put it.  [default: ~/.cache/tfdist/horovod/tensorflow-...]",
)
@click.option("--force", is_flag=True, help="Build even if there is one already.")
def build(wheel_dir: str | None, force: bool) -> None:
    """Build a wheel of Horovod 0.28.1 for the TensorFlow that is installed here, and let two processes try it.

    It takes some minutes, a C++ compiler and CMake. MPI and NCCL are included where they are found. The last line of
    the output is the path of the wheel.
    """
    from tfdist.launcher.horovod.build import BuildError
    from tfdist.launcher.horovod.build import build as build_wheel

    def say(text: str) -> None:
        print(f"tfdist: {text}", file=sys.stderr, flush=True)

    with refused(BuildError, OSError):
        wheel = build_wheel(wheel_dir, force, say)
    # pip would leave a wheel of this version alone, whatever TensorFlow it was built for.
    say(f"install it with: {sys.executable} -m pip install --force-reinstall {wheel}")
    print(wheel)


@main.command(short_help="Try whether the processes of a job can train together: srun tfdist check")
@click.option("--timeout", type=_POSITIVE, default=60, show_default=True, help="Seconds to wait for the others.")
@click.option("--no-tensorflow", is_flag=True, help="Leave out the sum through TensorFlow, which takes some seconds.")
@click.pass_context
def check(ctx: click.Context, timeout: float, no_tensorflow: bool) -> None:
    """Start it as the training is started: srun tfdist check, mpirun tfdist check, in each pod, ...

    The processes find each other, and rank 0 prints who is there, what they run, how long connections between them
    take, and whether TensorFlow sums up right. The last line is "ready", or the first thing to mend; the exit code then
    is 1. It warns of hosts with public addresses: TensorFlow does not authenticate connections.
    """
    from tfdist.launcher.check import check as run_check

    ctx.exit(run_check(timeout, with_tensorflow=not no_tensorflow))


@main.command(short_help="Show cluster, versions and devices.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option("--no-devices", is_flag=True, help="Leave the devices out: listing them starts TensorFlow.")
@click.pass_context
def env(ctx: click.Context, as_json: bool, no_devices: bool) -> None:
    """Show what this process would find: cluster, problems, versions, devices and variables.

    The exit code is 1 when there are problems.
    """
    from tfdist.launcher import report

    facts = report.gather(with_devices=not no_devices)
    click.echo(json.dumps(facts, indent=2) if as_json else report.as_text(facts))
    ctx.exit(1 if facts["problems"] else 0)
