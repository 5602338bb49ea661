"""Which process a process id means: another process may have got the same id since."""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MACHINE = Path("/etc/machine-id")
# Positions in /proc/PID/stat behind the command's name. psutil tells the start as a time of day, which changes when the
# clock is set; event logs and records of jobs keep the kernel's number.
_STATE, _START = 0, 19


@dataclass(frozen=True)
class Identity:
    """A process, distinguished from all others that have had the same id.

    Attributes:
        pid: the process id.
        start: when it was started, in ticks since the machine was.
        boot: names the processes among which its id is unique, see `own_place`.

    Example:
        >>> Identity.of(os.getpid()).is_alive
        True
    """

    pid: int
    start: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> Identity | None:
        """The process that has this id now; None if there is none, or it is a zombie."""
        try:
            status = Path("/proc", str(pid), "stat").read_bytes()
        except OSError:
            return None
        fields = status[status.rindex(b")") + 1 :].split()
        if fields[_STATE] in (b"Z", b"X"):
            return None
        return cls(pid, int(fields[_START]), own_place())

    @property
    def is_alive(self) -> bool:
        """Whether this very process runs."""
        return Identity.of(self.pid) == self

    def signal(self, number: signal.Signals) -> bool:
        """Sends it a signal, and says whether it was there and is ours. Others that got the same id since get none."""
        if not self.is_alive:
            return False
        try:
            os.kill(self.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True


def own_boot() -> str:
    """The id that the kernel has drawn when this machine was started.

    Example:
        >>> len(own_boot())
        36
    """
    return _BOOT.read_text().strip()


def own_place() -> str:
    """Names the processes among which the id of this one is unique: those of a container have ids of their own."""
    return f"{own_boot().replace('-', '')}-{os.stat('/proc/self/ns/pid').st_ino}"


@functools.cache
def this_host() -> str:
    """Names this machine, or this container, among all that share a folder, over restarts of the machine.

    It stays the same in a process, even if the machine is renamed meanwhile. Two machines of the same name are
    distinguished by the id that the system was given when it was installed.

    Example:
        >>> shown_host(this_host()) == socket.gethostname()
        True
    """
    name = socket.gethostname()
    try:
        # Programs are asked not to write the id itself anywhere.
        machine = hashlib.sha256(b"tfdist:" + _MACHINE.read_bytes().strip()).hexdigest()[:8]
    except OSError:
        return name
    return f"{name}#{machine}"


def shown_host(host: str) -> str:
    """The name of a host, for people.

    Example:
        >>> shown_host("node-7#1a2b3c4d")
        'node-7'
    """
    return host.partition("#")[0]
