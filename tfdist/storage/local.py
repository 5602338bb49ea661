"""Files on this machine: renamed when they are complete, and synced to the disk."""

from __future__ import annotations

import contextlib
import os
import shutil

import tensorflow as tf

from tfdist.atomic_files import sync, write_atomically
from tfdist.storage.base import Storage, entries_of, is_there
from tfdist.storage.tensorflow_files import os_errors


class LocalStorage(Storage):
    """The file systems that this machine has mounted. What is written is on the disk when a method returns."""

    is_local = True

    def names(self, folder: str, levels: int = 1) -> list[str]:
        names = entries_of(folder)
        if levels == 1:
            return names
        return [f"{name}/{rest}" for name in names for rest in self.names(os.path.join(folder, name), levels - 1)]

    def download(self, path: str, local: str) -> None:
        shutil.copyfile(path, local)

    def upload(self, local: str, path: str) -> None:
        if os.path.abspath(local) == os.path.abspath(path):  # it was written in its place
            sync(path)
        else:
            with open(local, "rb") as file:
                self.write(path, file.read())

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.remove(path)

    def write(self, path: str, content: bytes) -> None:
        write_atomically(path, content, durable=True)
        # A new folder's own name is in the folder above.
        sync(os.path.dirname(os.path.dirname(path)))

    def remove_all(self, folder: str) -> None:
        if is_there(folder):
            with os_errors():
                tf.io.gfile.rmtree(folder)
