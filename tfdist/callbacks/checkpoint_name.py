"""The names of checkpoints' folders, such as `checkpoint-00000012`. Uses no TensorFlow."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from tfdist.callbacks.manifest import MANIFEST_NAME

_NAME = re.compile(r"checkpoint-(\d{8,})")


def checkpoint_name(number: int) -> str:
    """Returns the name of a checkpoint's folder.

    >>> checkpoint_name(12)
    'checkpoint-00000012'
    """
    return f"checkpoint-{number:08d}"


def checkpoint_number(name: str) -> int:
    """Returns the number in the name of a checkpoint's folder.

    Raises:
        ValueError: If it is not such a name.

    >>> checkpoint_number("checkpoint-00000012")
    12
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not the name of a checkpoint: give one such as {checkpoint_name(12)!r}")
    return int(match[1])


def checkpoint_names(entries: Iterable[str]) -> list[str]:
    """Returns which of a folder's entries are named like checkpoints, oldest first.

    >>> checkpoint_names(["checkpoint-00000002/", "logs", "checkpoint-00000001"])
    ['checkpoint-00000001', 'checkpoint-00000002']
    """
    names = (entry.rstrip("/") for entry in entries)
    return sorted(filter(_NAME.fullmatch, names), key=checkpoint_number)


def committed_checkpoints(directory: str) -> list[str]:
    """Returns the names of the completely written checkpoints in a local folder, oldest first."""
    if not os.path.isdir(directory):
        return []
    names = checkpoint_names(os.listdir(directory))
    return [name for name in names if os.path.exists(os.path.join(directory, name, MANIFEST_NAME))]
