"""One training at a time writes to a folder of backups: a local one is locked, a remote one leased.

Uses no TensorFlow.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import stat
import threading
import time
import warnings
from typing import Any, NoReturn

from tfdist.json_schema import read_json
from tfdist.storage.base import Storage, patiently
from tfdist.supervision.identity import Identity, own_boot, own_place

_log = logging.getLogger("tfdist")

_NAME = ".lock"
_PATIENCE = 5.0
# A server of NFS 4 keeps what a dead host has locked, for 90 seconds where nobody has changed that.
_PATIENCE_ELSEWHERE = 120.0
_POLL = 0.1
# Another process may have just made it, and be about to allow it, or have just removed it; the service for locks may
# be about to start.
_MAY_PASS = (errno.EEXIST, errno.EACCES, errno.EPERM, errno.ESTALE, errno.ENOLCK)
# There are no locks, or no room for the file: backups may still be read, and room may be made.
_GOES_WITHOUT = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSPC, errno.EDQUOT)

NAME = ".lease"
# Seconds between two signs of life, and without one until the owner counts as dead.
_RENEWAL = 10.0
_EXPIRY = 60.0
# Two processes that find the folder free write at the same moment; the last one has it.
_SETTLES = 1.0
# All are of one length: TensorFlow keeps the length of an object for some seconds, and would read a part of a new one.
_BYTES = 512
# The token is of this lease alone; the number of renewals grows: clocks of two machines are never compared.
_OWNER = {**dict.fromkeys(("token", "process", "place"), str), "pid": int, "start": int, "renewals": int}


# The open files of all locks of this process.
_locked: set[int] = set()


class FolderInUseError(RuntimeError):
    """Another process writes backups to the folder; the text says which one."""


def _refuse(folder: str, owner: str, advice: str = "") -> NoReturn:
    raise FolderInUseError(
        f"Received: backup_dir {folder!r}, to which {owner} writes the backups of its training. Expected: one training "
        f"at a time in a folder. Wait for that one, end it, or pass another backup_dir.{advice}"
    )


class FolderLostError(OSError):
    """Another training has taken over the folder."""


class FolderLock:
    """Holds a folder for this process, until `release` or its end, whatever that is.

    Every process that may write to the folder may lock it. On a file system without locks, a warning says so, and
    nothing is locked. A lease that has to be renewed would not do instead: a process that was stopped for longer than
    it lasts would go on to write beside its successor.

    Args:
        folder: a local folder, which exists.
        patience: seconds to wait for another process of this machine, which may be about to end.
        elsewhere: seconds to wait for one of another machine, which may be dead: the file server may not know that yet.

    Raises:
        FolderInUseError: if another process holds it for longer.
        OSError: if the file that is locked cannot be opened.

    Example:
        >>> lock = FolderLock(".")
        >>> lock.release()
    """

    def __init__(self, folder: str, patience: float = _PATIENCE, elsewhere: float = _PATIENCE_ELSEWHERE) -> None:
        self._folder = folder
        self._path = os.path.join(os.path.realpath(folder), _NAME)
        self._file: int | None = None
        self._lost = False
        began, waits_for = time.monotonic(), ""
        while True:
            waited = time.monotonic() - began
            try:
                owner = self._take()
            except OSError as error:
                if waited > patience or error.errno not in _MAY_PASS:
                    if error.errno not in _GOES_WITHOUT:
                        raise
                    warnings.warn(
                        f"The folder {folder} cannot be locked: {error}. Nothing keeps a second training from writing "
                        "its backups there: start only one, or pass a backup_dir on a file system with locks.",
                        RuntimeWarning,
                        stacklevel=4,
                    )
                    owner = None
                else:
                    owner = ""
            if owner is None:
                return
            (name, _, boot), limit = owner.partition("\n"), patience
            if name and boot.strip() != own_boot():
                limit = elsewhere
                if name != waits_for:
                    waits_for = name
                    _log.warning("Waiting for %s, which has the folder %s, for up to %.0f s", name, folder, limit)
            if waited > limit:
                advice = f" If its machine is dead, remove {self._path}." if waits_for else ""
                _refuse(folder, name or "another process", advice)
            time.sleep(_POLL)

    def _take(self) -> str | None:
        """Tries to get the lock; returns the text of the process that has it, `None` if this one has it now."""
        # Nothing that a link leads to is written to.
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        with contextlib.ExitStack() as closed:
            try:
                file = os.open(self._path, flags)
                closed.callback(os.close, file)
            except FileNotFoundError:
                # Only this makes it: in a folder such as /tmp, O_CREAT is refused for the file of another user.
                file = os.open(self._path, flags | os.O_CREAT | os.O_EXCL, 0o600)
                closed.callback(os.close, file)
                self._allow(file)
            try:
                # Of the open file: it stays when something else in this process opens and closes the file, too.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return os.pread(file, 200, 0).decode(errors="replace")
            if not self._is_of(file):
                return ""  # who had it has just removed it
            closed.pop_all()
        self._file = file
        _locked.add(file)
        with contextlib.suppress(OSError):  # a full disk
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n{own_boot()}\n".encode(), 0)
            os.fsync(file)  # another machine is to read it, if this one dies
        return None

    def _allow(self, file: int) -> None:
        """Lets everybody who may write to the folder lock the file; the umask is for what has a content."""
        folder = os.stat(os.path.dirname(self._path))
        of_group, of_all = folder.st_mode & stat.S_IWGRP, folder.st_mode & stat.S_IWOTH
        with contextlib.suppress(OSError):
            os.fchown(file, -1, folder.st_gid)
        with contextlib.suppress(OSError):
            os.fchmod(file, 0o600 | (0o060 if of_group else 0) | (0o006 if of_all else 0))

    def _is_of(self, file: int) -> bool:
        """Whether the path leads to an open file; if it was removed, another process may have locked a new one."""
        try:
            return os.path.samestat(os.fstat(file), os.stat(self._path))
        except FileNotFoundError:
            return False

    def check(self) -> None:
        """Takes the folder again if the lock was removed, with the rest of the folder perhaps.

        Raises:
            FolderLostError: if another process has taken it since.
            OSError: if that cannot be seen.
        """
        if (file := self._file) is not None and not self._lost and not self._is_of(file):
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            self._lost = os.path.lexists(self._path) or self._take() is not None
            if not self._lost:
                self._close(file)
        if self._lost:
            raise FolderLostError(
                f"another process has taken over the folder {self._folder}, since {_NAME} in it was removed. Let only "
                "one of the two trainings go on"
            )

    def release(self) -> None:
        """Lets others have the folder."""
        if (file := self._file) is not None:
            self._file = None
            with contextlib.suppress(OSError):
                if self._is_of(file):
                    os.unlink(self._path)
            self._close(file)

    def _close(self, file: int) -> None:
        _locked.discard(file)
        os.close(file)


def _close_all() -> None:
    """In a forked child: it keeps no lock of its parent, once that is dead."""
    while _locked:
        with contextlib.suppress(OSError):
            os.close(_locked.pop())


os.register_at_fork(after_in_child=_close_all)


class FolderLease:
    """Holds a remote folder for this process: an object `.lease` in it, which a thread writes again and again.

    A process that finds the lease of another waits for a sign of life, and is refused once one comes. Without any it
    takes over: at once if the owner was a process of this machine and has ended, else after a minute. It is no lock:
    an owner that was stopped for longer notices that before it makes a backup valid, and fails to.

    Args:
        storage: of the folder.
        folder: the remote folder.
        renewal: seconds between two signs of life.
        expiry: seconds without one, after which the owner counts as dead.

    Raises:
        FolderInUseError: if another process has it.
        OSError: if the lease cannot be read or written.
    """

    def __init__(self, storage: Storage, folder: str, renewal: float = _RENEWAL, expiry: float = _EXPIRY) -> None:
        self._storage, self._folder, self._path = storage, folder, f"{folder}/{NAME}"
        self._renewal, self._expiry = renewal, expiry
        pid, identity = os.getpid(), Identity.of(os.getpid())
        self._own: dict[str, Any] = {
            **{"token": secrets.token_hex(16), "process": f"process {pid} on {socket.gethostname()[:100]}"},
            **{"place": own_place(), "pid": pid, "start": identity.start if identity else 0, "renewals": 0},
        }
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._lost: str | None = None
        self._renewed = _now()
        if (found := self._read()) is not None:
            self._wait_for_its_end(found)
        began = time.monotonic()
        self._write()
        time.sleep(_SETTLES + time.monotonic() - began)
        if not self._is_own(current := self._read()):
            _refuse(self._folder, _name(current))
        # A daemon: it must not keep a program alive that has ended otherwise.
        threading.Thread(target=self._renew_again_and_again, name="tfdist-lease", daemon=True).start()
        atexit.register(self.release)

    def _wait_for_its_end(self, found: bytes) -> None:
        """Returns once the owner of a lease has ended, or has given no sign of life for as long as it lasts."""
        owner = _decoded(found)
        is_here = owner.get("place") == own_place()
        is_alive = is_here and Identity(owner["pid"], owner["start"], own_place()).is_alive
        if is_here and not is_alive:
            return
        _log.warning(
            "Waiting for %s, which had the folder %s, for up to %.0f s", _name(found), self._folder, self._expiry
        )
        began = time.monotonic()
        while time.monotonic() - began < self._expiry:
            time.sleep(min(1.0, self._renewal / 2))
            current = self._read()
            if current is None:
                return
            if current != found:
                _refuse(self._folder, _name(current))
        if is_alive:
            _refuse(self._folder, _name(found))  # it is stopped, or its bucket fails
        _log.warning("Taking over the folder %s: %s gives no sign of life", self._folder, _name(found))

    def check(self) -> None:
        """Raises `FolderLostError` if another process has the folder by now, and `OSError` if that cannot be read."""
        if self._lost is None:
            current = self._read()
            if current is None and _now() - self._renewed > self._expiry:
                # This process stood still, with its machine perhaps. Who came meanwhile has written newer backups.
                self._lost = "another process, which has ended,"
            elif current is None:
                self._write()  # it was removed, with the rest of the folder perhaps
            elif not self._is_own(current):
                self._lost = _name(current)
        if self._lost is not None:
            raise FolderLostError(
                f"{self._lost} has taken over the folder {self._folder}, since this process gave no sign of life for "
                f"{self._expiry:.0f} s. Let only one of the two trainings go on"
            )

    def release(self) -> None:
        """Lets others have the folder."""
        if self._own["pid"] != os.getpid() or self._ended.is_set():
            return  # a forked child, or it was released before
        self._ended.set()
        atexit.unregister(self.release)
        # A renewal that has begun is over then; but a process that is to end may not have long.
        if self._lock.acquire(timeout=5.0):
            self._lock.release()
        with contextlib.suppress(OSError):
            if self._lost is None and self._is_own(self._storage.read(self._path)):
                self._storage.remove(self._path)

    def _renew_again_and_again(self) -> None:
        while not self._ended.wait(self._renewal) and self._lost is None:
            with contextlib.suppress(OSError), self._lock:
                if not self._ended.is_set():
                    self.check()
                    self._own["renewals"] += 1
                    self._write()

    def _is_own(self, content: bytes | None) -> bool:
        return content is not None and _decoded(content).get("token") == self._own["token"]

    def _read(self) -> bytes | None:
        try:
            return patiently(lambda: self._storage.read(self._path), final=(PermissionError,))
        except FileNotFoundError:
            return None

    def _write(self) -> None:
        began, content = _now(), json.dumps(self._own).encode().ljust(_BYTES)
        patiently(lambda: self._storage.write(self._path, content), final=(PermissionError,))
        self._renewed = began


def _decoded(content: bytes) -> dict[str, Any]:
    """Whose lease it is; empty if it is none."""
    try:
        return read_json(content, _OWNER)
    except ValueError:
        return {}


def _name(content: bytes | None) -> str:
    name = _decoded(content or b"").get("process", "")
    return name if name and name.isprintable() else "another process"


def _now() -> float:
    """Seconds, also those in which the machine sleeps, as far as it tells."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
