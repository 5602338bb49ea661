"""Which run is meant, where its events are, and whether it is over."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tfdist.monitor.state import RunState
from tfdist.submit.duration import in_words
from tfdist.submit.engine import engine_of
from tfdist.submit.errors import SubmitError
from tfdist.submit.record import Records
from tfdist.submit.status import Status
from tfdist.supervision.events import FILE_NAME
from tfdist.supervision.identity import Identity

LOGS = "tfdist-logs"
_KUBERNETES = "kubernetes"
# In seconds. Processes that train write every ten seconds, but for long steps and validations.
_SILENCE = 1800.0


@dataclass(frozen=True)
class Source:
    """A run.

    Attributes:
        title: what users call it.
        folder: where its event log is.
        ask: the state of a job, from its engine; None for a run that is no job.
    """

    title: str
    folder: Path
    ask: Callable[[], Status] | None = None


def find(what: str | None, here: Path, env: Mapping[str, str]) -> Source:
    """The run that a user means.

    Args:
        what: a folder of logs or of several of them, of which it is the newest, or the id of a job; None for the
            newest one in the folder tfdist-logs.
        here: the current folder.
        env: the environment, for where jobs are recorded.

    Raises:
        SubmitError: there is no such run, or its events are not in a file.
    """
    folder = here / (what or LOGS)
    if what is None or folder.is_dir():
        if (folder / FILE_NAME).is_file():
            return Source(what or LOGS, folder)
        logs = list(folder.glob(f"*/{FILE_NAME}"))
        if not logs:
            raise SubmitError(
                f"Received: {folder}, in which no run has logged. Expected: the folder that `tfdist run` names at its "
                "start, or the id of a job of `tfdist submit`. Pass one of them, or change into the run's folder"
            )
        newest = max(logs, key=lambda path: path.stat().st_mtime).parent
        return Source(str(Path(what or LOGS, newest.name)), newest)
    records = Records.of_user(env)
    record = records.load(what)
    if record.backend == _KUBERNETES:
        raise SubmitError(
            f"Received: {what}, a job of Kubernetes, whose events are in the output of its pods. Expected: a job of "
            f"another engine, or a folder of logs. `tfdist status {what}` tells how far it is"
        )
    engine = engine_of(record.backend, records)
    return Source(what, record.event_log.parent, lambda: engine.status(records.load(what)))


def status_of(run: RunState, launcher_lives: bool, now: float) -> tuple[str, bool]:
    """The state of a run that is no job, and whether it goes on.

    Args:
        run: what its events have told.
        launcher_lives: whether its launcher was there before they were read.
        now: in seconds since 1970.

    Example:
        >>> status_of(RunState(started=10.0, ended=60.0, ending="complete"), False, now=100.0)
        ('complete after 50 s', False)
    """
    if run.ending is not None and run.started is not None and run.ended is not None:
        how, separator, why = run.ending.partition(":")
        return f"{how} after {in_words(run.ended - run.started)}{separator}{why}", False
    if not launcher_lives:
        return "lost: its launcher is gone, and has not said how the run ended", False
    if run.started is None or run.last is None:
        return "no process was started yet", True
    if run.launcher is None and now - run.last > _SILENCE:
        return f"silent for {in_words(now - run.last)}, and it has no launcher that would say whether it goes on", False
    return f"running for {in_words(max(now - run.started, 0))}", True


def lives(launcher: Identity | None) -> bool:
    """Whether a launcher is there, as far as this machine can know: one on another machine is taken to be."""
    if launcher is None:
        return True
    own = Identity.of(os.getpid())
    return own is None or own.boot != launcher.boot or launcher.is_alive
