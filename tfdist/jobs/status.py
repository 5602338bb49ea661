"""The state of a job, in the same words for every scheduler, and how far its training is."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from tfdist.supervision.events import Event
from tfdist.supervision.exit_codes import REFUSED, UNSAVED

QUEUED = "queued"
RUNNING = "running"
SUCCEEDED = "succeeded"
FAILED = "failed"
CANCELLED = "cancelled"
# Its scheduler does not know it: it is gone, and nobody knows how it ended, or it was never taken.
LOST = "lost"
OVER = (SUCCEEDED, FAILED, CANCELLED, LOST)
# No number of a training is as large.
_MOST = 1e30
# Seconds after which the age of a progress is shown: the chief writes every ten seconds, except in long steps and
# validations.
FRESH = 30


@dataclass(frozen=True)
class Status:
    """The state of a job.

    Attributes:
        state: one of the states of this module.
        detail: why, in a few words; may be empty.
        started: when its processes were started, in seconds since 1970; None if unknown.
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
        """Whether it has ended."""
        return self.state in OVER

    def __str__(self) -> str:
        text = self.state
        if self.started is not None and self.state == RUNNING:
            text += f" for {in_words(max(time.time() - self.started, 0))}"
        elif self.started is not None and self.ended is not None:
            text += f" after {in_words(max(self.ended - self.started, 0))}"
        return f"{text}: {self.detail}" if self.detail else text


def exit_in_words(code: int) -> str:
    """An exit code other than 0, with its meaning.

    Example:
        >>> exit_in_words(3), exit_in_words(78)
        ('exit code 3', 'exit code 78: not started again, it would fail again; `tfdist logs` shows why')
    """
    return f"exit code {code}{_MEANINGS.get(code, '')}"


_MEANINGS = {
    REFUSED: ": not started again, it would fail again; `tfdist logs` shows why",
    UNSAVED: ": it was stopped, and could not save; `tfdist logs` shows why, and where it goes on",
}


def in_words(seconds: float) -> str:
    """A time for people, rounded.

    Example:
        >>> in_words(42.3), in_words(250), in_words(7200), in_words(200000)
        ('42 s', '4 min', '2.0 h', '2.3 days')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 2 * 86400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"


@dataclass(frozen=True)
class Progress:
    """How far the training is, from the last event of progress that the chief has written.

    Attributes:
        time: when it was written, in seconds since 1970.
        epoch: from 1.
        step: of this epoch.
        epochs: how many there will be; this and the following are None if unknown.
        steps: how many an epoch has.
        loss: of this epoch so far.
        seconds_left: from then to the end of the fit, at its speed so far.

    Example:
        >>> Progress(time.time(), 3, 20, 10, 40, 0.12345, 300.0).shown()
        'epoch 3/10, step 20/40, loss 0.1235, about 5 min left'
    """

    time: float
    epoch: int
    step: int
    epochs: int | None = None
    steps: int | None = None
    loss: float | None = None
    seconds_left: float | None = None

    @classmethod
    def of(cls, event: Event) -> Progress | None:
        """From an event of progress; None if it is damaged."""
        fields = {name: event[name] for name in cls.__dataclass_fields__ if event.get(name) is not None}
        if not {"time", "epoch", "step"} <= fields.keys() or not all(
            # A loss may be infinite, or no number.
            is_number(value) or (name == "loss" and isinstance(value, float))
            for name, value in fields.items()
        ):
            return None
        return cls(**fields)

    def shown(self, is_running: bool = True, now: float | None = None) -> str:
        """As a line, with the remaining time of a training that is running.

        Args:
            is_running: whether it is.
            now: in seconds since 1970; by default the present.
        """
        parts = [f"epoch {of_total(self.epoch, self.epochs)}", f"step {of_total(self.step, self.steps)}"]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4g}")
        age = max((time.time() if now is None else now) - self.time, 0)
        if self.seconds_left and is_running:
            parts.append(f"about {in_words(max(self.seconds_left - age, 1))} left")
        return ", ".join(parts) + (f" ({in_words(age)} ago)" if age > FRESH and is_running else "")


def is_number(value: object) -> bool:
    """Whether a value from a file is a number that can be computed with.

    Example:
        >>> [is_number(value) for value in (3, 0.5, "3", True, float("nan"), 10**400)]
        [True, True, False, False, False, False]
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _MOST


def last_progress(events: Iterable[Event]) -> Progress | None:
    """The newest progress of the chief.

    Example:
        >>> last_progress([{"time": 5.0, "name": "chief", "event": "progress", "epoch": 1, "step": 2}]).step
        2
    """
    found = None
    for event in events:
        if event.get("event") == "progress" and not event.get("rank"):
            found = Progress.of(event) or found
    return found


def of_total(number: int, total: int | None) -> str:
    """A number and, if it is known, the total.

    Example:
        >>> of_total(3, 10), of_total(3, None)
        ('3/10', '3')
    """
    return f"{number}/{total}" if total else str(number)
