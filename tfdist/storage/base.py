"""What a place for files has to offer: whole files, written at once or not at all. Uses no TensorFlow.

A bucket has no folders, no locks, no renaming and nothing like fsync. What it has is here: an object appears whole,
with its last byte, and whoever lists or reads after that sees it.
"""

from __future__ import annotations

import abc
import os
import tempfile

# The most characters of what a server says that are told.
MOST = 1000


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
        with tempfile.TemporaryDirectory(prefix="tfdist-read-") as folder:
            local = os.path.join(folder, "content")
            self.download(path, local)
            with open(local, "rb") as file:
                return file.read()

    def write(self, path: str, content: bytes) -> None:
        """Makes a small file, or replaces it, at once."""
        with tempfile.TemporaryDirectory(prefix="tfdist-write-") as folder:
            local = os.path.join(folder, "content")
            with open(local, "wb") as file:
                file.write(content)
            self.upload(local, path)

    def create(self, path: str, content: bytes) -> bool | None:
        """Makes a small file if there is none of this path; others who try at the same time fail.

        Returns:
            Whether it was made; `None` where this is not possible, and nothing was done.
        """
        return None

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
