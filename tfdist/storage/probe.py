"""Tries a remote folder before hours of training are put into it. Uses no TensorFlow."""

from __future__ import annotations

import secrets

from tfdist.cluster.foreign_text import cleaned
from tfdist.storage.base import MOST, Storage
from tfdist.storage.patience import patiently


def check_writable(storage: Storage, folder: str) -> None:
    """Writes an object, replaces it, reads it and removes it: what a training does there later.

    Args:
        storage: of the folder.
        folder: a remote one.

    Raises:
        OSError: that says which of these failed, and how.
    """
    path = f"{folder}/.tfdist-probe-{secrets.token_hex(4)}"
    step = "written"

    def attempt() -> None:
        nonlocal step
        step = "written"
        storage.write(path, b"tfdist")
        step = "replaced"
        storage.write(path, b"probe!")
        step = "read"
        if storage.read(path) != b"probe!":
            raise OSError("it has other bytes than were written a moment ago")
        step = "removed"
        storage.remove(path)

    try:
        patiently(attempt, final=(PermissionError,))
    except OSError as error:
        raise OSError(f"an object there cannot be {step}: {cleaned(' '.join(str(error).split()), MOST)}") from error
