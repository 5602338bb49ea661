"""The records of submitted jobs: a folder of JSON files, one for each job."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import re
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfdist.atomic_files import write_atomically
from tfdist.jobs.request import Request, SubmitError
from tfdist.jobs.status import OVER, QUEUED, RUNNING, Status
from tfdist.supervision.events import FILE_NAME

VARIABLE = "TFDIST_JOBS_DIR"
_DEFAULT = Path(".local", "state", "tfdist", "jobs")
# No time, and no number of anything, is as large.
_MOST = 1e11
_NUMBER, _NOTHING = (int, float), type(None)
# What has to be in a record, and of which type: a file may have lost its content, or be of another version.
_FIELDS: dict[str, Any] = {
    **{"id": str, "scheduler": str, "name": str, "submitted": _NUMBER, "folder": str, "program": list},
    **{"workers": int, "ps": int, "details": dict},
}
_DETAILS: dict[str, dict[str, Any]] = {
    "local": {
        **{"state": str, "attempt": int, "time_limit": (*_NUMBER, _NOTHING), "grace": _NUMBER, "parallel_jobs": int},
    },
    "slurm": {"job": (str, _NOTHING), "cluster": (str, _NOTHING), "grace": _NUMBER},
    "kubernetes": {"job": str, "namespace": str, "context": (str, _NOTHING), "grace": _NUMBER},
}
_RUNNING_DETAILS: dict[str, Any] = {"place": int, "places": int, "started": _NUMBER}
_STATUS = {"state": str, "detail": str, "started": (*_NUMBER, _NOTHING), "ended": (*_NUMBER, _NOTHING)}
_OPTIONAL = {
    **{"host": str, "stop": (str, _NOTHING), "due": _NUMBER, "uid": (str, _NOTHING), **_STATUS},
    **{"final": (dict, _NOTHING), "submission": str, "place": int, "places": int},
}


@dataclass(frozen=True)
class Record:
    """One job.

    Attributes:
        id: how users refer to it, such as "slurm-17".
        scheduler: what runs it.
        name: as the user has chosen it.
        submitted: when, in seconds since 1970.
        folder: of the job's script, output and events.
        program: the program with its arguments, as typed.
        workers: number of training processes.
        ps: number of parameter servers.
        details: further values, for the class that speaks to its scheduler.
    """

    id: str
    scheduler: str
    name: str
    submitted: float
    folder: str
    program: list[str]
    workers: int
    ps: int
    details: dict[str, Any] = field(default_factory=dict)

    def with_details(self, **changes: Any) -> Record:
        """A record with changed details."""
        return dataclasses.replace(self, details={**self.details, **changes})

    @property
    def final(self) -> Status | None:
        """How the job has ended, if that was recorded."""
        kept = self.details.get("final")
        return Status(**kept) if kept else None

    @property
    def output(self) -> Path:
        """The file of the job's output, if it goes to a file."""
        return Path(self.folder, "output.log")

    @property
    def event_log(self) -> Path:
        """The file of its events, if they go to a file."""
        return Path(self.folder, "logs", FILE_NAME)


class Records:
    """The jobs of this user.

    Args:
        folder: of the records; it is made when the first job is submitted.

    Example:
        >>> Records(Path("/nowhere")).all()
        []
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of_user(cls, env: Mapping[str, str]) -> Records:
        """The records in TFDIST_JOBS_DIR, or in the default folder below the home folder."""
        return cls(Path(env.get(VARIABLE) or Path.home() / _DEFAULT).absolute())

    def make_folder(self, name: str) -> Path:
        """Makes a folder for a job that other users cannot read: scripts and environments contain secrets.

        Raises:
            SubmitError: it cannot be made.
        """
        with self._usable():
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Adds random letters to the name, and makes the folder private.
            folder = Path(tempfile.mkdtemp(prefix=f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-", dir=self.folder))
            (folder / "logs").mkdir()
        return folder

    def add(self, request: Request, folder: Path, wanted: str | None = None, **details: Any) -> Record:
        """Records a new job.

        Args:
            request: what was asked for.
            folder: made by `make_folder`.
            wanted: the scheduler's own id; a number is added if there was such a job before. By default the job gets
                the next number.
            **details: for the engine.
        """
        with self.locked():
            taken = {path.stem for path in self.folder.glob("*.json")}
            own = new_id(request.scheduler, wanted, taken)
            program, now = list(request.target.typed), time.time()
            record = Record(
                own, request.scheduler, request.name, now, str(folder), program, request.workers, request.ps, details
            )
            self.save(record)
        return record

    def save(self, record: Record) -> None:
        """Writes a record. Other processes see the old or the new one, never a part."""
        path = self.folder / f"{record.id}.json"
        write_atomically(path, json.dumps(dataclasses.asdict(record), indent=1), mode=0o600, durable=True)

    def remember(self, record: Record, status: Status) -> None:
        """Records how a job has ended: its scheduler may forget that."""
        self.update(record.id, lambda now: now.with_details(final=dataclasses.asdict(status)))

    def load(self, job: str) -> Record:
        """The record of the job with this id.

        Raises:
            SubmitError: there is no such job, or its file is damaged.
        """
        path = self.folder / f"{job}.json"
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", job) or not path.is_file():
            known = [record.id for record in self.all()][-3:]
            some = f", such as {' or '.join(known)}" if known else ""
            raise SubmitError(
                f"Received: job {job!r}, of which nothing is known in {self.folder}. Expected: the id of a job{some}. "
                f"`tfdist status` lists them; {VARIABLE} names another folder"
            )
        try:
            return _read(path)
        except ValueError as error:
            raise SubmitError(
                f"Received: {path}, which is damaged or of another version: {error}. Expected: a record that "
                "`tfdist submit` has written. The scheduler still knows the job (sacct, kubectl); remove the file to "
                "forget it here"
            ) from None

    def all(self) -> list[Record]:
        """All records that can be read, in the order in which the jobs were submitted."""
        return self._read_all()[0]

    def unreadable(self) -> list[str]:
        """What keeps the other files from being read, a text for each. They stay where they are."""
        return self._read_all()[1]

    def remove(self, record: Record) -> None:
        """Removes the record of a job that does not exist, with its folder if nothing was written to it."""
        with self.locked():
            (self.folder / f"{record.id}.json").unlink(missing_ok=True)
        discard(Path(record.folder))

    def rename(self, record: Record, wanted: str, **details: Any) -> Record:
        """Gives a job that was recorded before its scheduler knew it the scheduler's own id, and changes details."""
        with self.locked():
            taken = {path.stem for path in self.folder.glob("*.json")}
            renamed = dataclasses.replace(record, id=new_id(record.scheduler, wanted, taken)).with_details(**details)
            self.save(renamed)
            (self.folder / f"{record.id}.json").unlink(missing_ok=True)
        return renamed

    def _read_all(self) -> tuple[list[Record], list[str]]:
        found, problems = [], []
        for path in sorted(self.folder.glob("*.json")):
            try:
                found.append(_read(path))
            except FileNotFoundError:
                continue  # removed meanwhile
            except (OSError, ValueError) as error:
                problems.append(f"{path} is left alone: {error}")
        return sorted(found, key=lambda record: record.submitted), problems

    def update(self, job: str, change: Callable[[Record], Record]) -> Record:
        """Changes a record under the lock."""
        with self.locked():
            record = change(self.load(job))
            self.save(record)
        return record

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """A lock: while it is held, no other process changes a record."""
        with self._usable():
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Errors of the caller's block must not be reported as errors of this folder: it runs outside of `_usable`.
            file = open(self.folder / ".lock", "a")  # noqa: SIM115
        with file:
            with self._usable():
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        """Turns errors into a SubmitError that names the folder, and the variable that sets it."""
        try:
            yield
        except OSError as error:
            raise SubmitError(
                f"Received: {self.folder} as the folder of the jobs: {error.strerror}. Expected: one that you can "
                f"make and write to; set {VARIABLE}, or unset it for that in your home folder"
            ) from None


