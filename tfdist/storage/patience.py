"""Looking again: errors of a disk or a network say nothing about what is there. Uses no TensorFlow."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
NOT_A_FILE = (IsADirectoryError, NotADirectoryError)
# Seconds between the attempts.
PAUSES = (0.1, 0.3, 1.0, 3.0)


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
