"""Slurm: sbatch, scontrol, sacct and scancel, and what they say about a job.

References:
    https://slurm.schedmd.com/job_reason_codes.html
"""

from __future__ import annotations

import getpass
import os
import re
import secrets
import subprocess
from datetime import datetime
from pathlib import Path

from tfdist.atomic_files import write_atomically
from tfdist.cluster.foreign_text import cleaned
from tfdist.jobs.engine import Engine, answer
from tfdist.jobs.record import Record
from tfdist.jobs.request import Request, SubmitError, UnansweredError
from tfdist.jobs.slurm_script import CANCEL_SIGNAL, EXIT_CODE, JOB_ID, batch_script
from tfdist.jobs.status import CANCELLED, FAILED, LOST, QUEUED, RUNNING, SUCCEEDED, Status, exit_in_words

_STATES = {
    **dict.fromkeys(("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"), QUEUED),
    **dict.fromkeys(("CONFIGURING", "RUNNING", "COMPLETING", "RESIZING"), RUNNING),
    **dict.fromkeys(("SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT"), RUNNING),
    "COMPLETED": SUCCEEDED,
    "CANCELLED": CANCELLED,
    "REVOKED": CANCELLED,
}
_QUIET = ("None", "RUNNING", "PENDING", "COMPLETED", "CANCELLED", "")
_NEVER = "it will not start as it is: cancel it, and submit it with other options"
_REASONS = {
    "BadConstraints": f"no node has what it asks for; {_NEVER}",
    "Dependency": "another job has to end first",
    "DependencyNeverSatisfied": f"the job that it waits for has failed; {_NEVER}",
    "JobArrayTaskLimit": "as many tasks of its array run as may",
    "JobHeldAdmin": "an administrator holds it back",
    "JobHeldUser": "held back by its user: `scontrol release` lets it go",
    "Licenses": "waits for a licence",
    "NodeDown": "a node that it needs is down",
    "PartitionConfig": (
        "it asks for more cores, memory, GPUs or nodes than its partition has or allows (`scontrol show partition`, "
        f"`sinfo -N -l`); {_NEVER}"
    ),
    "PartitionDown": "its partition starts no jobs at present",
    "PartitionInactive": "its partition starts no jobs at present",
    "PartitionNodeLimit": f"it asks for more nodes than a job may have in its partition; {_NEVER}",
    "PartitionTimeLimit": f"it asks for more time than a job may have in its partition (--time); {_NEVER}",
    "Priority": "jobs that are more urgent, or waited longer, come first",
    "ReqNodeNotAvail": "a node that it needs is down, drained or reserved: `sinfo -R` shows why",
    "Reservation": "waits for its reservation to begin",
    "Resources": "waits until enough nodes are free",
    "SchedDefer": "waits for Slurm's next look at the queue",
}
_FAMILIES = (
    ("Invalid", f"Slurm does not know it, or does not allow it; {_NEVER}"),
    ("Account", f"the account may not use this partition; {_NEVER}"),
    ("QOS", "a limit of its quality of service is reached: `sacctmgr show qos`; it waits for other jobs of it to end"),
    ("Max", "a limit of its account or user is reached: `sacctmgr show assoc`; it waits for other jobs of it to end"),
    ("Assoc", "a limit of its account or user is reached: `sacctmgr show assoc`; it waits for other jobs of it to end"),
)


class SlurmEngine(Engine):
    """Hands jobs to sbatch."""

    # Each look asks Slurm's controller, which all users share.
    looks_every = 3.0

    def dry_run(self, request: Request) -> str:
        """The batch script, with a word in place of the secret."""
        return batch_script(request, self.records.folder / "FOLDER", os.getcwd(), "SECRET")

    def submit(self, request: Request) -> Record:
        """Writes the script and hands it to sbatch. The record gets Slurm's number of the job afterwards."""
        with self._recorded(request, job=None, cluster=None, grace=request.grace) as record:
            path = Path(record.folder, "job.sh")
            script = batch_script(request, path.parent, os.getcwd(), secrets.token_hex(32))
            write_atomically(path, script, mode=0o600)
            job, _, cluster = run("sbatch", "--parsable", str(path)).strip().partition(";")
        return self.records.update(record.id, job=job, cluster=cluster)

    def _ask(self, record: Record) -> Status:
        """The state by scontrol; of a job that ended long ago by sacct, or the file that the script has written."""
        job = record.details["job"]
        if job is None:
            # sbatch has not said it, or nobody was there any more to hear it.
            number = Path(record.folder, JOB_ID)
            job = number.read_text().strip() if number.exists() else ""
            if not job:
                look = f"squeue --user={getpass.getuser()} --name={record.name}"
                return Status(
                    LOST, f"sbatch has not answered, and no such job has started: `{look}` shows one that waits"
                )
            record = self.records.update(record.id, job=job, cluster="")
        # It knows a job for some minutes after its end, too.
        now = attempt("scontrol", *_cluster(record), "--oneliner", "show", "job", job)
        if now.returncode == 0:
            return from_scontrol(now.stdout)
        if "nvalid job id" not in now.stderr:
            raise SubmitError(f"Received: from scontrol: {now.stderr.strip()}. Expected: that `scontrol ping` works")
        fields = ("--noheader", "--parsable2", "--allocations", "--format=State,ExitCode,Start,End", f"--jobs={job}")
        past = attempt("sacct", *_cluster(record), *fields)
        return (from_sacct(past.stdout) if past.returncode == 0 else None) or _from_script(record)

    def _end(self, record: Record, now: Status, again: bool) -> str:
        """Ends a waiting job; tells the script of a running job to stop it."""
        job = [*_cluster(record), record.details["job"]]
        if now.state != QUEUED and not again:
            run("scancel", "--batch", f"--signal={CANCEL_SIGNAL}", *job)
            return f"gets SIGTERM, and has {record.details['grace']} s to save its state"
        run("scancel", *job)
        return "cancelled"