def new_id(scheduler: str, wanted: str | None, taken: Collection[str]) -> str:
    """An id that is not taken.

    Example:
        >>> new_id("local", None, {"local-1", "slurm-7"}), new_id("slurm", "7", {"local-1", "slurm-7"})
        ('local-2', 'slurm-7-2')
    """
    if wanted is None:
        numbers = [own.removeprefix(f"{scheduler}-") for own in taken if own.startswith(f"{scheduler}-")]
        return f"{scheduler}-{max((int(number) for number in numbers if number.isdigit()), default=0) + 1}"
    first = own = f"{scheduler}-{wanted}"
    number = 2
    while own in taken:
        own, number = f"{first}-{number}", number + 1
    return own


def discard(folder: Path) -> None:
    """Removes the folder of a job that was not submitted, unless something is in it."""
    with contextlib.suppress(OSError):
        (folder / "logs").rmdir()
        folder.rmdir()


def _read(path: Path) -> Record:
    """Raises ValueError, with what is wrong, for a file that is no whole record of this version."""
    text = path.read_text()
    if not text.strip("\0 \n"):
        raise ValueError("it is empty, as after a power failure")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON ({error})") from None
    _check(content, _FIELDS, exactly=True)
    details = content["details"]
    if content["id"] != path.stem or not all(isinstance(word, str) for word in content["program"]):
        raise ValueError(f"it is not that of {path.stem}")
    if content["scheduler"] not in _DETAILS:
        raise ValueError(f"its scheduler is {content['scheduler']!r}")
    _check(details, _DETAILS[content["scheduler"]])
    _check(details, {name: types for name, types in _OPTIONAL.items() if name in details})
    if (final := details.get("final")) is not None:
        _check(
            final, {name: types for name, types in _STATUS.items() if name in final or name == "state"}, exactly=True
        )
    if content["scheduler"] == "local":
        if details["state"] not in (QUEUED, RUNNING, *OVER):
            raise ValueError(f"its state is {details['state']!r}")
        _check(details, _RUNNING_DETAILS if details["state"] == RUNNING else {})
        if min(details["parallel_jobs"], details.get("places", 1)) < 1 or details.get("place", 0) < 0:
            raise ValueError("its place in the queue is no place")
    return Record(**content)


def _check(content: Any, expected: Mapping[str, Any], exactly: bool = False) -> None:
    """Raises ValueError unless the content is a mapping that has these keys, with values of these types."""
    if not isinstance(content, dict):
        raise ValueError(f"it has {type(content).__name__} where a mapping is expected")
    if exactly and content.keys() - expected.keys():
        raise ValueError(
            f"it has {', '.join(sorted(content.keys() - expected.keys()))}, which this version cannot read"
        )
    for name, types in expected.items():
        value = content.get(name)
        if name not in content or not isinstance(value, types) or isinstance(value, bool):
            raise ValueError(f"its {name} is {'missing' if name not in content else repr(value)[:60]}")
        if isinstance(value, (int, float)) and not abs(value) < _MOST:
            raise ValueError(f"its {name} is {value!r:.40}")
