"""Folders that users need not name: for the logs of a run, and for what programs can make again."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

NAME = "tfdist-logs"
_OTHERS_WRITE, _OTHERS_ALL = 0o022, 0o077


def default_log_dir(run_id: str, cwd: str, temp_dir: str) -> Path:
    """The folder of a run's logs: below the current folder, or below one of this user's in that for temporary files.

    What is in a folder to which all users can write may be another user's: their "tfdist-logs" could not be written
    to, and a link in it could lead to one of our files, which the log would then replace.

    Args:
        run_id: names the run.
        cwd: the current folder.
        temp_dir: that for temporary files.

    Returns:
        The folder, which need not exist. All above it that other users could have made exists, and is ours.

    Raises:
        OSError: there is no folder to write to.

    Example:
        >>> default_log_dir("20261122-174011-25401", "/work", "/tmp").name
        '20261122-174011-25401'
    """
    below = Path(cwd, NAME)
    if os.access(below if below.exists() else cwd, os.W_OK) and (
        not os.stat(cwd).st_mode & stat.S_IWOTH or _is_ours(below, _OTHERS_WRITE)
    ):
        return below / run_id
    own = Path(temp_dir, f"{NAME}-{os.geteuid()}")
    if not _is_ours(own, _OTHERS_ALL):
        # Another user was there first; that must not keep this one from working.
        own = Path(tempfile.mkdtemp(prefix=f"{own.name}-", dir=temp_dir))
    return own / run_id


def current_folder() -> str:
    """The folder in which this process works.

    Raises:
        FileNotFoundError: it was deleted.

    Example:
        >>> current_folder() == os.getcwd()
        True
    """
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise FileNotFoundError(
            "Received: a current folder that does not exist any more. Expected: one that does; change into another "
            'one, or into the one that has its name now: cd "$PWD"'
        ) from None


def _is_ours(folder: Path, forbidden: int) -> bool:
    """Makes a folder if there is none; whether it is ours, and no link. Takes forbidden permissions away."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o777 & ~forbidden)
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            return False
        if status.st_mode & forbidden:
            try:
                os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & ~forbidden)
            except OSError:  # a file system without modes, on which everything belongs to everybody
                return False
            # Some of them (CIFS, vfat with "quiet") say that they have changed it, and have not.
            return not os.fstat(descriptor).st_mode & forbidden
        return True
    finally:
        os.close(descriptor)


def user_cache(env: Mapping[str, str]) -> str:
    """The folder of tfdist, which may not be there yet (XDG Base Directory Specification).

    Args:
        env: the environment variables.

    Example:
        >>> user_cache({"XDG_CACHE_HOME": "/home/me/.cache"})
        '/home/me/.cache/tfdist'
    """
    return os.path.join(env.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"), "tfdist")
