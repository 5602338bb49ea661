"""What is known of a job that was submitted, and the folder of JSON files in which that is kept."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfdist.submit.errors import SubmitError
from tfdist.submit.request import Request
from tfdist.submit.status import Status
from tfdist.supervision.events import FILE_NAME

VARIABLE = "TFDIST_JOBS_DIR"
_DEFAULT = Path(".local", "state", "tfdist", "jobs")


@dataclass(frozen=True)
class Record:
    """One job.

    Attributes:
        id: by which users know it, such as "slurm-17".
        backend: what runs it.
        name: what the user calls it.
        submitted: when, in seconds since 1970.
        folder: what belongs to the job: its script, its output, its events.
        program: the program with its arguments, as typed.
        workers: number of training processes.
        ps: number of parameter servers.
        details: what else its engine needs to know.
    """

    id: str
    backend: str
    name: str
    submitted: float
    folder: str
    program: list[str]
    workers: int
    ps: int
    details: dict[str, Any] = field(default_factory=dict)

    def with_details(self, **changes: Any) -> Record:
        """The same with other details."""
        return dataclasses.replace(self, details={**self.details, **changes})

    @property
    def final(self) -> Status | None:
        """How it has ended, if that is kept here."""
        kept = self.details.get("final")
        return Status(**kept) if kept else None

    @property
    def output(self) -> Path:
        """Where the job's output goes, if it goes to a file."""
        return Path(self.folder, "output.log")

    @property
    def event_log(self) -> Path:
        """Where its events go, if they go to a file."""
        return Path(self.folder, "logs", FILE_NAME)


class Records:
    """The jobs of this user.

    Args:
        folder: where they are kept; it is made when the first job is submitted.

    Example:
        >>> Records(Path("/nowhere")).all()
        []
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of_user(cls, env: Mapping[str, str]) -> Records:
        """Those in TFDIST_JOBS_DIR, or else below the home folder."""
        return cls(Path(env.get(VARIABLE) or Path.home() / _DEFAULT).absolute())

    def make_folder(self, name: str) -> Path:
        """A new folder for a job, which nobody else can read: scripts and environments have secrets in them.

        Raises:
            SubmitError: it cannot be made.
        """
        with self._usable():
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Tries other names until one is free, and lets nobody else in.
            folder = Path(tempfile.mkdtemp(prefix=f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-", dir=self.folder))
            (folder / "logs").mkdir()
        return folder

    def add(self, request: Request, folder: Path, wanted: str | None = None, **details: Any) -> Record:
        """Keeps a new job.

        Args:
            request: what was asked for.
            folder: made by `make_folder`.
            wanted: what the engine calls it; a number is added if there was such a job before. By default the job is
                numbered here.
            **details: for the engine.
        """
        with self.locked():
            taken = {path.stem for path in self.folder.glob("*.json")}
            own = new_id(request.backend, wanted, taken)
            program, now = list(request.target.typed), time.time()
            record = Record(
                own, request.backend, request.name, now, str(folder), program, request.workers, request.ps, details
            )
            self.save(record)
        return record

    def save(self, record: Record) -> None:
        """Writes a record, so that others see the old or the new one, whole."""
        path = self.folder / f"{record.id}.json"
        write_privately(path, json.dumps(dataclasses.asdict(record), indent=1))

    def remember(self, record: Record, status: Status) -> None:
        """Keeps how a job has ended: its engine may forget that."""
        self.update(record.id, lambda now: now.with_details(final=dataclasses.asdict(status)))

    def load(self, job: str) -> Record:
        """The job of an id.

        Raises:
            SubmitError: there is none, or its file is damaged.
        """
        path = self.folder / f"{job}.json"
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", job) or not path.is_file():
            known = [record.id for record in self.all()][-3:]
            some = f", such as {' or '.join(known)}" if known else ""
            raise SubmitError(
                f"Received: job {job!r}, of which nothing is known in {self.folder}. Expected: the id of a job{some}. "
                f"`tfdist jobs` lists them; {VARIABLE} names another folder"
            )
        record = _read(path)
        if record is None:
            raise SubmitError(
                f"Received: {path}, which is damaged or of another version. Expected: a record that `tfdist submit` "
                "has written. The engine still knows the job (sacct, kubectl); remove the file to forget it here"
            )
        return record

    def all(self) -> list[Record]:
        """All jobs whose record can be read, in the order in which they were submitted."""
        found = (_read(path) for path in self.folder.glob("*.json"))
        return sorted((record for record in found if record is not None), key=lambda record: record.submitted)

    def update(self, job: str, change: Callable[[Record], Record]) -> Record:
        """Changes a record while nobody else does."""
        with self.locked():
            record = change(self.load(job))
            self.save(record)
        return record

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """While it is entered, no other process changes a record."""
        with self._usable():
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = open(self.folder / ".lock", "a")  # noqa: SIM115 - what follows is none of this folder's faults
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        """Names the folder, and the variable, if it cannot be made or written to."""
        try:
            yield
        except OSError as error:
            raise SubmitError(
                f"Received: {self.folder} as the folder of the jobs: {error.strerror}. Expected: one that you can "
                f"make and write to; set {VARIABLE}, or unset it for that in your home folder"
            ) from None


def new_id(backend: str, wanted: str | None, taken: Collection[str]) -> str:
    """An id that no job has.

    Example:
        >>> new_id("local", None, {"local-1", "slurm-7"}), new_id("slurm", "7", {"local-1", "slurm-7"})
        ('local-2', 'slurm-7-2')
    """
    if wanted is None:
        numbers = [own.removeprefix(f"{backend}-") for own in taken if own.startswith(f"{backend}-")]
        return f"{backend}-{max((int(number) for number in numbers if number.isdigit()), default=0) + 1}"
    first = own = f"{backend}-{wanted}"
    number = 2
    while own in taken:
        own, number = f"{first}-{number}", number + 1
    return own


def write_privately(path: Path, text: str, mode: int = 0o600) -> None:
    """Puts a file in its place in one piece, readable for its owner only."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _read(path: Path) -> Record | None:
    try:
        return Record(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
