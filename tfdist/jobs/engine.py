"""What the commands ask of each scheduler, and how its own commands are run."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import shutil
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import BinaryIO

from tfdist.jobs.record import Record, Records
from tfdist.jobs.request import Request, SubmitError, UnansweredError, outside_of_jobs
from tfdist.jobs.status import CANCELLED, FAILED, LOST, Progress, Status, last_progress
from tfdist.supervision.events import last_events

_CLASSES = {"local": "LocalEngine", "slurm": "SlurmEngine", "kubernetes": "KubernetesEngine"}
# Where Slurm is, also inside of a job.
_OF_SITE = ("SLURM_CONF", "SLURM_CLUSTERS")
# Seconds that a scheduler has to answer.
SECONDS = 60


class Engine(ABC):
    """Speaks to a scheduler. All methods raise SubmitError if the scheduler is not there or refuses.

    Args:
        records: all jobs.

    Example:
        >>> from pathlib import Path
        >>> from tfdist.launcher.arguments import Target
        >>> request = Request("local", Target("module", ("train",)))
        >>> engine_of("local", Records(Path("/nowhere"))).dry_run(request)  # doctest: +ELLIPSIS
        '... -m tfdist run -n 2 ... -m train\\n'
    """

    # Seconds between two looks at a job that is followed.
    looks_every = 0.25

    def __init__(self, records: Records) -> None:
        self.records = records

    @abstractmethod
    def dry_run(self, request: Request) -> str:
        """What `submit` would hand to the scheduler, as text."""

    @abstractmethod
    def submit(self, request: Request) -> Record:
        """Hands a job to the scheduler. It is recorded first: no job runs of which nobody here knows."""

    @abstractmethod
    def _ask(self, record: Record) -> Status:
        """The state of a job whose end is not recorded."""

    @abstractmethod
    def _end(self, record: Record, now: Status, again: bool) -> str:
        """Ends a job that is not over, at once if it is asked to again; says what happens now."""

    def status(self, record: Record) -> Status:
        """The state of a job. How it has ended is recorded: its scheduler may forget that."""
        if record.final is not None:
            return record.final
        found = self._ask(record)
        if record.details.get("cancelled") and found.state in (FAILED, LOST):
            found = Status(CANCELLED, "", found.started, found.ended)
        if found.is_over and found.state != LOST:
            self._note(record, final=dataclasses.asdict(found))
        return found

    def cancel(self, record: Record) -> str:
        """Ends a job that is not over, and says what happens now."""
        now = self.status(record)
        if now.is_over:
            return f"{record.id}: is over already, {now}"
        again = bool(record.details.get("cancelled"))
        # Before: it may end at once, and others who look would note that it has failed.
        self._note(record, cancelled=True)
        try:
            return f"{record.id}: {self._end(self.records.load(record.id), now, again)}"
        except SubmitError:
            self._note(record, cancelled=again)
            raise

    def _note(self, record: Record, **details: object) -> None:
        with contextlib.suppress(OSError):  # a disk may be full
            self.records.update(record.id, **details)

    def progress(self, record: Record) -> Progress | None:
        """How far the training of a job is, if that is known."""
        return last_progress(last_events(record.event_log))

    def logs(self, record: Record, to: BinaryIO, follow: bool) -> None:
        """Writes the output of a job; with `follow` until the job is over."""
        at = 0
        while True:
            # Asked before reading: so all that was written before the end is read.
            # Of its newest record: somebody may have cancelled it.
            is_over = not follow or self.status(self.records.load(record.id)).is_over
            with contextlib.suppress(FileNotFoundError), open(record.output, "rb") as file:
                file.seek(at)
                shutil.copyfileobj(file, to)
                at = file.tell()
            to.flush()
            if is_over:
                return
            time.sleep(self.looks_every)

    @contextlib.contextmanager
    def _recorded(self, request: Request, **details: object) -> Iterator[Record]:
        """The record of a job that is being submitted; it stays if the scheduler may have taken the job."""
        record = self.records.add(request, **details)
        kept = f"Whether the job runs is not known: `tfdist status {record.id}` shows it once it does"
        try:
            yield record
        except KeyboardInterrupt:
            raise SubmitError(f"interrupted. {kept}") from None
        except UnansweredError as error:
            raise UnansweredError(f"{error}. {kept}") from None
        except (SubmitError, OSError):
            self.records.remove(record)
            raise


def engine_of(scheduler: str, records: Records) -> Engine:
    """The engine of one of `tfdist.jobs.SCHEDULERS`; only its modules are imported."""
    return getattr(importlib.import_module(f"tfdist.jobs.{scheduler}"), _CLASSES[scheduler])(records)


def job_of(job: str, env: Mapping[str, str]) -> tuple[Record, Engine]:
    """The job with this id among those of the user, and the engine of its scheduler.

    Raises:
        SubmitError: there is no such job, or its record is damaged.
    """
    records = Records.of_user(env)
    record = records.load(job)
    return record, engine_of(record.scheduler, records)


def answer(words: list[str], content: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a command of a scheduler, which may fail.

    Args:
        words: the command.
        content: of its standard input, for what other users must not see in a list of processes.

    Raises:
        SubmitError: it is not installed or, as an UnansweredError, does not answer.
    """
    # sbatch gives a job its own environment. In a job of Slurm's that has variables which srun reads: how cores are
    # bound, how much memory there is.
    is_inside = "SLURM_JOB_ID" in os.environ
    env = {
        name: value
        for name, value in outside_of_jobs(os.environ).items()
        if not (is_inside and name.startswith("SLURM_")) or name in _OF_SITE
    }
    more = {"input": content, "env": env, "errors": "surrogateescape"}
    try:
        return subprocess.run(words, timeout=SECONDS, capture_output=True, text=True, **more)
    except FileNotFoundError:
        raise SubmitError(
            f"Received: no command {words[0]} on the PATH. Expected: to submit where the scheduler's commands are"
        ) from None
    except subprocess.TimeoutExpired:
        raise UnansweredError(f"Received: no answer from {words[0]} within {SECONDS} s. Expected: one") from None
