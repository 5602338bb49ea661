"""What a place for files has to offer: whole files, written at once or not at all. Uses no TensorFlow.

A bucket has no folders, no locks, no renaming and nothing like fsync. What it has is here: an object appears whole,
with its last byte, and all that list or read after that see it.
"""

from __future__ import annotations

import abc
import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from typing import BinaryIO, TypeVar

from tfdist.cluster.foreign_text import cleaned

_T = TypeVar("_T")
NOT_A_FILE = (IsADirectoryError, NotADirectoryError)
# Seconds between the attempts.
PAUSES = (0.1, 0.3, 1.0, 3.0)

# The most characters of a server's message that are shown.
MOST = 1000


def patiently(attempt: Callable[[], _T], final: tuple[type[OSError], ...] = ()) -> _T:
    """Calls a function, and calls it again after a pause if the disk or the network fails (ESTALE, EIO, 503, ...).

    Args:
        attempt: may be called several times.
        final: further errors that are answers.

    Raises:
        FileNotFoundError, IsADirectoryError, NotADirectoryError: at once, since these are answers.
        OSError: of the last attempt.

    Example:
        >>> patiently(lambda: os.path.basename("backup/manifest.json"))
        'manifest.json'
    """
    for pause in PAUSES:
        try:
            return attempt()
        except (FileNotFoundError, *NOT_A_FILE, *final):
            raise
        except OSError:
            time.sleep(pause)
    return attempt()


def is_there(path: str) -> bool:
    """Whether a local path exists. `os.path.exists` says no where a disk fails.

    Raises:
        OSError: If the disk fails.
    """
    try:
        patiently(lambda: os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def entries_of(directory: str) -> list[str]:
    """What a local folder holds; nothing if there is no such folder.

    Raises:
        OSError: If the disk fails.
    """
    try:
        return patiently(lambda: os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []


class Storage(abc.ABC):
    """Reads and writes files by their full paths. Every method raises `OSError` for what fails.

    Something that is not there is a `FileNotFoundError`, and what these credentials may not do a `PermissionError`.

    Attributes:
        is_local: whether a path is one of this machine's own file system.
    """

    is_local = False

    @abc.abstractmethod
    def names(self, folder: str, levels: int = 1) -> list[str]:
        """The files below a folder, by their paths from there: exactly `levels` deep, in any order.

        None if there is no such folder. What cannot be listed is an error, never an empty list.
        """

    @abc.abstractmethod
    def download(self, path: str, local: str) -> None:
        """Copies a file to a local one."""

    @abc.abstractmethod
    def upload(self, local: str, path: str) -> None:
        """Makes a file of a local one. Others see the whole file, or the one that was there before."""

    @abc.abstractmethod
    def remove(self, path: str) -> None:
        """Removes a file. One that is not there is no error."""

    def read(self, path: str) -> bytes:
        """The content of a small file."""
        with _in_memory() as (file, local):
            self.download(path, local)
            return file.read()

    def write(self, path: str, content: bytes) -> None:
        """Makes a small file, or replaces it, at once."""
        with _in_memory() as (file, local):
            file.write(content)
            file.flush()
            self.upload(local, path)

    def folders_with(self, directory: str, name: str) -> dict[str, bool]:
        """The folders in a directory, and whether each has a file of this name."""
        found: dict[str, bool] = {}
        for path in self.names(directory, levels=2):
            folder, _, file = path.partition("/")
            found[folder] = found.get(folder, False) or file == name
        return found

    def remove_all(self, folder: str) -> None:
        """Removes the files of a folder, and the folder."""
        for name in self.names(folder):
            self.remove(f"{folder}/{name}")


@contextlib.contextmanager
def _in_memory() -> Iterator[tuple[BinaryIO, str]]:
    """A file and its path. A process that is killed leaves nothing of it: it has no name on a disk."""
    with open(os.memfd_create("tfdist-content"), "w+b") as file:
        yield file, f"/proc/self/fd/{file.fileno()}"


def check_writable(storage: Storage, folder: str) -> None:
    """Writes an object, replaces it, reads it and removes it: what a training does there later.

    Args:
        storage: of the folder.
        folder: a remote one.

    Raises:
        OSError: that says which of these failed, and how.
    """
    path = f"{folder}/.tfdist-probe-{secrets.token_hex(4)}"

    def read() -> None:
        if storage.read(path) != b"probe!":
            raise OSError("it has other bytes than were written a moment ago")

    steps: dict[str, Callable[[], None]] = {
        "written": lambda: storage.write(path, b"tfdist"),
        "replaced": lambda: storage.write(path, b"probe!"),
        "read": read,
        "removed": lambda: storage.remove(path),
    }
    for step, attempt in steps.items():
        try:
            patiently(attempt, final=(PermissionError,))
        except OSError as error:
            raise OSError(f"an object there cannot be {step}: {cleaned(' '.join(str(error).split()), MOST)}") from error
