"""Files on this machine: renamed when they are complete, and synced to the disk."""

from __future__ import annotations

import contextlib
import os

from tfdist.atomic_files import sync, write_atomically
from tfdist.storage.tensorflow_files import TensorFlowStorage


class LocalStorage(TensorFlowStorage):
    """The file systems that this machine has mounted. What is written is on the disk when a method returns."""

    is_local = True

    def upload(self, local: str, path: str) -> None:
        if os.path.abspath(local) != os.path.abspath(path):  # else it was written in its place
            super().upload(local, path)
        sync(path)

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.remove(path)

    def write(self, path: str, content: bytes) -> None:
        write_atomically(path, content, durable=True)
        # A new folder's own name is in the folder above.
        sync(os.path.dirname(os.path.dirname(path)))
