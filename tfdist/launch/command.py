"""The command line: `tfdist run` and `tfdist env`. It imports next to nothing until it is known what to do."""

from __future__ import annotations

import sys
from typing import Any

import click

from tfdist.launch.arguments import Target, split

_TARGET = "tfdist.launch.target"
_GRACE_HELP = "Seconds before SIGKILL; also until an evaluator is stopped once the training has ended."


class _CountOrAuto(click.ParamType):
    name = "K|auto"

    def __init__(self, minimum: int) -> None:
        self._minimum = minimum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == "auto":
            return value
        try:
            count = int(value)
        except ValueError:
            self.fail(f"{value!r}: expected a whole number or auto.", param, ctx)
        if count < self._minimum:
            self.fail(f"{value}: expected at least {self._minimum}, or auto.", param, ctx)
        return count


class _RunCommand(click.Command):
    """Leaves everything from the script on to the script, options included."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with_value = {
            name
            for option in self.params
            if isinstance(option, click.Option) and not option.is_flag
            for name in option.opts
        }
        own, target = split(args, with_value)
        ctx.meta[_TARGET] = target
        return super().parse_args(ctx, own)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["[OPTIONS]", "SCRIPT", "[ARGS]..."]


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        from tfdist.launch.versions import own_version

        click.echo(f"tfdist {own_version()}")
        ctx.exit()


def _read_env(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    env = {}
    for text in values:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise click.BadParameter(f"{text!r}: expected KEY=VALUE, for example --env TF_CPP_MIN_LOG_LEVEL=0.")
        env[name] = value
    return env


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Version.")
def main() -> None:
    """Distributed training for Keras 3 on TensorFlow."""


@main.command(cls=_RunCommand, short_help="Run a script as a cluster on this machine.")
@click.option("-n", "--workers", type=int, default=2, show_default=True, help="Number of training processes.")
@click.option("--ps", type=int, default=0, show_default=True, help="Number of parameter servers.")
@click.option("--chief", is_flag=True, help='Let the first worker be the job "chief".')
@click.option("--evaluator", is_flag=True, help="Start an evaluator, too; it may outlast the training by --grace.")
@click.option("--cpus-per-worker", type=_CountOrAuto(1), default="auto", show_default=True, help="Cores of each one.")
@click.option("--gpus-per-worker", type=_CountOrAuto(0), default="auto", show_default=True, help="GPUs of each one.")
@click.option("--env", multiple=True, metavar="KEY=VALUE", callback=_read_env, help="Set a variable (repeatable).")
@click.option("--log-dir", metavar="DIR", help="Folder of the logs.  [default: tfdist-logs/<date-time>-<pid>]")
@click.option("--grace", type=click.FloatRange(min=0), default=10, show_default=True, help=_GRACE_HELP)
@click.option("--output", type=click.Choice(["chief", "all"]), default="chief", help="Whose output to show.")
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="Address of the cluster.")
@click.pass_context
def run(ctx: click.Context, **options: Any) -> None:
    """Run SCRIPT, unchanged, as a cluster on this machine.

    SCRIPT is a Python file, -m MODULE, or -- COMMAND for any other program; all that follows it is passed to it.
    The output of the first process is shown, that of all goes to the logs. The exit code is 0 when all processes
    succeed, otherwise that of the first one that failed.
    """
    from tfdist.cluster.errors import ClusterError
    from tfdist.launch.plan import PlanError
    from tfdist.launch.run import run_local

    target: Target = ctx.meta[_TARGET]
    try:
        code = run_local(target, **options)
    except PlanError as error:
        raise click.UsageError(str(error)) from None
    except (ClusterError, OSError) as error:
        print(f"tfdist: {error}", file=sys.stderr)
        code = 1
    ctx.exit(code)


@main.command(short_help="Show cluster, versions and devices.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option("--no-devices", is_flag=True, help="Leave the devices out: listing them starts TensorFlow.")
@click.pass_context
def env(ctx: click.Context, as_json: bool, no_devices: bool) -> None:
    """Show what this process would find: cluster, problems, versions, devices and variables.

    The exit code is 1 when there are problems.
    """
    from tfdist.launch import report

    facts = report.gather(with_devices=not no_devices)
    click.echo(report.as_json(facts) if as_json else report.as_text(facts))
    ctx.exit(1 if facts["problems"] else 0)
