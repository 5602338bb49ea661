"""Slurm: sbatch, squeue, sacct or scontrol, scancel."""

from __future__ import annotations

import getpass
import math
import os
import re
import secrets
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import BinaryIO

from tfdist.atomic_files import write_atomically
from tfdist.cluster.foreign_text import cleaned
from tfdist.jobs.engine import show_file
from tfdist.jobs.record import Record, Records, discard
from tfdist.jobs.request import Request, SubmitError, UnansweredError, outside_of_jobs
from tfdist.jobs.slurm import states
from tfdist.jobs.slurm.script import CANCEL_SIGNAL, EXIT_CODE, JOB_ID, batch_script
from tfdist.jobs.status import (
    CANCELLED,
    FAILED,
    LOST,
    QUEUED,
    SUCCEEDED,
    Progress,
    Status,
    exit_in_words,
    last_progress,
)
from tfdist.jobs.unconfirmed import cannot_end, keep, kept_if_interrupted, unseen
from tfdist.supervision.events import last_events

_SCRIPT = "job.sh"
_SECONDS = 60
_GPUS = re.compile(r"\bgpu(?::[^:,()]+)?:(\d+)")
# Seconds between two calls of squeue: each asks Slurm's controller, which all users share.
_ASK_EVERY = 3.0


class SlurmEngine:
    """Hands jobs to sbatch.

    Args:
        records: all jobs.
    """

    def __init__(self, records: Records) -> None:
        self._records = records

    def dry_run(self, request: Request) -> str:
        """The batch script, with a word in place of the secret."""
        return _script(request, self._records.folder / "FOLDER", "SECRET")

    def submit(self, request: Request) -> Record:
        """Writes the script and hands it to sbatch.

        The record is written first, and gets Slurm's number of the job afterwards: whatever happens in between, no job
        runs of which nobody here knows.
        """
        _find("sbatch")
        folder = self._records.make_folder(request.name)
        path, record = folder / _SCRIPT, None
        try:
            write_atomically(path, _script(request, folder, secrets.token_hex(32)), mode=0o600)
            wanted = f"unconfirmed-{folder.name.rpartition('-')[2]}"
            record = self._records.add(request, folder, wanted, job=None, cluster=None, grace=request.grace)
            with kept_if_interrupted(self._records, record):
                job, _, cluster = run("sbatch", "--parsable", str(path)).strip().partition(";")
        except UnansweredError as error:
            assert record is not None
            raise SubmitError(f"{error}. {keep(self._records, record)}") from None
        except (SubmitError, OSError):
            path.unlink(missing_ok=True)
            if record is None:
                discard(folder)
            else:
                self._records.remove(record)
            raise
        try:
            return self._records.rename(record, job, job=job, cluster=cluster)
        except (SubmitError, OSError) as error:
            if attempt("scancel", *([f"--clusters={cluster}"] if cluster else []), job).returncode:
                raise SubmitError(f"{error}. The job {job} could not be cancelled; it is kept as {record.id}") from None
            raise SubmitError(f"{error}. The job {job} was cancelled, because its record cannot be written") from None

    def status(self, record: Record) -> Status:
        """The state by squeue; of a job that is over by sacct, scontrol or the file that the script has written."""
        if record.final is not None:
            return record.final
        record = self._with_number(record)
        if record.details["job"] is None:
            look = shlex.join(["squeue", f"--user={getpass.getuser()}", f"--name={record.name}"])
            return unseen(self._records, record, "sbatch", "Slurm has no job of this script in its queue", look)
        if (found := self._in_queue(record)) is not None:
            return found
        # A job that has left the queue is not requeued any more.
        found = self._in_past(record) or _from_script(record)
        if record.details.get("cancelled") and found.is_over and found.state != SUCCEEDED:
            found = Status(CANCELLED, "", found.started, found.ended)
        if found.is_over and found.state != LOST:
            self._records.remember(record, found)
        return found

    def progress(self, record: Record) -> Progress | None:
        """The progress in the chief's event log."""
        return last_progress(last_events(record.event_log))

    def logs(self, record: Record, to: BinaryIO, follow: bool) -> None:
        """The output of the script and of all tasks, whose lines begin with the task's number."""
        show_file(record.output, to, (lambda: self.status(record).is_over) if follow else None, _ASK_EVERY)

    def cancel(self, record: Record) -> str:
        """Ends a waiting job; tells the script of a running job to stop it. A second call ends it at once."""
        record = self._with_number(record)
        before = self.status(record)
        if before.is_over:
            return f"{record.id}: is over already, {before}"
        if record.details["job"] is None:
            raise cannot_end(record, before)
        job = [*_cluster(record), record.details["job"]]
        self._records.update(record.id, lambda now: now.with_details(cancelled=True))
        if before.state != QUEUED and not record.details.get("cancelled"):
            run("scancel", "--batch", f"--signal={CANCEL_SIGNAL}", *job)
            return f"{record.id}: gets SIGTERM, and has {record.details['grace']} s to save its state"
        run("scancel", *job)
        return f"{record.id}: cancelled"

    def _with_number(self, record: Record) -> Record:
        """The record with Slurm's number of the job, which sbatch may not have told; None if there is none."""
        if record.details["job"] is not None:
            return record
        try:
            job = Path(record.folder, JOB_ID).read_text().strip()
        except OSError:
            job = ""
        if not job:
            own = cleaned(Path(record.folder, _SCRIPT))
            queue = run("squeue", f"--user={getpass.getuser()}", "--noheader", "--format=%i|%o").splitlines()
            job = next((number for number, _, script in (line.partition("|") for line in queue) if script == own), "")
        if not job:
            return record
        return self._records.update(record.id, lambda now: now.with_details(job=job, cluster=""))

    def _in_queue(self, record: Record) -> Status | None:
        job, cluster = record.details["job"], _cluster(record)
        queue = attempt("squeue", *cluster, "--noheader", "--format=%T|%r|%S", f"--jobs={job}")
        # "Invalid job id" means that the job ended a while ago.
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


