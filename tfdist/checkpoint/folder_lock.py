"""A lock on the folder of backups, to which one training at a time writes. Uses no TensorFlow."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Mapping

_NAME = ".lock"
_PATIENCE = 5.0
_POLL = 0.1


class FolderInUseError(RuntimeError):
    """Another process writes backups to the folder; the text says which one."""


class FolderLock:
    """Holds a folder for this process, until `release` or its end, whatever that is.

    POSIX locks belong to the process alone: neither its death nor a child that outlives it leaves one behind, which is
    why it is not flock. Where the file system has no locks, nothing is locked.

    Args:
        folder: a local folder, which exists.
        patience: seconds to wait for another process, which may be about to end.

    Raises:
        FolderInUseError: if another process holds it for longer.

    Example:
        >>> lock = FolderLock("backup")
        >>> lock.release()
    """

    # A fit that failed has released nothing; the next one in the same process may go on with its folder.
    _held: dict[tuple[int, str], int] = {}  # noqa: RUF012

    def __init__(self, folder: str, patience: float = _PATIENCE) -> None:
        self._path = os.path.join(os.path.realpath(folder), _NAME)
        self._key = (os.getpid(), self._path)
        deadline = time.monotonic() + patience
        while self._key not in self._held:
            try:
                file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except OSError:
                return  # read-only: whoever writes there fails anyhow
            owner = self._take(file)
            if owner is None:
                continue
            if time.monotonic() > deadline:
                raise FolderInUseError(
                    f"Received: backup_dir {folder!r}, to which {owner or 'another process'} writes the backups of its "
                    "training. Expected: one training at a time in a folder. Wait for that one, end it, or pass "
                    "another backup_dir."
                )
            time.sleep(_POLL)

    def _take(self, file: int) -> str | None:
        """Tries to get the lock; returns the text of the process that has it, `None` if no other has."""
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(file, 200, 0).decode(errors="replace").strip()
            os.close(file)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return owner
            self._held[self._key] = -1  # this file system has no locks
            return None
        try:
            is_current = os.fstat(file).st_ino == os.stat(self._path).st_ino
        except FileNotFoundError:
            is_current = False
        if not is_current:  # who had it has just removed it
            os.close(file)
            return None
        with contextlib.suppress(OSError):  # a full disk
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        self._held[self._key] = file
        return None

    def release(self) -> None:
        """Lets others have the folder."""
        file = self._held.pop(self._key, -1)
        if file >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            os.close(file)


# Where backups go while `tfdist drill` tries the script out.

# Set by `tfdist drill` for the processes that it starts.
VARIABLE = "TFDIST_DRILL_DIR"


def drill_folder(backup_dir: str, env: Mapping[str, str]) -> str | None:
    """The folder to use instead of `backup_dir` in a drill, so that each of its runs has backups of its own.

    Args:
        backup_dir: what the script asked for, local or remote.
        env: the environment of the process.

    Returns:
        A local folder; None if this is no drill.

    Example:
        >>> drill_folder("gs://bucket/backup/", {"TFDIST_DRILL_DIR": "/tmp/drill"})
        '/tmp/drill/backup'
    """
    root = env.get(VARIABLE)
    if not root:
        return None
    return os.path.join(root, os.path.basename(os.path.normpath(backup_dir)))