def _cluster(record: Record) -> list[str]:
    return [f"--clusters={record.details['cluster']}"] if record.details["cluster"] else []


def _from_script(record: Record) -> Status:
    path = Path(record.folder, EXIT_CODE)
    try:
        code, ended = int(path.read_text()), path.stat().st_mtime
    except (OSError, ValueError):
        return Status(LOST, f"Slurm does not know job {record.details['job']}, and its script has not ended")
    return Status(SUCCEEDED, ended=ended) if code == 0 else Status(FAILED, exit_in_words(code), ended=ended)


def run(*words: str) -> str:
    """Runs a command, and returns its output.

    Raises:
        SubmitError: the command is not installed, fails, or does not answer.
    """
    done = attempt(*words)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        # This is sbatch's own timeout: the controller may have taken the job.
        kind = UnansweredError if "timed out" in said else SubmitError
        raise kind(f"Received: from {' '.join(words[:2])}: {said}. Expected: that Slurm accepts it")
    return done.stdout


def attempt(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs a command that may fail. Names and texts of others that it prints come without control characters."""
    done = answer(list(words))
    texts = ("\n".join(map(cleaned, text.split("\n"))) for text in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(words, done.returncode, *texts)


def from_scontrol(text: str) -> Status:
    """Reads `scontrol --oneliner show job`.

    Example:
        >>> str(from_scontrol("JobId=7 JobState=PENDING Reason=Resources ExitCode=0:0 StartTime=Unknown"))
        'queued: Resources (waits until enough nodes are free)'
    """
    fields = {"Reason": "", "StartTime": "", "EndTime": "", "ExitCode": "", **dict(re.findall(r"(\w+)=(\S*)", text))}
    return _status(fields["JobState"], fields["ExitCode"], fields["StartTime"], fields["EndTime"], fields["Reason"])


def from_sacct(text: str) -> Status | None:
    """Reads `sacct --parsable2 --format=State,ExitCode,Start,End`; None if the job is not there.

    Example:
        >>> from_sacct("FAILED|3:0|2026-11-22T10:00:00|2026-11-22T10:01:00").detail
        'exit code 3'
    """
    if not text.strip():
        return None
    # A requeued job has a line for each run.
    state, code, start, end = text.strip().splitlines()[-1].split("|")
    return _status(state.partition(" ")[0], code, start, end)


def _status(state: str, code: str, start: str, end: str, reason: str = "") -> Status:
    """The state of a job that Slurm calls so; what it says of the reason counts until the job is over."""
    own = _STATES.get(state, FAILED)
    if own in (QUEUED, RUNNING):
        end, detail = "", reason_in_words(reason, start) if own == QUEUED else reason
    else:
        detail = "" if own in (SUCCEEDED, CANCELLED) else _exit(code)
    words = [] if state in (*_QUIET, "FAILED") else [state.lower().replace("_", " ")]
    words += [] if detail in _QUIET else [detail]
    return Status(own, ", ".join(words), None if own == QUEUED else _time(start), _time(end))


def _exit(text: str) -> str:
    """Slurm's exit code and signal, in words."""
    code, _, signal = text.partition(":")
    if signal not in ("", "0"):
        return f"signal {signal}"
    return exit_in_words(int(code)) if code not in ("", "0") else ""


def _time(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def reason_in_words(reason: str, start: str) -> str:
    """Why a job waits, with an explanation if the reason is a known one.

    Args:
        reason: as squeue prints it.
        start: when the job may or will start, as squeue prints it.

    Example:
        >>> reason_in_words("Resources", "N/A")
        'Resources (waits until enough nodes are free)'
        >>> reason_in_words("BeginTime", "2026-11-22T12:33:25")
        'BeginTime (not before 2026-11-22 12:33:25)'
    """
    name = re.split(r"[^A-Za-z]", reason, maxsplit=1)[0]
    words = _REASONS.get(name) or next((text for family, text in _FAMILIES if name.startswith(family)), "")
    if name == "BeginTime":
        words = f"not before {start.replace('T', ' ')}" if start[:1].isdigit() else "not before its time of begin"
    return f"{reason} ({words})" if words else reason
