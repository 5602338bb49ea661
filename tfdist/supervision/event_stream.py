"""The events of a run, read while it is still writing them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfdist.supervision.events import FILE_NAME

Event = dict[str, Any]


class EventStream:
    """Reads the event log of a run.

    Args:
        log_dir: folder of the run's logs; it need not exist yet.
        keep: whether what was read is kept.

    Attributes:
        events: all that were read and kept so far, in their order.

    Example:
        >>> EventStream(Path("/does/not/exist")).read()
        []
    """

    def __init__(self, log_dir: Path, keep: bool = True) -> None:
        self._path = log_dir / FILE_NAME
        self._position = 0
        self._keep = keep
        self.events: list[Event] = []

    def read(self) -> list[Event]:
        """Returns what has been written since the last call, whole lines only."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._position += len(complete)
        new = list(filter(None, map(_event, complete.splitlines())))
        if self._keep:
            self.events += new
        return new


def _event(line: bytes) -> Event | None:
    """None for what a full disk has left of one."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def of_kind(events: Sequence[Event], kind: str) -> list[Event]:
    """The events of a kind.

    Example:
        >>> of_kind([{"event": "start"}, {"event": "saved", "step": 3}], "saved")
        [{'event': 'saved', 'step': 3}]
    """
    return [event for event in events if event["event"] == kind]
