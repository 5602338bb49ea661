"""`tfdist submit`, `status`, `logs`, `cancel`, `monitor` and `goodput`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from tfdist.jobs import SCHEDULERS
from tfdist.jobs.engine import engine_of, job_of
from tfdist.jobs.record import Record, Records
from tfdist.jobs.request import Request, SubmitError, seconds_of
from tfdist.jobs.status import RUNNING, Status
from tfdist.launcher.arguments import TARGET, TRANSPORT_OPTION, ScriptCommand, read_env, refused

_SHOWN = 20


def _read_volumes(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    volumes = {}
    for text in values:
        claim, separator, path = text.partition(":")
        if not claim or not separator or not path.startswith("/"):
            raise click.BadParameter(f"{text!r}: expected CLAIM:/PATH, for example --volume backups:/backups.")
        if claim in volumes:
            raise click.BadParameter(f"{text!r}: claim {claim} is at {volumes[claim]} already, expected each once.")
        volumes[claim] = path
    return volumes


@click.command(cls=ScriptCommand, short_help="Submit a script as a job: to this machine, Slurm or Kubernetes.")
@click.option(
    "--scheduler", type=click.Choice(SCHEDULERS), default="local", show_default=True, help="What runs the job."
)
@click.option("-n", "--workers", type=click.IntRange(min=1), default=2, show_default=True, help="Training processes.")
@click.option(
    "--ps",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Number of parameter servers; a chief is started as well, which drives the -n workers.",
)
@TRANSPORT_OPTION
@click.option("--cpus-per-worker", type=click.IntRange(min=1), metavar="K", help="Cores of each process.")
@click.option("--gpus-per-worker", type=click.IntRange(min=0), metavar="K", help="GPUs of each process.")
@click.option("--image", metavar="IMAGE", help="Kubernetes: container image with tfdist and the program.")
@click.option(
    "--volume",
    "volumes",
    multiple=True,
    metavar="CLAIM:/PATH",
    callback=_read_volumes,
    help="Kubernetes: mount a persistent volume claim, for data and backups (repeatable).",
)
@click.option("--name", default="", metavar="NAME", help="Name of the job.  [default: that of the script]")
@click.option(
    "--time",
    "time_limit",
    metavar="TIME",
    type=seconds_of,
    help="Slurm, Kubernetes: time limit of a run, such as 2h, 90m or 1d12h. On Slurm it is saved and requeued then.",
)
@click.option("--pack", is_flag=True, help="Keep the workers on as few hosts as possible.")
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="How often the training is started again after a failure.",
)
@click.option(
    "--grace",
    type=click.IntRange(min=1),
    default=60,
    show_default=True,
    help="Seconds between SIGTERM and SIGKILL, for the backup.",
)
@click.option("--env", multiple=True, metavar="KEY=VALUE", callback=read_env, help="Set a variable (repeatable).")
@click.option("--dry-run", is_flag=True, help="Print what the scheduler would be given, and do nothing.")
@click.pass_context
@refused(OSError)
def submit(ctx: click.Context, dry_run: bool, **options: Any) -> None:
    """Submit SCRIPT, unchanged, as a job, and print the job's id.

    SCRIPT is a Python file, -m MODULE, or -- COMMAND for any other program; all that follows it is passed to it. It
    goes on after a restart, and after a preemption, where tfdist.callbacks.BackupAndRestore has saved it.
    """
    request = Request(target=ctx.meta[TARGET], **options)
    engine = engine_of(request.scheduler, Records.of_user(os.environ))
    click.echo(engine.dry_run(request) if dry_run else engine.submit(request).id, nl=not dry_run)


@click.command(short_help="Show the state of a job, or list the last ones.")
@click.argument("job", required=False)
@click.option(
    "-a", "--all", "everything", is_flag=True, help=f"Without JOB: list all jobs, not only the last {_SHOWN}."
)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@refused(OSError)
def status(job: str | None, everything: bool, as_json: bool) -> None:
    """Show the state of a job, and epoch, step, loss and remaining time of its training.

    Without JOB, list the jobs that have been submitted here, the newest last, with their state.
    """
    if job is None:
        _show_all(Records.of_user(os.environ), everything, as_json)
    else:
        _show(job, as_json)


@click.command(short_help="Show the output of a job.")
@click.argument("job")
@click.option("-f", "--follow", is_flag=True, help="Until the job is over.")
@refused(OSError)
def logs(job: str, follow: bool) -> None:
    """Show what a job has printed; with -f, also what it prints from now on, until it is over."""
    with contextlib.suppress(KeyboardInterrupt):
        record, engine = job_of(job, os.environ)
        engine.logs(record, sys.stdout.buffer, follow)


@click.command(short_help="End a job.")
@click.argument("job")
@refused(OSError)
def cancel(job: str) -> None:
    """End a job: it gets SIGTERM and its grace, in which tfdist.callbacks.BackupAndRestore saves the training."""
    record, engine = job_of(job, os.environ)
    click.echo(engine.cancel(record))


@click.command(short_help="Watch a run: how far each process is, restarts, backups, remaining time.")
@click.argument("run", metavar="[JOB|FOLDER]", required=False)
@click.option("--once", is_flag=True, help="Print what is to be seen now, and end. So it is without a terminal.")
@refused(OSError)
def monitor(run: str | None, once: bool) -> None:
    """Watch a run of `tfdist run` or a job of `tfdist submit` until it is over.

    FOLDER is where the run's logs are, as it says at its start; by default the newest one in tfdist-logs. The run does
    not notice: everything is from its event log. Ctrl-C ends the view, and leaves the run alone.
    """
    # rich takes a while to import.
    from rich.console import Console

    from tfdist.jobs.monitor import Watch, find, watch, width
    from tfdist.plain_text import plain_text

    source, console = find(run, Path(), os.environ), Console()
    if once or not console.is_terminal:
        click.echo(plain_text(Watch(source).view(), width=width()))
    else:
        with contextlib.suppress(KeyboardInterrupt):
            watch(source, console)


@click.command(short_help="Show what the wall time of a run went into: steps, restarts, waiting for data, ...")
@click.argument("run", metavar="[JOB|FOLDER]", required=False)
@click.option("--per-failure", is_flag=True, help="Also what each failure, or other interruption, has cost.")
@click.option("--json", "as_json", is_flag=True, help="All of it as JSON.")
@refused(OSError)
def goodput(run: str | None, per_failure: bool, as_json: bool) -> None:
    """Show what the wall time of a run went into: each second belongs to one kind.

    FOLDER is where the run's logs are, as `tfdist run` says at its start; by default the newest one in tfdist-logs.
    docs/monitoring.md says what the kinds are. The run may still go on: it does not notice.
    """
    # rich takes a while to import.
    from tfdist.jobs.goodput import as_json as for_programs
    from tfdist.jobs.goodput import as_tables, read
    from tfdist.jobs.monitor import find, width
    from tfdist.plain_text import plain_text

    source = find(run, Path(), os.environ)
    found = (source.title, *read(source))
    if as_json:
        click.echo(json.dumps(for_programs(*found), indent=1))
    else:
        click.echo(plain_text(*as_tables(*found, per_failure), width=width()))


def _show(job: str, as_json: bool) -> None:
    record, engine = job_of(job, os.environ)
    now, progress = engine.status(record), None
    with contextlib.suppress(SubmitError):  # the state is known without the output
        progress = engine.progress(record)
    if as_json:
        more = {"progress": dataclasses.asdict(progress) if progress else None}
        click.echo(json.dumps({**_facts(record, now), **more}, indent=1))
        return
    click.echo(f"{record.id}  {record.name}  {now}")
    if progress is not None:
        click.echo(f"  {progress.shown(now.state == RUNNING)}")
    servers = f", {record.ps} parameter server{'s' if record.ps > 1 else ''}" if record.ps else ""
    click.echo(f"  {record.workers} worker{'s' if record.workers > 1 else ''}{servers}: {shlex.join(record.program)}")
    click.echo(f"  {record.folder}")
    if number := record.details.get("job"):
        click.echo(f"  {record.scheduler}'s job {number}")


def _show_all(records: Records, everything: bool, as_json: bool) -> None:
    known, problems = records.all()
    found = [(record, _status(records, record)) for record in known[0 if everything else -_SHOWN :]]
    for problem in problems:
        click.echo(f"tfdist: {problem}", err=True)
    if as_json:
        click.echo(json.dumps([_facts(record, status) for record, status in found], indent=1))
        return
    if not found:
        click.echo(f"no jobs in {records.folder}", err=True)
    width = max((len(record.id) for record, _ in found), default=0)
    names = max((len(record.name) for record, _ in found), default=0)
    for record, status in found:
        click.echo(f"{record.id:{width}}  {record.name:{names}}  {status}")


def _status(records: Records, record: Record) -> Status:
    """The status of a job. A scheduler that does not answer must not hide the jobs of the others."""
    try:
        return engine_of(record.scheduler, records).status(record)
    except (SubmitError, OSError) as error:
        return Status("unknown", str(error))


def _facts(record: Record, status: Status) -> dict[str, Any]:
    facts = {name: value for name, value in dataclasses.asdict(record).items() if name != "details"}
    return {**facts, "job": record.details.get("job"), **dataclasses.asdict(status)}
