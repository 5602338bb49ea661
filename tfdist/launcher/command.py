"""The command line. Little is imported until it is known what to do."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from tfdist.launcher.arguments import (
    FILE,
    FOLDER,
    TARGET,
    TRANSPORT_OPTION,
    CountOrAuto,
    ScriptCommand,
    SecondsOrAuto,
    Target,
    WorkerRange,
    read_env,
)
from tfdist.launcher.completion import SHELLS, THIS_SHELL
from tfdist.launcher.hosts.options import hosts_options, run_anywhere

_WORKERS_HELP = (
    "Number of training processes; MIN:MAX begins with MAX, goes on with fewer when some die.  "
    "[default: number of GPUs that CUDA_VISIBLE_DEVICES or nvidia-smi names; 2 without GPUs]"
)
_STAGES_HELP = "Instead of -n: a process for each of the K stages that tfdist.PipelineStrategy cuts a model into."
_REPLICAS_HELP = "With --stages: R copies of the whole pipeline, K*R processes in all.  [default: 1]"
_HANG_HELP = "Without progress for so long, a process counts as hung.  [default: what is unusual for it, 30 at least]"
_PS_HELP = "Number of parameter servers; a chief is started as well, which drives the -n workers."
_DISCOVERY_HELP = "Elastic: prints host:slots for each host that can be used now. With --transport horovod -n MIN:MAX."
_INTERFACE_HELP = "Elastic: the network interface that all hosts share; needed with a single host (lo)."
_RESTARTS_HELP = "How often to start all processes again after one failed; with --ps, also a lost worker alone."
_START_HELP = "Seconds from the call of fit to the first step, until the run counts as hung."
_WARM_HELP = "Keep a process that has imported TensorFlow, from which restarted processes are forked."
_DRILL_HANG_HELP = "For the fault that hangs a worker.  [default: from the time between two backups]"
_ONLY_HELP = "Only this fault (repeatable): kill-worker, kill-chief, hang, corrupt, truncate, disk-full or preempt."
_KEEP_GOING_HELP = "Go on after a fault that the training did not survive unchanged."
_LOGS_HELP = "Folder of the logs.  [default: tfdist-logs/<date-time>-<pid>]"
_DRILL_LOGS_HELP = "Folder of logs and backups.  [default: tfdist-logs/drill-<date-time>]"
_WHEEL_HELP = "Where to put it.  [default: ~/.cache/tfdist/horovod/tensorflow-...]"
_INSTALL_HELP = "Let the Tab key complete command lines of tfdist, in new shells.  [default: the shell of this one]"
_ELSEWHERE = {
    **dict.fromkeys(("submit", "status", "logs", "cancel", "monitor", "goodput"), "tfdist.jobs.command"),
    "plan": "tfdist.planning.command",
    "tune": "tfdist.tuning.command",
}
_POSITIVE = click.FloatRange(min=0, min_open=True)
_GRACE_HELP = "Seconds before SIGKILL; also until an evaluator is stopped once the training has ended."


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from tfdist.launcher.machine import own_version

        click.echo(f"tfdist {own_version()}")
        ctx.exit()


def _install_completion(ctx: click.Context, param: click.Parameter, shell: str | None) -> None:
    if shell is None or ctx.resilient_parsing:
        return
    from tfdist.launcher.completion.installation import install, wanted_shell

    try:
        done = install(wanted_shell(shell), ctx.command, os.environ, Path.home())
    except OSError as error:
        print(f"tfdist: {error}", file=sys.stderr)
        ctx.exit(1)
    for line in done:
        click.echo(f"tfdist: {line}")
    ctx.exit()


def _show_completion(ctx: click.Context, param: click.Parameter, shell: str | None) -> None:
    if shell is None or ctx.resilient_parsing:
        return
    from tfdist.launcher.completion.installation import script_of, wanted_shell

    click.echo(script_of(wanted_shell(shell), ctx.command), nl=False)
    ctx.exit()


def _of_a_shell(name: str, callback: Callable[..., None], text: str) -> Callable[[Any], Any]:
    """An option that may be given a shell, and acts at once."""
    choice = click.Choice((*SHELLS, THIS_SHELL))
    about = {"metavar": f"[{'|'.join(SHELLS)}]", "help": text}
    once = {"is_flag": False, "flag_value": THIS_SHELL, "is_eager": True, "expose_value": False}
    return click.option(name, type=choice, callback=callback, **once, **about)


class _Commands(click.Group):
    """The commands of this module and those of other packages, which are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_ELSEWHERE])

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _ELSEWHERE:
            return super().get_command(ctx, name)
        return getattr(importlib.import_module(_ELSEWHERE[name]), name)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        # Without what describes them: importing all of them takes longer than the Tab key may.
        names = [CompletionItem(name) for name in self.list_commands(ctx) if name.startswith(incomplete)]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Version.")
