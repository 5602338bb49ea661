"""What Slurm says about a job, as a `Status`. Pure."""

from __future__ import annotations

import re
from datetime import datetime

from tfdist.submit.slurm.reasons import reason_in_words
from tfdist.submit.status import CANCELLED, FAILED, QUEUED, RUNNING, SUCCEEDED, Status, exit_in_words

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


def from_squeue(text: str) -> Status | None:
    """Reads `squeue --format=%T|%r|%S`; None if the job is not there.

    Example:
        >>> str(from_squeue("PENDING|Resources|N/A"))
        'queued: Resources (waits until enough nodes are free)'
    """
    # Of several clusters, each has its name above its jobs.
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
    # A job that was requeued has a line for each run.
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
