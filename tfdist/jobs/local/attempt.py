"""An attempt of a local job: a process that says who it is and becomes `tfdist run`, and how it ended.

    python -m tfdist.jobs.local.attempt FOLDER ATTEMPT PLACE PLACES

The process writes down its own identity, once for each attempt: there is no moment at which it runs and nobody knows
it. If a runner is killed after it has started an attempt, the next runner may start the same attempt again; then the
second process ends at once.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from tfdist.atomic_files import sync
from tfdist.cluster.gpus import visible_gpus
from tfdist.jobs.record import Record
from tfdist.jobs.status import CANCELLED, FAILED, LAST_EVENTS, LOST, QUEUED, SUCCEEDED, Status, exit_in_words
from tfdist.supervision.events import FILE_NAME, events_in
from tfdist.supervision.exit_codes import PREEMPTED, UNSAVED
from tfdist.supervision.identity import Identity

# Exit code of a process whose attempt another process has begun already.
BEGUN_ALREADY = 75
COMMAND = "command.json"
# Why a job was stopped: `details["stop"]` of its record.
BY_USER = "cancelled"
BY_TIME = "time limit"
# An attempt that is preempted within so many seconds is started again after so many.
_SHORT_LIFE, _DELAY = 30.0, 3.0
_UNKNOWN = "its process vanished without a word: killed, or the machine was switched off"
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Beginning:
    """The process of an attempt, and how long the job's event log was when it began."""

    process: Identity
    position: int = 0


# Of an attempt whose file cannot be read, as after a power failure: no process has this id.
_NOBODY = Beginning(Identity(0, 0, ""))


def beginning_of(folder: Path, attempt: int) -> Beginning | None:
    """What the process of an attempt has written down; None if it has not begun.

    Raises:
        OSError: it cannot be read now.
    """
    try:
        content = json.loads(_path(folder, attempt).read_bytes())
        process, position = content["process"], content.get("position", 0)
        numbers = (process["pid"], process["start"], position)
        if all(type(number) is int and 0 <= number < 1 << 63 for number in numbers) and type(process["boot"]) is str:
            return Beginning(Identity(process["pid"], process["start"], process["boot"]), position)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    return _NOBODY


def share(items: Sequence[_Item], place: int, places: int) -> Sequence[_Item]:
    """The cores or GPUs of one of several jobs that run at the same time; all of them if there are fewer than jobs.

    Example:
        >>> share([0, 1, 2, 3], place=1, places=2), share([0], place=1, places=2)
        ([2, 3], [0])
    """
    if len(items) < places:
        return items
    return items[len(items) * place // places : len(items) * (place + 1) // places]


def outcome(code: int | None, stop: str | None) -> Status:
    """The state of a job after an attempt has ended.

    Args:
        code: exit code of `tfdist run`, negative for a signal; None if it is not known.
        stop: why the attempt was asked to stop; None if it was not.

    Example:
        >>> outcome(77, stop=None).state, outcome(77, stop="cancelled").state, outcome(1, stop=None).detail
        ('queued', 'cancelled', 'exit code 1')
    """
    if code == 0:
        return Status(SUCCEEDED)
    unsaved = exit_in_words(UNSAVED) if code == UNSAVED else ""
    if stop == BY_USER:
        return Status(CANCELLED, unsaved)
    if stop is not None:
        return Status(FAILED, f"{stop}; {unsaved}" if unsaved else stop)
    if code is None:
        return Status(LOST, _UNKNOWN)
    if code == PREEMPTED:
        return Status(QUEUED, "preempted, goes on from its last backup")
    return Status(FAILED, exit_in_words(code) if code > 0 else f"killed by signal {-code}")


def code_from_events(path: Path, position: int) -> int | None:
    """The exit code in the launcher's last event; None if it has not written one, because it was killed.

    Args:
        path: the event log.
        position: its length when the attempt began: an earlier attempt may have written to the same file. Times would
            not tell: the clock may have been set.
    """
    code = None
    try:
        with open(path, "rb") as file:
            file.seek(position if position <= os.fstat(file.fileno()).st_size else 0)
            events = events_in(file.read().decode(errors="replace"))
    except OSError:
        return None
    for event in events:
        exit_code = event.get("exit_code", 0)
        if event["name"] == "launcher" and event["event"] in LAST_EVENTS and isinstance(exit_code, int):
            code = exit_code
    return code


def after_end(record: Record, code: int | None, lived: float) -> Record:
    """The record of a job whose attempt has ended; a preempted job goes back into the queue.

    Args:
        record: of the job.
        code: as for `outcome`.
        lived: for how many seconds the attempt has run.
    """
    result = outcome(code, record.details.get("stop"))
    if result.state == QUEUED:
        # A program that is "preempted" each time right after its start must not be started all the time.
        due = _now() + (_DELAY if lived < _SHORT_LIFE else 0)
        return record.with_details(state=QUEUED, detail=result.detail, attempt=record.details["attempt"] + 1, due=due)
    return record.with_details(state=result.state, detail=result.detail, ended=time.time())


def is_due(record: Record) -> bool:
    """Whether a queued job may be started; one that was just preempted waits a moment, even if the machine restarts."""
    return not 0 < record.details.get("due", 0) - _now() <= _DELAY


def _now() -> float:
    """Seconds since the machine was started: setting its clock does not change them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def main() -> None:
    """Writes down that this process is the one of its attempt, and becomes `tfdist run`."""
    folder = Path(sys.argv[1])
    attempt, place, places = map(int, sys.argv[2:])
    own = Identity.of(os.getpid())
    assert own is not None
    path = _path(folder, attempt)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    temporary.write_text(json.dumps(asdict(Beginning(own, _size(folder / "logs" / FILE_NAME)))))
    sync(temporary)
    try:
        # Unlike a rename, this fails if the file exists: another process has begun this attempt.
        os.link(temporary, path)
    except FileExistsError:
        sys.exit(BEGUN_ALREADY)
    finally:
        temporary.unlink()
    sync(folder)
    try:
        command = json.loads((folder / COMMAND).read_text())
    except (OSError, ValueError) as error:
        sys.exit(
            f"tfdist: the job could not be started: {folder / COMMAND} cannot be read ({error}), as after a power "
            "failure. Submit the job again"
        )
    try:
        os.chdir(command["folder"])
        os.sched_setaffinity(0, share(command["cores"], place, places))
        gpus = visible_gpus(command["env"]) if places > 1 else ()
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(share(gpus, place, places))} if gpus else {}
        os.execve(command["words"][0], command["words"], {**command["env"], **visible})
    except OSError as error:
        sys.exit(
            f"tfdist: the job could not be started: {error}. It was submitted in {command['folder']}, with the Python "
            f"{command['words'][0]}: both must still be there"
        )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _path(folder: Path, attempt: int) -> Path:
    return folder / f"process-{attempt}.json"


if __name__ == "__main__":
    main()