@_of_a_shell("--install-completion", _install_completion, _INSTALL_HELP)
@_of_a_shell("--show-completion", _show_completion, "Print what --install-completion would write.")
def main() -> None:
    """Distributed training for Keras 3 on TensorFlow."""


@main.command(cls=ScriptCommand, short_help="Run a script as a cluster on this machine, or on hosts.")
@click.option("-n", "--workers", type=WorkerRange(), help=_WORKERS_HELP)
@click.option("--stages", type=click.IntRange(min=1), metavar="K", help=_STAGES_HELP)
@click.option("--replicas", type=click.IntRange(min=1), metavar="R", help=_REPLICAS_HELP)
@click.option("--ps", type=int, default=0, show_default=True, help=_PS_HELP)
@click.option("--chief", is_flag=True, help='Let the first worker be the job "chief".')
@click.option("--evaluator", is_flag=True, help="Start an evaluator, too; it may outlast the training by --grace.")
@TRANSPORT_OPTION
@hosts_options
@click.option("--host-discovery", metavar="PROGRAM", type=FILE, help=_DISCOVERY_HELP)
@click.option("--interface", metavar="NAME", help=_INTERFACE_HELP)
@click.option("--cpus-per-worker", type=CountOrAuto(1), default="auto", show_default=True, help="Cores of each one.")
@click.option("--gpus-per-worker", type=CountOrAuto(0), default="auto", show_default=True, help="GPUs of each one.")
@click.option("--env", multiple=True, metavar="KEY=VALUE", callback=read_env, help="Set a variable (repeatable).")
@click.option("--log-dir", metavar="DIR", type=FOLDER, help=_LOGS_HELP)
@click.option("--grace", type=click.FloatRange(min=0), default=10, show_default=True, help=_GRACE_HELP)
@click.option("--output", type=click.Choice(["chief", "all"]), default="chief", help="Whose output to show.")
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="Address of the cluster.")
@click.option("--max-restarts", type=click.IntRange(min=0), default=3, show_default=True, help=_RESTARTS_HELP)
@click.option("--hang-timeout", type=SecondsOrAuto(), default="auto", help=_HANG_HELP)
@click.option("--start-timeout", type=_POSITIVE, default=600, show_default=True, help=_START_HELP)
@click.option("--warm/--no-warm", default=True, show_default=True, help=_WARM_HELP)
@click.pass_context
def run(ctx: click.Context, **options: Any) -> None:
    """Run SCRIPT, unchanged, as a cluster on this machine, or on several hosts (--hosts).

    SCRIPT is a Python file, -m MODULE, or -- COMMAND for any other program; all that follows it is passed to it.
    The output of the first process is shown, that of all goes to the logs. The exit code is 0 when all processes
    succeed, otherwise that of the first one that failed. 77: stopped, and saved; start it again. 74: stopped, and could
    not save. 78: it would fail again. 255: a host is lost.

    TensorFlow listens on all addresses of this machine, whatever --host says, and asks nobody for a password. Where
    others can reach it, use a firewall, or a network of its own: unshare --net --map-root-user sh -c 'ip link set lo
    up; exec tfdist run ...'. tfdist check warns of public addresses.
    """
    from tfdist.cluster.errors import ClusterError
    from tfdist.launcher.run_plan import PlanError

    target: Target = ctx.meta[TARGET]
    given = [name for name in options if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    try:
        code = run_anywhere(target, given, options)
    except PlanError as error:
        raise click.UsageError(str(error)) from None
    except (ClusterError, OSError) as error:
        print(f"tfdist: {error}", file=sys.stderr)
        code = 1
    ctx.exit(code)


@main.command(cls=ScriptCommand, short_help="Try out whether a script survives kills, hangs, damaged backups, ...")
@click.option("-n", "--workers", type=click.IntRange(min=1), default=2, show_default=True, help="Training processes.")
@click.option("--only", multiple=True, metavar="NAME", help=_ONLY_HELP)
@click.option("--timeout", type=_POSITIVE, default=300, show_default=True, help="Seconds that each run may take.")
@click.option("--hang-timeout", type=SecondsOrAuto(), default="auto", help=_DRILL_HANG_HELP)
@click.option("--keep-going", is_flag=True, help=_KEEP_GOING_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--log-dir", metavar="DIR", type=FOLDER, help=_DRILL_LOGS_HELP)
@click.pass_context
def drill(ctx: click.Context, as_json: bool, **options: Any) -> None:
    """Run SCRIPT once undisturbed and once for each fault, and compare how it ends.

    The script needs tfdist.callbacks.BackupAndRestore; its backups go to a folder of the drill. It is run here several
    times, with its own arguments: what else it writes is overwritten. The exit code is 0 if each disturbed run ends
    with the same weights, optimizer and history as the undisturbed one, bit for bit, otherwise 1.
    """
    from tfdist.launcher.drill.drill import DrillOptions, run_drill
    from tfdist.launcher.run_plan import PlanError

    try:
        code = run_drill(ctx.meta[TARGET], DrillOptions(**options), as_json)
    except PlanError as error:
        raise click.UsageError(str(error)) from None
    except OSError as error:
        print(f"tfdist: {error}", file=sys.stderr)
        code = 1
    ctx.exit(code)


@main.group()
def horovod() -> None:
    """Horovod, as the transport of tfdist.HorovodStrategy."""


@horovod.command(short_help="Build a wheel of Horovod for the installed TensorFlow.")
@click.option("--wheel-dir", metavar="DIR", type=FOLDER, help=_WHEEL_HELP)
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

    try:
        wheel = build_wheel(wheel_dir, force, say)
    except (BuildError, OSError) as error:
        say(str(error))
        sys.exit(1)
    # pip would leave a wheel of this version alone, whatever TensorFlow it was built for.
    say(f"install it with: {sys.executable} -m pip install --force-reinstall {wheel}")
    print(wheel)


@main.command(short_help="Try whether the processes of a job can train together: srun tfdist check")
@click.option("--timeout", type=_POSITIVE, default=60, show_default=True, help="Seconds to wait for the others.")
@click.option("--no-tensorflow", is_flag=True, help="Leave out the sum through TensorFlow, which takes some seconds.")
@click.pass_context
def check(ctx: click.Context, timeout: float, no_tensorflow: bool) -> None:
    """Start it as the training is started: srun tfdist check, mpirun tfdist check, in each pod, ...

    The processes find each other, and rank 0 prints who is there, what they run, latency and bandwidth between them,
    and whether TensorFlow sums up right. The last line is "ready", or the first thing to mend; the exit code then is 1.
    It warns of hosts with public addresses, since TensorFlow asks nobody who connects for a password.
    """
    from tfdist.launcher.check.check import check as run_check

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
    click.echo(report.as_json(facts) if as_json else report.as_text(facts))
    ctx.exit(1 if facts["problems"] else 0)
