"""Which process a process id means: another process may have got the same id since."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
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

    def signal(self, number: signal.Signals) -> bool:
        """Sends it a signal. Another process that has got the same id since gets none.

        Returns:
            Whether it was there.
        """
        try:
            # While this is open, the kernel gives the id to no other process.
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if not self.is_alive:
                return False
            signal.pidfd_send_signal(descriptor, number)
            return True
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
