"""The engine that puts jobs into the queue of this machine."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import BinaryIO

from tfdist.atomic_files import write_atomically
from tfdist.cluster.variables import AUTO
from tfdist.jobs.engine import show_file
from tfdist.jobs.local.attempt import BY_USER, COMMAND, beginning_of
from tfdist.jobs.local.runner import UNKNOWN_HOST, active, ensure_runner, host_of
from tfdist.jobs.record import Record, Records, discard
from tfdist.jobs.request import Request, SubmitError, outside_of_jobs
from tfdist.jobs.status import CANCELLED, QUEUED, RUNNING, Progress, Status, last_progress
from tfdist.launcher.machine import usable_cores
from tfdist.supervision.events import FILE_NAME, last_events
from tfdist.supervision.events import VARIABLE as EVENT_LOG
from tfdist.supervision.identity import shown_host, this_host

PARALLEL_JOBS = "TFDIST_LOCAL_JOBS"
# How many seconds the runner may take to record the end of a process.
_PATIENCE = 3.0
_WITHOUT_HOST = (
    ", because an older tfdist has recorded it. If no runner of that version works on it where it was submitted, "
    "cancel it, and submit it again"
)


class LocalEngine:
    """Puts jobs into the queue, from which a runner starts them.

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
            "env": {**outside_of_jobs(os.environ), **request.env, EVENT_LOG: str(folder / "logs" / FILE_NAME)},
            "cores": usable_cores(),
        }
        try:
            write_atomically(folder / COMMAND, json.dumps(command), mode=0o600, durable=True)
            record = self._records.add(
                request,
                folder,
                host=this_host(),
                state=QUEUED,
                attempt=1,
                time_limit=request.time_limit,
                grace=request.grace,
                parallel_jobs=parallel,
            )
        except (SubmitError, OSError):
            (folder / COMMAND).unlink(missing_ok=True)
            discard(folder)
            raise
        ensure_runner(self._records)
        return record

    def status(self, record: Record) -> Status:
        """From the job's record. If its process is gone, the runner gets a moment to record that."""
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
        if not _is_here(record) and details["state"] in (QUEUED, RUNNING):
            host = host_of(record)
            unknown = _WITHOUT_HOST if host == UNKNOWN_HOST else ""
            detail = "; ".join(filter(None, (detail, f"in the queue of {shown_host(host)}{unknown}")))
        return Status(details["state"], detail, details.get("started"), details.get("ended"))

    def progress(self, record: Record) -> Progress | None:
        """From the chief's event log."""
        return last_progress(last_events(record.event_log))

    def logs(self, record: Record, to: BinaryIO, follow: bool) -> None:
        """What `tfdist run` prints."""
        show_file(record.output, to, (lambda: self.status(self._records.load(record.id)).is_over) if follow else None)

    def cancel(self, record: Record) -> str:
        """Takes a job out of the queue, or lets the runner send it SIGTERM; a second call ends the grace period."""
        before = record.details["state"]

        def change(now: Record) -> Record:
            nonlocal before
            before = now.details["state"]
            if now.details["state"] == QUEUED:
                return now.with_details(state=CANCELLED, detail="", ended=time.time())
            if now.details["state"] != RUNNING:
                return now
            return now.with_details(stop=BY_USER, stopped=False, hurry=now.details.get("stop") == BY_USER)

        now = self._records.update(record.id, change)
        ensure_runner(self._records)
        state = now.details["state"]
        if state == RUNNING:
            there = "" if _is_here(now) else self._over_there(now)
            if now.details["hurry"]:
                return f"{record.id}: is killed{there}"
            return f"{record.id}: gets SIGTERM, and has {record.details['grace']} s to save its state{there}"
        return f"{record.id}: {state}" if before == QUEUED else f"{record.id}: is over already, {state}"

    def _over_there(self, record: Record) -> str:
        return (
            f", from the runner on {shown_host(host_of(record))}. If that host is gone for good, remove "
            f"{self._records.folder / record.id}.json to forget the job"
        )

    def _has_vanished(self, record: Record) -> bool:
        if record.details["state"] != RUNNING or not _is_here(record):
            return False
        begun = beginning_of(Path(record.folder), record.details["attempt"])
        return begun is not None and not begun.process.is_alive

    def _waits_for(self, record: Record) -> str:
        queue = [other.id for other in active(self._records, host_of(record))]
        before = queue.index(record.id) if record.id in queue else 0
        return f"{before} before it" if before else ""


def run_command(request: Request, folder: Path) -> list[str]:
    """The command line of `tfdist run` for a job with this folder.

    Example:
        >>> from tfdist.launcher.arguments import Target
        >>> run_command(Request("local", Target("script", ("train.py",))), Path("/jobs/1"))[3:6]
        ['run', '-n', '2']
    """
    options: dict[str, object] = {"-n": request.workers, "--ps": request.ps, "--grace": request.grace}
    if request.transport != AUTO:
        options["--transport"] = request.transport
    options["--max-restarts"] = request.max_restarts
    options["--log-dir"] = folder / "logs"
    options["--cpus-per-worker"] = request.cpus_per_worker or "auto"
    options["--gpus-per-worker"] = "auto" if request.gpus_per_worker is None else request.gpus_per_worker
    words = [str(word) for option in options.items() for word in option]
    return [sys.executable, "-m", "tfdist", "run", *words, *request.target.typed]


def _is_here(record: Record) -> bool:
    return host_of(record) == this_host()


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
