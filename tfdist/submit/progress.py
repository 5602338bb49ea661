"""How far a training is, from the lines that its chief writes to the event log."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist.submit.duration import in_words

# The newest lines are at the end; a log of weeks need not be read whole.
_TAIL_BYTES = 64 * 1024
_FRESH = 30
_BEGINNING = '{"time": '


@dataclass(frozen=True)
class Progress:
    """The chief's last line.

    Attributes:
        time: when it was written, in seconds since 1970.
        epoch: from 1.
        step: of this epoch.
        epochs: how many there will be; None if that is not known, like what follows.
        steps: how many an epoch has.
        loss: of this epoch so far.
        seconds_per_step: all included, since the last start.

    Example:
        >>> Progress(time.time(), 3, 20, 10, 40, 0.12345, 1.0).shown()
        'epoch 3/10, step 20/40, loss 0.1235, about 5 min left'
    """

    time: float
    epoch: int
    step: int
    epochs: int | None = None
    steps: int | None = None
    loss: float | None = None
    seconds_per_step: float | None = None

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> Progress | None:
        """What an event of progress says; None if it is damaged."""
        try:
            return cls(**{name: event[name] for name in cls.__dataclass_fields__ if name in event})
        except TypeError:
            return None

    @property
    def seconds_left(self) -> float | None:
        """How long it takes from that line on, if it goes on as it did."""
        if self.epochs is None or self.steps is None or self.seconds_per_step is None:
            return None
        return max((self.epochs - self.epoch + 1) * self.steps - self.step, 0) * self.seconds_per_step

    def shown(self, is_running: bool = True, now: float | None = None) -> str:
        """As a line; only of a training that runs it can be said how long it will take.

        Args:
            is_running: whether it does.
            now: in seconds since 1970, if not the present.
        """
        parts = [_of("epoch", self.epoch, self.epochs), _of("step", self.step, self.steps)]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4g}")
        age = max((time.time() if now is None else now) - self.time, 0)
        if self.seconds_left and is_running:
            parts.append(f"about {in_words(max(self.seconds_left - age, 1))} left")
        # A chief that trains writes every ten seconds at least, unless a step or a validation takes longer.
        return ", ".join(parts) + (f" ({in_words(age)} ago)" if age > _FRESH and is_running else "")


def last_progress(lines: Iterable[str]) -> Progress | None:
    """The chief's newest progress among lines that may have others, and pieces of lines, between them.

    Example:
        >>> line = '{"time": 5.0, "name": "chief", "event": "progress", "epoch": 1, "step": 2}'
        >>> last_progress(["25/25 - loss: 0.3" + line, "not JSON"]).step
        2
    """
    found = None
    for line in lines:
        event = event_in(line)
        if event is not None and event.get("event") == "progress" and not event.get("rank"):
            found = Progress.of(event) or found
    return found


def event_in(line: str) -> dict[str, Any] | None:
    """The event at the end of a line, if there is one: a progress bar may stand before it.

    Example:
        >>> print(event_in("loss: 0.3"))
        None
    """
    at = line.rfind(_BEGINNING)
    if at < 0:
        return None
    try:
        event = json.loads(line[at:])
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None


def without_event(line: bytes) -> bytes:
    """What a line shows to people, with its end; nothing of one that is an event only.

    Example:
        >>> without_event(b"loss: 0.3"), without_event(b'{"time": 5.0, "name": "chief", "event": "saved"}')
        (b'loss: 0.3\\n', b'')
    """
    if event_in(line.decode(errors="replace")) is None:
        return line + b"\n"
    return line[: line.rfind(_BEGINNING.encode())]


def last_lines(path: Path) -> list[str]:
    """The lines at the end of a file; none if there is no such file."""
    try:
        with open(path, "rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - _TAIL_BYTES, 0))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def _of(what: str, number: int, total: int | None) -> str:
    return f"{what} {number}" + (f"/{total}" if total else "")
