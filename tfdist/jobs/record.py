"""The records of submitted jobs: a folder for each, with its record, script, output and events."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import json
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfdist.atomic_files import write_atomically
from tfdist.cluster.foreign_text import whole_number
from tfdist.jobs.request import Request, SubmitError
from tfdist.jobs.status import Status
from tfdist.json_schema import NOTHING, check, is_time, read_json
from tfdist.supervision.events import FILE_NAME

VARIABLE = "TFDIST_JOBS_DIR"
_DEFAULT = Path(".local", "state", "tfdist", "jobs")
_FILE = "job.json"
# What has to be in a record: a file may have lost its content, or be of another version.
_TEXT, _TIME = (str, NOTHING), (is_time, NOTHING)
_STATUS = {"state": str, "detail?": str, "started?": _TIME, "ended?": _TIME}
_DETAILS: dict[str, dict[str, Any]] = {
    "local": {"host": str, "process": ({"pid": int, "start": int, "boot": str}, NOTHING)},
    "slurm": {"job": _TEXT, "cluster": _TEXT},
    "kubernetes": {"job": str, "namespace": str, "context": _TEXT},
}
_OF_ALL = {"grace": float, "cancelled?": bool, "final?": (_STATUS, NOTHING)}
_RECORD: dict[str, Any] = {
    **{"id": str, "name": str, "submitted": is_time, "program": [str], "workers": int, "ps": int},
    **{"scheduler": lambda value: isinstance(value, str) and value in _DETAILS, "details": dict},
}


@dataclass(frozen=True)
class Record:
    """One job.

    Attributes:
        id: how users refer to it, such as "slurm-3".
        scheduler: what runs it.
        name: as the user has chosen it.
        submitted: when, in seconds since 1970.
        folder: of the job's record, script, output and events.
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
        folder: of the jobs; it is made when the first job is submitted.

    Example:
        >>> Records(Path("/nowhere")).all()
        ([], [])
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of_user(cls, env: Mapping[str, str]) -> Records:
        """The jobs in TFDIST_JOBS_DIR, or in the default folder below the home folder."""
        return cls(Path(env.get(VARIABLE) or Path.home() / _DEFAULT).absolute())

    def add(self, request: Request, **details: Any) -> Record:
        """Records a new job, and makes its folder. Other users cannot read it: scripts and environments hold secrets.

        Args:
            request: what was asked for.
            **details: for the engine.

        Raises:
            OSError: the folder cannot be made or written to.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = self._new_folder(request.scheduler)
        what = (request.name, time.time(), str(folder), list(request.target.typed), request.workers, request.ps)
        record = Record(folder.name, request.scheduler, *what, details)
        try:
            (folder / "logs").mkdir()
            self._save(record)
        except OSError:
            self.remove(record)
            raise
        return record

    def _new_folder(self, scheduler: str) -> Path:
        """A new folder, named by the next number that no other process has taken."""
        names = (path.name.removeprefix(f"{scheduler}-") for path in self.folder.glob(f"{scheduler}-*"))
        for number in itertools.count(max((whole_number(name) or 0 for name in names), default=0) + 1):
            folder = self.folder / f"{scheduler}-{number}"
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
                return folder
        raise AssertionError

    def _save(self, record: Record) -> None:
        """Writes a record. Other processes see the old or the new one, never a part."""
        content = dataclasses.asdict(record)
        del content["folder"]
        write_atomically(Path(record.folder, _FILE), json.dumps(content, indent=1), mode=0o600, durable=True)

    def load(self, job: str) -> Record:
        """The record of the job with this id.

        Raises:
            SubmitError: there is no such job, or its record is damaged.
        """
        path = self.folder / job / _FILE
        if not re.fullmatch(r"[a-z]+-\d+", job) or not path.is_file():
            raise SubmitError(
                f"Received: job {job!r}, which is not in {self.folder}. Expected: one that `tfdist status` lists; "
                f"{VARIABLE} names another folder"
            )
        try:
            return _read(path)
        except ValueError as error:
            raise SubmitError(f"Received: {path}: {error}. Expected: the record of a job") from None

    def all(self) -> tuple[list[Record], list[str]]:
        """The records that can be read, the oldest first; and what keeps each other one from being read."""
        found, problems = [], []
        for path in sorted(self.folder.glob(f"*/{_FILE}")):
            try:
                found.append(_read(path))
            except FileNotFoundError:
                continue  # removed meanwhile
            except (OSError, ValueError) as error:
                problems.append(f"{path} is left alone: {error}")
        return sorted(found, key=lambda record: record.submitted), problems

    def update(self, job: str, /, **details: Any) -> Record:
        """Changes details of a record; other processes that do wait for it."""
        # On NFS, only a file that can be written to can be locked.
        with open(self.folder / job / ".lock", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            old = self.load(job)
            self._save(record := dataclasses.replace(old, details={**old.details, **details}))
        return record

    def remove(self, record: Record) -> None:
        """Forgets a job that does not exist."""
        shutil.rmtree(record.folder, ignore_errors=True)


def _read(path: Path) -> Record:
    """Raises ValueError, with what is wrong, for a file that is no whole record of this version."""
    content = read_json(path.read_bytes(), _RECORD)
    check(content["details"], {**_OF_ALL, **_DETAILS[content["scheduler"]]})
    if content["id"] != path.parent.name:
        raise ValueError(f"it is not that of {path.parent.name}")
    return Record(folder=str(path.parent), **content)
