"""Slurm as an engine: sbatch, squeue, sacct or scontrol, scancel."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import BinaryIO

from tfdist.submit import output
from tfdist.submit.errors import SubmitError
from tfdist.submit.progress import Progress, last_lines, last_progress
from tfdist.submit.record import Record, Records, write_privately
from tfdist.submit.request import Request
from tfdist.submit.slurm import states
from tfdist.submit.slurm.commands import attempt, nodes_for, run
from tfdist.submit.slurm.script import CANCEL_SIGNAL, EXIT_CODE, batch_script
from tfdist.submit.status import CANCELLED, FAILED, LOST, QUEUED, SUCCEEDED, Status, exit_in_words

# Each question is one to Slurm's controller, which all users share.
_ASK_EVERY = 3.0


class SlurmEngine:
    """Hands jobs to sbatch.

    Args:
        records: all jobs.
    """

    def __init__(self, records: Records) -> None:
        self._records = records

    def dry_run(self, request: Request) -> str:
        """The batch script, with another secret."""
        return _script(request, self._records.folder / "FOLDER", "SECRET")

    def submit(self, request: Request) -> Record:
        """Writes the script and hands it to sbatch."""
        folder = self._records.make_folder(request.name)
        path = folder / "job.sh"
        try:
            write_privately(path, _script(request, folder, secrets.token_hex(32)))
            job, _, cluster = run("sbatch", "--parsable", str(path)).strip().partition(";")
        except SubmitError:
            path.unlink(missing_ok=True)
            (folder / "logs").rmdir()
            folder.rmdir()
            raise
        return self._records.add(request, folder, job, job=job, cluster=cluster, grace=request.grace)

    def status(self, record: Record) -> Status:
        """From squeue; for jobs that are over from sacct, scontrol or what the script has written, whichever knows."""
        if record.final is not None:
            return record.final
        if (found := self._in_queue(record)) is not None:
            return found
        # What is no longer in the queue is not requeued any more.
        found = self._in_past(record) or _from_script(record)
        if record.details.get("cancelled") and found.is_over and found.state != SUCCEEDED:
            found = Status(CANCELLED, "", found.started, found.ended)
        if found.is_over and found.state != LOST:
            self._records.remember(record, found)
        return found

    def progress(self, record: Record) -> Progress | None:
        """From the chief's event log."""
        return last_progress(last_lines(record.event_log))

    def logs(self, record: Record, to: BinaryIO, follow: bool) -> None:
        """What the script and all tasks print, each line with the task's number."""
        if follow:
            output.follow(record.output, to, lambda: self.status(record).is_over, _ASK_EVERY)
        else:
            output.copy(record.output, to)

    def cancel(self, record: Record) -> str:
        """Ends a job that waits; asks the script of one that runs to stop it. A second one leaves no time for that."""
        job = [*_cluster(record), record.details["job"]]
        before = self.status(record)
        if before.is_over:
            return f"{record.id}: is over already, {before}"
        self._records.update(record.id, lambda now: now.with_details(cancelled=True))
        if before.state != QUEUED and not record.details.get("cancelled"):
            run("scancel", "--batch", f"--signal={CANCEL_SIGNAL}", *job)
            return f"{record.id}: gets SIGTERM, and has {record.details['grace']} s to save its state"
        run("scancel", *job)
        return f"{record.id}: cancelled"

    def _in_queue(self, record: Record) -> Status | None:
        job, cluster = record.details["job"], _cluster(record)
        queue = attempt("squeue", *cluster, "--noheader", "--format=%T|%r|%S", f"--jobs={job}")
        # "Invalid job id" means that it is over, or older than that.
        if queue.returncode != 0 and "nvalid job id" not in queue.stderr:
            raise SubmitError(
                f"Received: from squeue: {queue.stderr.strip()}. Expected: that Slurm's controller is reachable; "
                "`scontrol ping` shows whether it is"
            )
        return states.from_squeue(queue.stdout if queue.returncode == 0 else "")

    def _in_past(self, record: Record) -> Status | None:
        job, cluster = record.details["job"], _cluster(record)
        fields = "--format=State,ExitCode,Start,End"
        past = attempt("sacct", *cluster, "--noheader", "--parsable2", "--allocations", fields, f"--jobs={job}")
        if past.returncode == 0 and (found := states.from_sacct(past.stdout)) is not None:
            return found
        return states.from_scontrol(attempt("scontrol", *cluster, "--oneliner", "show", "job", job).stdout)


def make(records: Records) -> SlurmEngine:
    """The engine."""
    return SlurmEngine(records)


def _script(request: Request, folder: Path, token: str) -> str:
    try:
        return batch_script(request, folder, os.getcwd(), token, nodes_for(request) if request.pack else None)
    except ValueError as error:
        raise SubmitError(str(error)) from None


def _cluster(record: Record) -> list[str]:
    return [f"--clusters={record.details['cluster']}"] if record.details["cluster"] else []


def _from_script(record: Record) -> Status:
    path = Path(record.folder, EXIT_CODE)
    try:
        code, ended = int(path.read_text()), path.stat().st_mtime
    except (OSError, ValueError):
        return Status(
            LOST, f"Slurm knows nothing of job {record.details['job']} any more, and its script has not ended"
        )
    return Status(SUCCEEDED, ended=ended) if code == 0 else Status(FAILED, exit_in_words(code), ended=ended)
