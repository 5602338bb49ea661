"""Jobs of which nobody knows whether their scheduler has taken them: it was asked to, and has not answered."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterator

from tfdist.jobs.record import Record, Records
from tfdist.jobs.request import SubmitError
from tfdist.jobs.status import QUEUED, UNCONFIRMED, Status

# As long as this, another `tfdist submit` may still wait for the answer.
_SECONDS = 60
_UNANSWERED = "unanswered"


def keep(records: Records, record: Record) -> str:
    """Notes that nobody waits for the scheduler's answer any more; returns what the user has to be told."""
    with contextlib.suppress(SubmitError, OSError):
        records.update(record.id, lambda now: now.with_details(**{_UNANSWERED: True}))
    return (
        f"Whether the job runs is not known: it is kept as {record.id}; `tfdist status {record.id}` tells it, and what "
        f"to do, `tfdist cancel {record.id}` ends it"
    )


@contextlib.contextmanager
def kept_if_interrupted(records: Records, record: Record) -> Iterator[None]:
    """Gives a KeyboardInterrupt the text for the user: whether the scheduler has taken the job is not known then."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(keep(records, record)) from None


def unseen(records: Records, record: Record, asked: str, nowhere: str, look: str) -> Status:
    """The state of a job that was recorded, and that its scheduler does not show.

    Args:
        records: all jobs.
        record: of the job.
        asked: who was asked to take it.
        nowhere: where it is not seen.
        look: the scheduler's own command that shows it.

    Example:
        >>> from pathlib import Path
        >>> record = Record("slurm-unconfirmed-x", "slurm", "train", 5.0, "/jobs/x", ["train.py"], 2, 0)
        >>> unseen(Records(Path("/jobs")), record, "sbatch", "Slurm has no such job", "squeue").state
        'unconfirmed'
    """
    if not record.details.get(_UNANSWERED) and time.time() - record.submitted < _SECONDS:
        return Status(QUEUED, f"{asked} has not answered yet")
    files = shlex.join([str(records.folder / f"{record.id}.json"), record.folder])
    return Status(
        UNCONFIRMED,
        f"{asked} has not answered, and {nowhere}. It may still appear: `{look}` shows it, and `tfdist cancel "
        f"{record.id}` ends it then. If it does not, `rm -r {files}` forgets it",
    )


def cannot_end(record: Record, now: Status) -> SubmitError:
    """The error of `tfdist cancel` for a job that its scheduler does not show."""
    return SubmitError(
        f"Received: {record.id}, which cannot be ended now. Expected: a job that its scheduler knows; try it again in "
        f"a minute. It is {now}"
    )