def run(*words: str) -> str:
    """Runs a command, and returns its output.

    Raises:
        SubmitError: the command is not installed, fails, or does not answer.
    """
    answer = attempt(*words)
    if answer.returncode != 0:
        said = (answer.stderr or answer.stdout).strip() or f"exit code {answer.returncode}"
        # Of sbatch's own: the controller may have taken the job.
        kind = UnansweredError if "timed out" in said else SubmitError
        raise kind(f"Received: from {' '.join(words[:2])}: {said}. Expected: that Slurm accepts it; see above why")
    return answer.stdout


def attempt(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs a command that may fail. What it says holds names and texts of others: its lines come without control
    characters.

    Raises:
        SubmitError: the command is not installed, or does not answer.
    """
    _find(words[0])
    options = {"capture_output": True, "text": True, "errors": "surrogateescape", "stdin": subprocess.DEVNULL}
    # sbatch gives a job its own environment.
    options["env"] = outside_of_jobs(os.environ)
    try:
        answer = subprocess.run(words, timeout=_SECONDS, **options)
    except subprocess.TimeoutExpired:
        raise UnansweredError(
            f"Received: no answer from {words[0]} within {_SECONDS} s. Expected: that Slurm's controller is reachable; "
            "`scontrol ping` shows whether it is"
        ) from None
    texts = ("\n".join(map(cleaned, text.split("\n"))) for text in (answer.stdout, answer.stderr))
    return subprocess.CompletedProcess(words, answer.returncode, *texts)


def _find(command: str) -> None:
    if shutil.which(command) is None:
        raise SubmitError(
            f"Received: no command {command} on the PATH. Expected: Slurm's commands; submit where they are, usually "
            "on a login node, or use another --scheduler"
        )


def nodes_for(request: Request) -> int:
    """The smallest number of nodes on which all processes fit; 1 if there is no Slurm to ask.

    Example:
        >>> from tfdist.launcher.arguments import Target
        >>> nodes_for(Request("slurm", Target("script", ("train.py",)), workers=2))  # doctest: +SKIP
        1
    """
    if shutil.which("sinfo") is None:
        return 1
    partition = os.environ.get("SBATCH_PARTITION")
    listing = run(
        "sinfo", "--noheader", "--Node", "--format=%c|%G", *([f"--partition={partition}"] if partition else [])
    )
    return fewest_nodes(request, listing)


def fewest_nodes(request: Request, listing: str) -> int:
    """The same from the output of sinfo, which has cores and generic resources of each node.

    Example:
        >>> from tfdist.launcher.arguments import Target
        >>> request = Request("slurm", Target("script", ("train.py",)), workers=8, gpus_per_worker=1)
        >>> fewest_nodes(request, "16|gpu:a100:4(S:0-1)\\n16|(null)\\n")
        2
    """
    nodes = [line.partition("|") for line in listing.splitlines() if line.strip()]
    cores = max((int(re.sub(r"\D", "", first) or 0) for first, _, _ in nodes), default=0)
    gpus = max((sum(map(int, _GPUS.findall(last))) for _, _, last in nodes), default=0)
    needed = 1
    for each, most in ((request.cpus_per_worker or 1, cores), (request.gpus_per_worker or 0, gpus)):
        if each and most >= each:
            needed = max(needed, math.ceil(request.tasks / (most // each)))
    return needed
