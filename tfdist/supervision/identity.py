"""Which process a process id means: another process may have got the same id since."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MACHINE = Path("/etc/machine-id")
# Positions in /proc/PID/stat behind the command's name. psutil tells the start as a time of day, which changes when the
# clock is set; event logs and records of jobs keep the kernel's number.
_STATE, _START = 0, 19


@dataclass(frozen=True)
class Identity:
    """A process, told from all others that have had the same id.

    Attributes:
        pid: the process id.
        start: when it was started, in ticks since the machine was.
        boot: the id that the kernel has drawn when the machine was started.

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
        return cls(pid, int(fields[_START]), _BOOT.read_text().strip())

    @property
    def is_alive(self) -> bool:
        """Whether this very process runs."""
        return Identity.of(self.pid) == self

    @property
    def age(self) -> float:
        """Seconds since it was started, whether it still runs or not; setting the clock does not change them."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) - self.start / os.sysconf("SC_CLK_TCK")

    def signal(self, number: signal.Signals) -> bool:
        """Sends it a signal. Another process that has got the same id since gets none.

        Returns:
            Whether it was there, and is ours.
        """
        try:
            # While this is open, the kernel gives the id to no other process.
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        except (AttributeError, OSError):
            # Linux before 5.3, or a sandbox that forbids the call: the id could pass to another process between these
            # two lines, for which the kernel would first have to use up all other ids.
            return self.is_alive and _kill(self.pid, number)
        try:
            if not self.is_alive:
                return False
            signal.pidfd_send_signal(descriptor, number)
            return True
        except (ProcessLookupError, PermissionError):
            return False
        finally:
            os.close(descriptor)


def _kill(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


@functools.cache
def this_host() -> str:
    """Names this machine, or this container, among all that share a folder, over restarts of the machine.

    It stays the same in a process, even if the machine is renamed meanwhile. Two machines of the same name are told
    apart by the id that the system was given when it was installed.

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


def host_in_file_name(host: str) -> str:
    """The same, as a part of a file's name.

    Example:
        >>> host_in_file_name("node-7#1a2b3c4d")
        'node-7-1a2b3c4d'
    """
    return re.sub(r"[^A-Za-z0-9.-]", "-", host)
