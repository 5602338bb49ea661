"""`tfdist monitor`. Little is imported until it is known what to do."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import click


@click.command(short_help="Watch a run: how far each process is, restarts, backups, remaining time.")
@click.argument("run", metavar="[JOB|FOLDER]", required=False)
@click.option("--once", is_flag=True, help="Print what is to be seen now, and end. So it is without a terminal.")
def monitor(run: str | None, once: bool) -> None:
    """Watch a run of `tfdist run` or a job of `tfdist submit` until it is over.

    FOLDER is where the run's logs are, as it says at its start; by default the newest one in tfdist-logs. The run does
    not notice: everything is from its event log. Ctrl-C ends the view, and leaves the run alone.
    """
    from rich.console import Console

    from tfdist.monitor.source import find
    from tfdist.monitor.watching import snapshot, watch
    from tfdist.submit.errors import SubmitError

    try:
        source = find(run, Path(), os.environ)
        console = Console()
        if once or not console.is_terminal:
            click.echo(snapshot(source))
            return
        with contextlib.suppress(KeyboardInterrupt):
            watch(source, console)
    except (SubmitError, OSError) as error:
        print(f"tfdist: {error}", file=sys.stderr)
        sys.exit(1)
