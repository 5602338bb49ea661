"""Which of the fits with the same backup folder this is: a script may call `fit` several times."""

from __future__ import annotations

import contextlib
import os

_finished: dict[str, int] = {}


def folder_of_fit(backup_dir: str) -> str:
    """The folder of the next (or interrupted) fit: `backup_dir` for the first one, then `backup_dir/fit-2`, ...

    A script that is started again makes the same fits in the same order, and finds the finished ones finished.
    """
    number = _finished.get(_key(backup_dir), 0) + 1
    return backup_dir if number == 1 else f"{backup_dir.rstrip('/')}/fit-{number}"


def note_finished(backup_dir: str) -> None:
    """Notes that a fit with this folder has come to its end in this process."""
    _finished[_key(backup_dir)] = _finished.get(_key(backup_dir), 0) + 1


def remove_if_empty(backup_dir: str) -> None:
    """Removes the folder of the fit that ends, if its backups were all that it had; before `note_finished`."""
    for folder in dict.fromkeys([folder_of_fit(backup_dir), backup_dir]):
        with contextlib.suppress(OSError):  # another job may write to it by now; remote stores have no folders
            os.rmdir(folder)


def _key(backup_dir: str) -> str:
    return backup_dir if "://" in backup_dir else os.path.abspath(backup_dir)
