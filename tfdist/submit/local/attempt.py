"""One run of a local job: whether it still goes on, and how it ended."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from tfdist.submit.record import Record
from tfdist.submit.status import CANCELLED, FAILED, LOST, QUEUED, SUCCEEDED, exit_in_words
from tfdist.supervision.exit_codes import PREEMPTED

# Why a job was stopped, in its details under "stop".
BY_USER = "cancelled"
BY_TIME = "time limit"
# What the launcher writes as its last event.
_LAST = ("complete", "preempted", "gave-up", "interrupted")
_SHORT_LIFE, _DELAY = 30.0, 3.0
_UNKNOWN = "its process vanished without a word: killed, or the machine was switched off"


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended: the state of the job from now on, and why."""

    state: str
    detail: str = ""


def outcome(code: int | None, stop: str | None) -> Outcome:
    """Judges an attempt that has ended.

    Args:
        code: exit code of `tfdist run`, negative for a signal; None if nobody knows it.
        stop: why it was asked to stop, if it was.

    Example:
        >>> outcome(77, stop=None).state, outcome(77, stop="cancelled").state, outcome(1, stop=None).detail
        ('queued', 'cancelled', 'exit code 1')
    """
    if code == 0:
        return Outcome(SUCCEEDED)
    if stop == BY_USER:
        return Outcome(CANCELLED)
    if stop is not None:
        return Outcome(FAILED, stop)
    if code is None:
        return Outcome(LOST, _UNKNOWN)
    if code == PREEMPTED:
        return Outcome(QUEUED, "preempted, everything is saved")
    return Outcome(FAILED, exit_in_words(code) if code > 0 else f"killed by signal {-code}")


def code_from_events(path: Path, since: float) -> int | None:
    """The exit code that the launcher has written down; None if it could not, or its end was no regular one.

    Args:
        path: the event log.
        since: when the attempt began: an earlier one may have written to the same file.
    """
    code = None
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if event["name"] == "launcher" and event["event"] in _LAST and event["time"] >= since:
            code = int(event.get("exit_code", 0))
    return code


def after_end(record: Record, code: int | None) -> Record:
    """The record of a job whose attempt has ended; one that was preempted goes back into the queue."""
    result = outcome(code, record.details.get("stop"))
    if result.state == QUEUED:
        attempt, now = record.details["attempt"] + 1, time.time()
        # A program that always ends so must not keep the machine busy with starting it.
        due = now + (_DELAY if now - record.details["started"] < _SHORT_LIFE else 0)
        return record.with_details(state=QUEUED, detail=result.detail, attempt=attempt, due=due)
    return record.with_details(state=result.state, detail=result.detail, ended=time.time())
