"""What happened to a run, for programs: one JSON object per line in `events.jsonl` beside the logs."""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Any

FILE_NAME = "events.jsonl"
# Names the file for the progress of the training, and for all events where there is no folder of logs;
# STANDARD_OUTPUT where whoever wants to know could not read a file.
VARIABLE = "TFDIST_EVENT_LOG"
STANDARD_OUTPUT = "-"


class EventLog:
    """Appends to the event log of a run. All processes write to the same file; each line arrives in one piece.

    Args:
        folder: folder of the logs; None: events go nowhere.
        name: who writes, such as "worker 1".
        path: the file, in place of that in the folder.

    Example:
        >>> EventLog(None, "worker 1").write("saved", step=12)
    """

    def __init__(self, folder: str | None, name: str, path: str = "") -> None:
        self._path = path or (os.path.join(folder, FILE_NAME) if folder else None)
        self._name = name

    @classmethod
    def from_environment(cls) -> EventLog:
        """The log of the run to which this process belongs; one that writes nothing where there is no run."""
        folder = os.environ.get("TFDIST_LOG_DIR")
        return cls(folder, own_name(), "" if folder else os.environ.get(VARIABLE, ""))

    def write(self, event: str, **fields: Any) -> None:
        """Appends an event with the time and the writer's name. A full disk costs the event, nothing else.

        Args:
            event: what happened, such as "saved".
            **fields: values that JSON knows; others are written as text.
        """
        if self._path is None:
            return
        line = json.dumps({"time": time.time(), "name": self._name, "event": event, **fields}, default=str) + "\n"
        with contextlib.suppress(OSError):
            if self._path == STANDARD_OUTPUT:
                os.write(1, line.encode())
                return
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)


def own_name() -> str:
    """What this process is called in the log: its task, such as "worker 1", or else its number.

    Example:
        >>> own_name()  # without a cluster
        'process 4711'
    """
    text = os.environ.get("TFDIST_CLUSTER") or os.environ.get("TF_CONFIG") or "{}"
    try:
        task = json.loads(text)["task"]
        return f"{task['type']} {task['index']}"
    except (ValueError, KeyError, TypeError):
        return f"process {os.getpid()}"
