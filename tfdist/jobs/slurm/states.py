"""What Slurm says about a job, as a `Status`. Pure.

References:
    https://slurm.schedmd.com/job_reason_codes.html
"""

from __future__ import annotations

import re
from datetime import datetime

from tfdist.jobs.status import CANCELLED, FAILED, QUEUED, RUNNING, SUCCEEDED, Status, exit_in_words

_STATES = {
    **dict.fromkeys(("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"), QUEUED),
    **dict.fromkeys(
        ("CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT"), RUNNING
    ),
    **dict.fromkeys(("RESIZING",), RUNNING),
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


def from_squeue(text: str) -> Status | None:
    """Reads `squeue --format=%T|%r|%S`; None if the job is not there.

    Example:
        >>> str(from_squeue("PENDING|Resources|N/A"))
        'queued: Resources (waits until enough nodes are free)'
    """
    # With several clusters, a line with the cluster's name stands above its jobs.
    lines = [line for line in text.splitlines() if "|" in line]
    if not lines:
        return None
    state, reason, start = lines[0].strip().split("|")
    status = _status(state, reason, start, "")
    return Status(status.state, status.detail, status.started if status.state == RUNNING else None)


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
    return _status(state.partition(" ")[0], _exit(code), start, end)


def from_scontrol(text: str) -> Status | None:
    """Reads `scontrol --oneliner show job`; None if the job is not there.

    Example:
        >>> from_scontrol("JobId=7 JobState=FAILED Reason=NonZeroExitCode ExitCode=3:0 StartTime=Unknown").detail
        'exit code 3'
    """
    fields = dict(re.findall(r"(\w+)=(\S*)", text))
    if "JobState" not in fields:
        return None
    state = fields["JobState"]
    over = _STATES.get(state, FAILED) not in (QUEUED, RUNNING)
    detail = _exit(fields.get("ExitCode", "")) if over else fields.get("Reason", "")
    return _status(state, detail, fields.get("StartTime", ""), fields.get("EndTime", "") if over else "")


def _status(state: str, detail: str, start: str, end: str) -> Status:
    own = _STATES.get(state, FAILED)
    words = [] if state in (*_QUIET, "FAILED") else [state.lower().replace("_", " ")]
    if own == QUEUED and detail not in _QUIET:
        detail = reason_in_words(detail, start)
    words += [] if detail in _QUIET or own in (SUCCEEDED, CANCELLED) else [detail]
    return Status(own, ", ".join(words), _time(start), _time(end))


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
