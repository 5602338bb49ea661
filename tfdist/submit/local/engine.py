"""The queue on this machine, as an engine."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import BinaryIO

from tfdist.launch.machine import usable_cores
from tfdist.submit import output
from tfdist.submit.errors import SubmitError
from tfdist.submit.local.attempt import BY_USER
from tfdist.submit.local.begin import COMMAND, beginning_of
from tfdist.submit.local.runner import active, ensure_runner
from tfdist.submit.progress import Progress, last_lines, last_progress
from tfdist.submit.record import Record, Records, write_privately
from tfdist.submit.request import Request
from tfdist.submit.status import CANCELLED, QUEUED, RUNNING, Status
from tfdist.supervision.events import FILE_NAME
from tfdist.supervision.events import VARIABLE as EVENT_LOG

PARALLEL_JOBS = "TFDIST_LOCAL_JOBS"
# How long the runner may take to write down what it has found.
_PATIENCE = 3.0


class LocalEngine:
    """Puts jobs into the queue; a runner takes them out of it.

    Args:
        records: all jobs.
    """

    def __init__(self, records: Records) -> None:
        self._records = records

    def dry_run(self, request: Request) -> str:
        """The command that would be run."""
        _check(request)
        return shlex.join(run_command(request, Path("FOLDER"))) + "\n"

    def submit(self, request: Request) -> Record:
        """Puts a job at the end of the queue."""
        _check(request)
        parallel = _parallel_jobs()
        folder = self._records.make_folder(request.name)
        command = {
            "words": run_command(request, folder),
            "folder": os.getcwd(),
            "env": {**os.environ, **request.env, EVENT_LOG: str(folder / "logs" / FILE_NAME)},
            "cores": usable_cores(),
        }
        write_privately(folder / COMMAND, json.dumps(command))
        record = self._records.add(
            request,
            folder,
            state=QUEUED,
            attempt=1,
            time_limit=request.time_limit,
            grace=request.grace,
            parallel_jobs=parallel,
        )
        ensure_runner(self._records)
        return record

    def status(self, record: Record) -> Status:
        """What the runner has written down; a job whose process has vanished is given a moment for that."""
        ensure_runner(self._records)
        deadline = time.monotonic() + _PATIENCE
        while self._has_vanished(record) and time.monotonic() < deadline:
            time.sleep(0.05)
            record = self._records.load(record.id)
        details = record.details
        detail = details.get("detail", "")
        if details["state"] == RUNNING and details.get("stop"):
            detail = f"asked to stop ({details['stop']}), has {details['grace']} s to save"
        elif details["state"] == QUEUED and not detail:
            detail = self._waits_for(record)
        return Status(details["state"], detail, details.get("started"), details.get("ended"))

    def progress(self, record: Record) -> Progress | None:
        """From the chief's event log."""
        return last_progress(last_lines(record.event_log))

    def logs(self, record: Record, to: BinaryIO, follow: bool) -> None:
        """What `tfdist run` prints."""
        if follow:
            output.follow(record.output, to, lambda: self.status(self._records.load(record.id)).is_over)
        else:
            output.copy(record.output, to)

    def cancel(self, record: Record) -> str:
        """Takes a job out of the queue, or has the runner send it SIGTERM; a second one ends the grace."""

        before = record.details["state"]

        def change(now: Record) -> Record:
            nonlocal before
            before = now.details["state"]
            if now.details["state"] == QUEUED:
                return now.with_details(state=CANCELLED, detail="", ended=time.time())
            again = now.details.get("stop") == BY_USER
            return (
                now.with_details(stop=BY_USER, stopped=False, hurry=again) if now.details["state"] == RUNNING else now
            )

        now = self._records.update(record.id, change)
        ensure_runner(self._records)
        if now.details["state"] == RUNNING:
            if now.details["hurry"]:
                return f"{record.id}: is killed"
            return f"{record.id}: gets SIGTERM, and has {record.details['grace']} s to save its state"
        state = now.details["state"]
        return f"{record.id}: {state}" if before == QUEUED else f"{record.id}: is over already, {state}"

    def _has_vanished(self, record: Record) -> bool:
        if record.details["state"] != RUNNING:
            return False
        begun = beginning_of(Path(record.folder), record.details["attempt"])
        return begun is not None and not begun.process.is_alive

    def _waits_for(self, record: Record) -> str:
        before = sum(1 for other in active(self._records) if other.submitted < record.submitted)
        return f"{before} before it" if before else ""


def make(records: Records) -> LocalEngine:
    """The engine."""
    return LocalEngine(records)


def run_command(request: Request, folder: Path) -> list[str]:
    """The words of `tfdist run`.

    Args:
        request: what was asked for.
        folder: of the job.

    Example:
        >>> run_command(Request("local", Target("script", ("train.py",))), Path("/jobs/1"))[3:6]
        ['run', '-n', '2']
    """
    options: dict[str, object] = {"-n": request.workers, "--ps": request.ps, "--grace": request.grace}
    options["--max-restarts"] = request.max_restarts
    options["--log-dir"] = folder / "logs"
    options["--cpus-per-worker"] = request.cpus_per_worker or "auto"
    options["--gpus-per-worker"] = "auto" if request.gpus_per_worker is None else request.gpus_per_worker
    words = [str(word) for option in options.items() for word in option]
    return [sys.executable, "-m", "tfdist", "run", *words, *request.target.typed]


def _check(request: Request) -> None:
    try:
        request.target.command()
    except ValueError as error:
        raise SubmitError(str(error)) from None


def _parallel_jobs() -> int:
    text = os.environ.get(PARALLEL_JOBS, "1")
    if not text.isdigit() or int(text) < 1:
        raise SubmitError(f"Received: {PARALLEL_JOBS}={text!r}. Expected: how many jobs may run at once, 1 or more")
    return int(text)
