"""Storages for tests: one in memory, and one that stops, fails or reorders what is written to it."""

from __future__ import annotations

import posixpath
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfdist.storage.base import Storage


class Killed(BaseException):
    """In place of the end of the process: nothing that it would still do is done."""


class MemoryStorage(Storage):
    """Objects in a dictionary, which several of these may share."""

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        self.objects = {} if objects is None else objects

    def names(self, folder: str, levels: int = 1) -> list[str]:
        below = [path.removeprefix(f"{folder}/") for path in list(self.objects) if path.startswith(f"{folder}/")]
        return [name for name in below if name.count("/") == levels - 1]

    def download(self, path: str, local: str) -> None:
        if path not in self.objects:
            raise FileNotFoundError(path)
        Path(local).write_bytes(self.objects[path])

    def upload(self, local: str, path: str) -> None:
        self.objects[path] = Path(local).read_bytes()

    def remove(self, path: str) -> None:
        self.objects.pop(path, None)


class Disturbed(MemoryStorage):
    """Calls `before(number, what, path)` before each change, and `after` after it; either may raise."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(objects)
        self.changes: list[tuple[str, str]] = []
        self.before: Callable[[int, str, str], Any] = lambda number, what, path: None
        self.after: Callable[[int, str, str], Any] = lambda number, what, path: None
        self._lock = threading.Lock()

    def _change(self, what: str, path: str, change: Callable[[], None]) -> None:
        with self._lock:
            self.changes.append((what, posixpath.basename(path)))
            number = len(self.changes)
        self.before(number, what, path)
        change()
        self.after(number, what, path)

    def upload(self, local: str, path: str) -> None:
        self._change("upload", path, lambda: super(Disturbed, self).upload(local, path))

    def remove(self, path: str) -> None:
        self._change("remove", path, lambda: super(Disturbed, self).remove(path))
