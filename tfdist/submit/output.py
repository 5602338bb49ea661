"""Showing a file that grows."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

_INTERVAL = 0.25
_PIECE = 1 << 16


def copy(path: Path, to: BinaryIO) -> bool:
    """Writes what is in a file; returns whether there is one."""
    try:
        with open(path, "rb") as file:
            _pass_on(file, to)
        return True
    except FileNotFoundError:
        return False


def follow(path: Path, to: BinaryIO, is_over: Callable[[], bool], ask_every: float = _INTERVAL) -> None:
    """Writes what is in a file and what is added to it, until there will be nothing more.

    Args:
        path: the file, which may not exist yet.
        to: where to write.
        is_over: says whether its writer has ended.
        ask_every: seconds between two questions.
    """
    file, ask_at, over = None, 0.0, False
    try:
        while True:
            # Asked before reading: what was written before the end is read after it.
            if time.monotonic() >= ask_at:
                over, ask_at = is_over(), time.monotonic() + ask_every
            if file is None and path.exists():
                file = open(path, "rb")  # noqa: SIM115
            if file is not None:
                _pass_on(file, to)
            if over:
                return
            time.sleep(_INTERVAL)
    finally:
        if file is not None:
            file.close()


def _pass_on(file: BinaryIO, to: BinaryIO) -> None:
    while piece := file.read(_PIECE):
        to.write(piece)
    to.flush()
