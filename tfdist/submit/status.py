"""What has become of a job, in the same words for every engine."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tfdist.submit.duration import in_words
from tfdist.supervision.exit_codes import REFUSED

QUEUED = "queued"
RUNNING = "running"
SUCCEEDED = "succeeded"
FAILED = "failed"
CANCELLED = "cancelled"
# It ran, or waited, and nobody knows how it ended.
LOST = "lost"
OVER = (SUCCEEDED, FAILED, CANCELLED, LOST)


def exit_in_words(code: int) -> str:
    """What an exit code other than 0 means.

    Example:
        >>> exit_in_words(3), exit_in_words(78)
        ('exit code 3', 'exit code 78: not started again, it would fail again; `tfdist logs` shows why')
    """
    refused = ": not started again, it would fail again; `tfdist logs` shows why" if code == REFUSED else ""
    return f"exit code {code}{refused}"


@dataclass(frozen=True)
class Status:
    """The state of a job.

    Attributes:
        state: one of those of this module.
        detail: why, in a few words; may be empty.
        started: when its processes were started, in seconds since 1970; None if that is not known.
        ended: when it was over.

    Example:
        >>> str(Status(FAILED, "exit code 3", started=100.0, ended=350.0))
        'failed after 4 min: exit code 3'
        >>> str(Status(QUEUED, "Resources"))
        'queued: Resources'
    """

    state: str
    detail: str = ""
    started: float | None = None
    ended: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.state in OVER

    def __str__(self) -> str:
        text = self.state
        if self.started is not None and self.state == RUNNING:
            text += f" for {in_words(max(time.time() - self.started, 0))}"
        elif self.started is not None and self.ended is not None:
            text += f" after {in_words(max(self.ended - self.started, 0))}"
        return f"{text}: {self.detail}" if self.detail else text
