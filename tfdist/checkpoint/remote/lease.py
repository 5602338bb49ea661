"""A lease of a remote folder, to which one training at a time writes: buckets have no locks. Uses no TensorFlow."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass

from tfdist.checkpoint.folder_lock import FolderInUseError
from tfdist.storage.base import Storage
from tfdist.storage.patience import patiently
from tfdist.supervision.identity import Identity

_log = logging.getLogger("tfdist")

NAME = ".lease"
# Seconds between two signs of life, and without one until the owner counts as dead.
_RENEWAL = 10.0
_EXPIRY = 60.0
# Two processes that find the folder free write at the same moment; the last one has it.
_SETTLES = 1.0
# All are of one length: TensorFlow keeps the length of an object for some seconds, and would read a part of a new one.
_BYTES = 512


class LeaseLostError(OSError):
    """Another training has taken over the folder."""


@dataclass(frozen=True)
class Owner:
    """What stands in a lease.

    Attributes:
        token: of this lease alone.
        process: in words.
        pid, start, boot: of the process, see `Identity`.
        namespace: of its process numbers: that of a container is another one.
        renewals: a number that grows; clocks of two machines are never compared.
    """

    token: str
    process: str
    pid: int
    start: int
    boot: str
    namespace: str
    renewals: int = 0

    @classmethod
    def this_process(cls) -> Owner:
        """This process, with a new token."""
        pid, identity = os.getpid(), Identity.of(os.getpid())
        name = f"process {pid} on {socket.gethostname()[:100]}"
        start, boot = (identity.start, identity.boot) if identity else (0, "")
        return cls(secrets.token_hex(16), name, pid, start, boot, _namespace())

    def encode(self) -> bytes:
        """As the content of the lease."""
        return json.dumps(asdict(self)).encode().ljust(_BYTES)

    @classmethod
    def decode(cls, content: bytes) -> Owner | None:
        """What `encode` returned; `None` for anything else."""
        try:
            owner = cls(**json.loads(content.decode()))
        except (ValueError, TypeError, RecursionError):
            return None
        fields = asdict(owner)
        return owner if all(type(fields[name]) is type(value) for name, value in asdict(_NOBODY).items()) else None

    @property
    def is_dead_here(self) -> bool:
        """Whether it was a process of this machine, and is there no longer. What cannot be seen from here is not."""
        if not self.boot or not self.namespace or self.namespace != _namespace():
            return False
        own = Identity.of(os.getpid())
        return own is not None and own.boot == self.boot and not Identity(self.pid, self.start, self.boot).is_alive

    @property
    def is_alive_here(self) -> bool:
        """Whether it is a process of this machine, and there."""
        is_same = bool(self.namespace) and self.namespace == _namespace()
        return is_same and Identity(self.pid, self.start, self.boot).is_alive


_NOBODY = Owner("", "", 0, 0, "", "")


class FolderLease:
    """Holds a remote folder for this process: an object `.lease` in it, which a thread writes again and again.

    Whoever finds the lease of another waits for a sign of life, and is refused once one comes. Without any it takes
    over: at once if the owner was a process of this machine and has ended, else after a minute. It is no lock: an owner
    that was stopped for longer notices that before it makes a backup valid, and fails to.

    Args:
        storage: of the folder.
        folder: the remote folder.
        renewal: seconds between two signs of life.
        expiry: seconds without one, after which the owner counts as dead.

    Raises:
        FolderInUseError: if another process has it.
        OSError: if the lease cannot be read or written.
    """

    # A fit that failed has released nothing; the next one in the same process may go on with its folder.
    _held: dict[tuple[int, str], FolderLease] = {}  # noqa: RUF012

    def __init__(self, storage: Storage, folder: str, renewal: float = _RENEWAL, expiry: float = _EXPIRY) -> None:
        self._storage, self._folder = storage, folder
        self._path = f"{folder}/{NAME}"
        self._renewal, self._expiry = renewal, expiry
        self._key = (os.getpid(), self._path)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._lost: str | None = None
        self._renewed = _now()
        if (before := self._held.get(self._key)) is not None:
            before._end(timeout=expiry)
            self._own, self._renewed = before._own, before._renewed
            self.check()
        else:
            self._own = Owner.this_process()
            self._acquire()
        self._held[self._key] = self
        # A daemon: it must not keep a program alive that has ended otherwise.
        threading.Thread(target=self._renew_again_and_again, name="tfdist-lease", daemon=True).start()
        atexit.register(self.release)

    def _acquire(self) -> None:
        while True:
            found = self._read()
            if found is not None:
                self._wait_for_its_end(found)
            if found is not None or not self._has_tried_to_create():
                began = time.monotonic()
                self._write(self._own)
                time.sleep(_SETTLES + time.monotonic() - began)
            if self._is_own(current := self._read()):
                return
            if current is not None and self._is_alive(current):
                raise self._in_use(current)

    def _has_tried_to_create(self) -> bool:
        """Makes the lease, if that is possible where only one of several can; who has it has to be read."""
        self._renewed = _now()
        try:
            made = patiently(lambda: self._storage.create(self._path, self._own.encode()), final=(PermissionError,))
        except PermissionError:
            raise
        except OSError:
            return False  # not every server that speaks the language of S3 knows of this
        return made is not None

    def _wait_for_its_end(self, found: bytes) -> None:
        """Returns once the owner of a lease has ended, or has given no sign of life for as long as it lasts."""
        owner = Owner.decode(found)
        if owner is not None and owner.is_dead_here:
            return
        began, told = time.monotonic(), False
        while time.monotonic() - began < self._expiry:
            time.sleep(min(1.0, self._renewal / 2))
            current = self._read()
            if current is None:
                return
            if current != found:
                raise self._in_use(current)
            if not told and time.monotonic() - began > self._renewal:
                told = True
                _log.warning(
                    "Waiting for %s, which had the folder %s, for up to %.0f s: it may be dead",
                    _name(current),
                    self._folder,
                    self._expiry,
                )
        if owner is not None and owner.is_alive_here:
            raise self._in_use(found)  # it is stopped, or its bucket fails
        _log.warning("Taking over the folder %s: %s gives no sign of life", self._folder, _name(found))

    def _is_alive(self, found: bytes) -> bool:
        owner = Owner.decode(found)
        return owner is None or not owner.is_dead_here

    def check(self) -> None:
        """Raises `LeaseLostError` if another process has the folder by now, and `OSError` if that cannot be read."""
        if self._lost is None:
            current = self._read()
            if current is None and _now() - self._renewed > self._expiry:
                # This process stood still, with its machine perhaps. Who came meanwhile has written newer backups.
                self._lost = "another process, which has ended,"
            elif current is None:
                self._write(self._own)  # somebody has removed it, with the rest of the folder perhaps
            elif not self._is_own(current):
                self._lost = _name(current)
        if self._lost is not None:
            raise LeaseLostError(
                f"{self._lost} has taken over the folder {self._folder}, since this process gave no sign of life for "
                f"{self._expiry:.0f} s. Let only one of the two trainings go on"
            )

    def release(self) -> None:
        """Lets others have the folder."""
        if self._key[0] != os.getpid() or self._held.get(self._key) is not self:
            return  # a forked child, or it was released before
        del self._held[self._key]
        self._end(timeout=5.0)  # a process that is to end may not have long
        atexit.unregister(self.release)
        with contextlib.suppress(OSError):
            if self._lost is None and self._is_own(self._storage.read(self._path)):
                self._storage.remove(self._path)

    def _end(self, timeout: float) -> None:
        self._ended.set()
        if self._lock.acquire(timeout=timeout):  # a renewal that has begun is over then
            self._lock.release()

    def _renew_again_and_again(self) -> None:
        while not self._ended.wait(self._renewal) and self._lost is None:
            with contextlib.suppress(OSError), self._lock:
                if not self._ended.is_set():
                    self.check()
                    self._own = Owner(**{**asdict(self._own), "renewals": self._own.renewals + 1})
                    began = _now()
                    self._storage.write(self._path, self._own.encode())
                    self._renewed = began

    def _is_own(self, content: bytes | None) -> bool:
        owner = None if content is None else Owner.decode(content)
        return owner is not None and owner.token == self._own.token

    def _read(self) -> bytes | None:
        try:
            return patiently(lambda: self._storage.read(self._path), final=(PermissionError,))
        except FileNotFoundError:
            return None

    def _write(self, owner: Owner) -> None:
        began = _now()
        patiently(lambda: self._storage.write(self._path, owner.encode()), final=(PermissionError,))
        self._renewed = began

    def _in_use(self, current: bytes) -> FolderInUseError:
        return FolderInUseError(
            f"Received: backup_dir {self._folder!r}, to which {_name(current)} writes the backups of its training. "
            "Expected: one training at a time in a folder. Wait for that one, end it, or pass another backup_dir."
        )


def _name(content: bytes) -> str:
    owner = Owner.decode(content)
    return "another process" if owner is None or not owner.process.isprintable() else owner.process


def _now() -> float:
    """Seconds, also those in which the machine sleeps, as far as it tells."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
