"""The command `tfdist tune`."""

from __future__ import annotations

from typing import Any

import click

from tfdist.launcher.arguments import TARGET, ScriptCommand, count_or_auto, read_env, refused


@click.command(cls=ScriptCommand, short_help="Run a KerasTuner search with several tuners.")
@click.option(
    "-n",
    "--tuners",
    type=click.IntRange(min=1),
    help="Number of tuners, which run trials at the same time.  [default: number of GPUs; 2 without GPUs]",
)
@click.option(
    "--only",
    type=click.IntRange(min=0),
    metavar="INDEX",
    help="Run only this one of the -n tuners; the others run elsewhere, with the same --log-dir, the search's own.",
)
@click.option("--cpus-per-worker", type=count_or_auto(1), default="auto", show_default=True, help="Cores of each one.")
@click.option("--gpus-per-worker", type=count_or_auto(0), default="auto", show_default=True, help="GPUs of each one.")
@click.option("--env", multiple=True, metavar="KEY=VALUE", callback=read_env, help="Set a variable (repeatable).")
@click.option(
    "--log-dir",
    metavar="DIR",
    help="Folder of the logs; with --only, one that all see.  [default: tfdist-logs/<date-time>-<number>]",
)
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=30,
    show_default=True,
    help="Seconds between a signal that is passed on and SIGKILL.",
)
@click.option("--output", type=click.Choice(["first", "all"]), default="first", help="Whose output to show.")
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="How often a trial is tried again whose tuner was killed; 0: the search ends then.",
)
@click.option(
    "--trial-timeout",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds that a trial may take; after that it has failed, and its tuner is started again.  [default: any]",
)
@click.pass_context
def tune(ctx: click.Context, **options: Any) -> None:
    """Run SCRIPT, an unchanged KerasTuner search, with several tuners at the same time.

    SCRIPT is a Python file or -m MODULE; all that follows it is passed to it. Each tuner is a process. All of them run
    SCRIPT up to its call of search(), and then share its trials. The first one alone goes on behind that call. A tuner
    that is killed is started again, and takes up its trial. At the end, the best trials are shown. The exit code is 0
    when the script has ended well, otherwise that of the tuner that failed. 1: the script does not search.
    """
    from tfdist.tuning.tune_run import run

    try:
        with refused(OSError):
            ctx.exit(run(ctx.meta[TARGET], **options))
    except ValueError as error:
        raise click.UsageError(str(error).replace("run -n 2 train.py", "tune -n 2 search.py")) from None
