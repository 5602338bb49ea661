"""A lock on the folder of backups, to which one training at a time writes. Uses no TensorFlow."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import socket
import stat
import struct
import time
import warnings
from collections.abc import Mapping

from tfdist.supervision.identity import Identity

_log = logging.getLogger("tfdist")

_NAME = ".lock"
_PATIENCE = 5.0
# A server of NFS 4 keeps what a dead host has locked, for 90 seconds where nobody has changed that.
_PATIENCE_ELSEWHERE = 120.0
_POLL = 0.1
# Python knows its number where it was built with a C library that does. It is the same on every Linux.
_OFD_SETLK = getattr(fcntl, "F_OFD_SETLK", 37)
# `struct flock`: the whole file.
_WHOLE_FILE = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
# There is no room for the file; backups may still be read, and room may be made.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class FolderInUseError(RuntimeError):
    """Another process writes backups to the folder; the text says which one."""


class FolderLock:
    """Holds a folder for this process, until `release` or its end, whatever that is.

    The lock is one of an open file (OFD): unlike one of POSIX, it stays when something else in this process opens and
    closes the file, a copy of the folder, say. A forked child closes the file, so that it keeps no lock of its dead
    parent. Everybody who may write to the folder may lock it.

    On a file system that has no locks, a warning says so, and nothing is locked. A lease that has to be renewed would
    not do instead: a process that was stopped for longer than it lasts would go on to write beside its successor.

    Args:
        folder: a local folder, which exists.
        patience: seconds to wait for another process of this machine, which may be about to end.
        elsewhere: seconds to wait for one of another machine, which may be dead: the file server may not know that yet.

    Raises:
        FolderInUseError: if another process holds it for longer.
        OSError: if the file that is locked cannot be opened.

    Example:
        >>> lock = FolderLock("backup")
        >>> lock.release()
    """

    # A fit that failed has released nothing; the next one in the same process may go on with its folder.
    _held: dict[tuple[int, str], int] = {}  # noqa: RUF012
    _closes_in_children = False

    def __init__(self, folder: str, patience: float = _PATIENCE, elsewhere: float = _PATIENCE_ELSEWHERE) -> None:
        self._folder = folder
        self._path = os.path.join(os.path.realpath(folder), _NAME)
        self._key = (os.getpid(), self._path)
        began, waits_for = time.monotonic(), ""
        while self._key not in self._held:
            waited = time.monotonic() - began
            try:
                file = self._open()
                if file is None:
                    return  # read-only: whoever writes there fails anyhow
                owner = self._take(file)
            except PermissionError as error:
                if waited > patience:
                    raise self._not_allowed(error) from None
                owner = ""  # its maker may be about to allow it
            except OSError as error:
                if error.errno == errno.ESTALE and waited <= patience:
                    owner = ""  # it was removed by another machine, just before it was looked at
                elif error.errno == errno.ENOLCK and waited <= patience:
                    owner = ""  # the service for locks may be about to start
                elif error.errno in (*_NO_LOCKS, *_NO_ROOM):
                    self._go_without(error)
                    return
                else:
                    raise
            if owner is None:
                continue
            limit = patience if not owner or _is_alive_here(owner) else elsewhere
            if waited > limit:
                raise self._in_use(owner, limit)
            if limit > patience and owner != waits_for:
                waits_for = owner
                _log.warning("Waiting for %s, which has the folder %s, for up to %.0f s", _name(owner), folder, limit)
            time.sleep(_POLL)

    def _open(self) -> int | None:
        """Opens the file that is locked, and makes it where it is missing; `None` in a folder that is read-only."""
        # Nothing that a link leads to is written to.
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        while True:
            try:
                file = os.open(self._path, flags)
            except FileNotFoundError:
                try:
                    # Only this makes it: in a folder such as /tmp, O_CREAT is refused for the file of another user.
                    file = os.open(self._path, flags | os.O_CREAT | os.O_EXCL, 0o600)
                except FileExistsError:
                    continue
                except OSError:
                    if os.access(os.path.dirname(self._path), os.W_OK):
                        raise
                    return None
                self._allow(file)
            except OSError as error:
                denied = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
                if not denied or os.access(os.path.dirname(self._path), os.W_OK):
                    raise
                return None
            if stat.S_ISREG(os.fstat(file).st_mode):
                return file
            os.close(file)
            raise OSError(errno.EEXIST, "it is there, and is not a file", self._path)

    def _allow(self, file: int) -> None:
        """Lets everybody who may write to the folder lock the file; the umask is for what has a content."""
        folder = os.stat(os.path.dirname(self._path))
        mode = 0o600
        for writes, grants in ((stat.S_IWGRP, 0o060), (stat.S_IWOTH, 0o006)):
            if folder.st_mode & writes:
                mode |= grants
        with contextlib.suppress(OSError):
            os.fchown(file, -1, folder.st_gid)
        with contextlib.suppress(OSError):
            os.fchmod(file, mode)

    def _take(self, file: int) -> str | None:
        """Tries to get the lock; returns the text of the process that has it, `None` if no other has.

        Raises:
            OSError: if there are no locks.
        """
        try:
            _lock(file)
        except OSError as error:
            owner = ""
            with contextlib.suppress(OSError):
                owner = os.pread(file, 200, 0).decode(errors="replace").strip()
            os.close(file)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return owner
            raise
        try:
            is_current = os.fstat(file).st_ino == os.stat(self._path).st_ino
        except FileNotFoundError:
            is_current = False
        except OSError:
            os.close(file)
            raise
        if not is_current:  # who had it has just removed it
            os.close(file)
            return None
        self._hold(file)
        with contextlib.suppress(OSError):  # a full disk
            os.ftruncate(file, 0)
            own = Identity.of(os.getpid())
            name = f"process {os.getpid()} on {socket.gethostname()}"
            os.pwrite(file, f"{name}\n{own.start} {own.boot}\n".encode() if own else name.encode(), 0)
            os.fsync(file)  # another machine is to read it, if this one dies
        return None

    def _hold(self, file: int) -> None:
        self._held[self._key] = file
        if not FolderLock._closes_in_children:
            FolderLock._closes_in_children = True
            os.register_at_fork(after_in_child=_close_all)

    def _go_without(self, error: OSError) -> None:
        self._held[self._key] = -1
        warnings.warn(
            f"The folder {self._folder} cannot be locked: {error}. Nothing keeps a second training from writing its "
            "backups there: start only one, or pass a backup_dir on a file system with locks.",
            RuntimeWarning,
            stacklevel=5,
        )

    def _not_allowed(self, error: PermissionError) -> PermissionError:
        return PermissionError(
            error.errno,
            f"{os.strerror(error.errno or errno.EACCES)}: this user may write to the folder, but may not lock it, so "
            "that another training might write at the same time. If none uses the folder, remove the file",
            self._path,
        )

    def _in_use(self, owner: str, waited: float) -> FolderInUseError:
        hint = ""
        if owner and not _is_alive_here(owner):
            hint = (
                f" If its machine is dead, remove {self._path}: the file server has kept the lock for the {waited:.0f} "
                "s that this process has waited."
            )
        return FolderInUseError(
            f"Received: backup_dir {self._folder!r}, to which {_name(owner) or 'another process'} writes the backups "
            "of its training. Expected: one training at a time in a folder. Wait for that one, end it, or pass another "
            f"backup_dir.{hint}"
        )

    def release(self) -> None:
        """Lets others have the folder."""
        file = self._held.pop(self._key, -1)
        if file >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            os.close(file)


def _lock(file: int) -> None:
    try:
        fcntl.fcntl(file, _OFD_SETLK, _WHOLE_FILE)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # this file system has those of POSIX alone


def _close_all() -> None:
    """In a forked child: the lock stays with its parent."""
    for file in FolderLock._held.values():
        with contextlib.suppress(OSError):
            os.close(file)
    FolderLock._held.clear()


def _name(owner: str) -> str:
    return owner.partition("\n")[0]


def _is_alive_here(owner: str) -> bool:
    """Whether the process that a lock file names is one of this machine, and there.

    Its number and its host's name do not tell: in containers, both may be those of the process that takes its place.
    """
    match = re.fullmatch(r"process (\d+) on \S+\n(\d+) (\S+)", owner)
    return match is not None and Identity(int(match[1]), int(match[2]), match[3]).is_alive


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
