"""What happened to a run, for programs: one JSON object per line in `events.jsonl` beside the logs."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tfdist.cluster.foreign_text import cleaned
from tfdist.json_schema import anything, check, is_time

FILE_NAME = "events.jsonl"
# Names the file for the progress of the training, and for all events where there is no folder of logs. With
# STANDARD_OUTPUT they are printed: nobody else could read a file of a pod.
VARIABLE = "TFDIST_EVENT_LOG"
STANDARD_OUTPUT = "-"
Event = dict[str, Any]
# Every line begins so.
_BEGINNING = '{"time": '
# What all events have. Others may have written to the file, or a disk may have lost a part.
_EVENT: dict[Any, Any] = {"time": is_time, "name": str, "event": str, ...: anything}
# A whole number with more is none that anybody has measured; Python would not convert it to others.
_DIGITS = 20
# This much of the end of a log is read for its last events: the log of a run of weeks is long.
_TAIL_BYTES = 64 * 1024
# How long to wait for the lock of the file, and between two attempts to get it. Its holder writes one line.
_LOCK_SECONDS, _LOCK_PAUSE = 2.0, 0.005


class EventLog:
    """Appends to the event log of a run. All processes write to the same file; each line arrives in one piece.

    Also where the file is on NFS, and processes of several hosts write to it: there the end of the file is another one
    on each host, unless it is asked for under a lock. Without locks (ENOLCK), or if another process keeps the lock for
    seconds, a line is written without it: on NFS it may then replace another one.

    Args:
        folder: folder of the logs; None: events go nowhere.
        name: who writes, such as "worker 1".
        path: the file, in place of that in the folder.
        do: writes so many bytes, by calling a function; by default that is called at once.

    Example:
        >>> EventLog(None, "worker 1").write("saved", step=12)
    """

    def __init__(
        self, folder: str | None, name: str, path: str = "", do: Callable[[int, Callable[[], None]], None] | None = None
    ) -> None:
        self._path = path or (os.path.join(folder, FILE_NAME) if folder else None)
        self._in_folder = not path
        self._name = name
        self._do = do or _at_once

    @classmethod
    def from_environment(cls) -> EventLog:
        """The log of the run to which this process belongs. Without a run it writes nothing."""
        folder = os.environ.get("TFDIST_LOG_DIR")
        return cls(folder, own_name(), "" if folder else os.environ.get(VARIABLE, ""))

    def write(self, event: str, **fields: Any) -> None:
        """Appends an event with the time and the writer's name. A full disk costs the event, nothing else.

        Args:
            event: what happened, such as "saved".
            **fields: values that JSON knows; others are written as text.
        """
        self.append({"time": time.time(), "name": self._name, "event": event, **fields})

    def append(self, event: Event) -> None:
        """Appends an event as it is, with the time and the name that it has."""
        if self._path is None:
            return
        line = (json.dumps(event, default=str) + "\n").encode()
        self._do(len(line), functools.partial(self._write, self._path, line))

    def _write(self, path: str, line: bytes) -> None:
        if path == STANDARD_OUTPUT:
            os.write(1, line)
            return
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        # A file that the user names may be a link, such as /dev/stdout. In the place of ours there may be a pipe that
        # nobody reads, and nobody waits for.
        descriptor = os.open(path, flags | ((os.O_NOFOLLOW | os.O_NONBLOCK) if self._in_folder else 0), 0o666)
        try:
            lock(descriptor, _LOCK_SECONDS)
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


def _at_once(size: int, write: Callable[[], None]) -> None:
    with contextlib.suppress(OSError):
        write()


def lock(descriptor: int, seconds: float) -> bool:
    """Locks a file until it is closed; False if another process keeps it for so long. A disk may have no locks."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOCK_PAUSE)


def own_name() -> str:
    """The name of this process in the log: its task, such as "worker 1", or else its process id.

    Example:
        >>> own_name() == f"process {os.getpid()}"  # without a cluster
        True
    """
    text = os.environ.get("TFDIST_CLUSTER") or os.environ.get("TF_CONFIG") or "{}"
    try:
        # Each tuner of a search is a cluster of its own.
        if of_search := os.environ.get("TFDIST_TUNE"):
            return f"tuner {json.loads(of_search)['tuner']}"
        task = json.loads(text)["task"]
        return f"{task['type']} {task['index']}"
    except (ValueError, KeyError, TypeError):
        return f"process {os.getpid()}"


class EventStream:
    """Reads the event log of a run.

    Args:
        log_dir: folder of the run's logs; it need not exist yet.

    Example:
        >>> EventStream(Path("/does/not/exist")).read()
        []
    """

    def __init__(self, log_dir: Path) -> None:
        self._path = log_dir / FILE_NAME
        self._position = 0

    def read(self) -> list[Event]:
        """Returns the events in the whole lines that have been written since the last call."""
        try:
            with opened(self._path) as file:
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._position += len(complete)
        return events_in(complete.decode(errors="replace"))


def opened(path: Path) -> BinaryIO:
    """A log to be read. To read a pipe in its place would wait, and take what another process is to read.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    raise FileNotFoundError(errno.ENOENT, "is not a file", str(path))


def events_in(text: str) -> list[Event]:
    """The events in the lines of a text, among which may be other output and incomplete lines.

    Example:
        >>> events_in('25/25 - loss: 0.3{"time": 5.0, "name": "chief", "event": "saved"}\\nnot JSON')
        [{'time': 5.0, 'name': 'chief', 'event': 'saved'}]
    """
    return list(filter(None, map(event_in, text.splitlines())))


def event_in(line: str) -> Event | None:
    """The event at the end of a line, behind a progress bar, say; None if there is none."""
    at = line.rfind(_BEGINNING)
    if at < 0:
        return None
    try:
        event = json.loads(line[at:], parse_int=_computable)
        check(event, _EVENT)
        return _printable(event)
    except (ValueError, RecursionError):
        return None


def _computable(digits: str) -> int | None:
    """A whole number; None for one that could not be computed with, or shown."""
    return int(digits) if len(digits) < _DIGITS else None


def _printable(value: Any) -> Any:
    """The same without control characters, which could move the cursor of a terminal, or set its title."""
    if isinstance(value, str):
        return "\n".join(cleaned(line, len(line)) for line in value.split("\n"))
    if isinstance(value, dict):
        return {_printable(key): _printable(one) for key, one in value.items()}
    return list(map(_printable, value)) if isinstance(value, list) else value


def without_event(line: bytes) -> bytes:
    """A line with its end, but without the event in it; empty if the line is nothing but an event.

    Example:
        >>> without_event(b"loss: 0.3"), without_event(b'{"time": 5.0, "name": "chief", "event": "saved"}')
        (b'loss: 0.3\\n', b'')
    """
    if event_in(line.decode(errors="replace")) is None:
        return line + b"\n"
    return line[: line.rfind(_BEGINNING.encode())]


def last_events(log: Path) -> list[Event]:
    """The events at the end of a log; none if it cannot be read."""
    try:
        with opened(log) as file:
            file.seek(max(os.fstat(file.fileno()).st_size - _TAIL_BYTES, 0))
            return events_in(file.read().decode(errors="replace"))
    except OSError:
        return []


def of_kind(events: Sequence[Event], kind: str) -> list[Event]:
    """The events of a kind.

    Example:
        >>> of_kind([{"event": "start"}, {"event": "saved", "step": 3}], "saved")
        [{'event': 'saved', 'step': 3}]
    """
    return [event for event in events if event["event"] == kind]
