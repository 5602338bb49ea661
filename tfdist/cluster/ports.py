"""Reserving TCP ports for processes that are started later."""

from __future__ import annotations

import contextlib
import errno
import itertools
import random
import socket
from pathlib import Path

from tfdist.cluster import sockets
from tfdist.cluster.errors import ClusterError

_LINUX_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
# The end is where Linux begins with the ports of outgoing connections.
USUAL = 20000, 32768


class Reservation(contextlib.ExitStack):
    """Ports that are held until `close`, of which a second call does nothing; a context manager.

    A held port is bound, but nobody listens on it: a server that sets SO_REUSEADDR, as TensorFlow's does, can bind and
    listen over it, while a plain bind and every other reservation are refused.

    Attributes:
        ports: The port numbers.
    """

    def __init__(self, held: list[socket.socket]) -> None:
        super().__init__()
        self.ports = tuple(self.enter_context(holder).getsockname()[1] for holder in held)


def reserve(count: int, host: str | None = None, low: int | None = None, high: int | None = None) -> Reservation:
    """Reserves ports on this machine, safely against other reservations made at the same time.

    The ports are held on every interface whatever the host is, because TensorFlow's server binds to every interface.

    Args:
        count: How many.
        host: The address under which the processes will be reached, if it is to be checked that this machine has it.
        low: The lowest port to use; 20000 by default.
        high: The end of the range (not used itself). By default the start of the range from which the system takes
            the ports of outgoing connections, so that no such connection is in the way.

    Returns:
        The reservation; close it when the processes have ended.

    Raises:
        ClusterError: If the host is not an address of this machine, or too few ports are free.

    Example:
        >>> with reserve(2) as reservation:
        ...     len(set(reservation.ports))
        2
    """
    if host is not None and not sockets.is_own(host):
        raise ClusterError(
            f"host {host!r} is not an address of this machine; use {own_loopback()}, or one that `ip address` shows"
        )
    usual = default_range()
    low, high = low or usual[0], high or usual[1]
    candidates = range(low, high)
    # The system's randomness: processes forked at the same moment must not walk the same way.
    start = random.SystemRandom().randrange(len(candidates)) if candidates else 0
    free = filter(None, map(_hold, itertools.chain(candidates[start:], candidates[:start])))
    held = list(itertools.islice(free, count))
    if len(held) < count:
        Reservation(held).close()
        raise ClusterError(
            f"only {len(held)} of the {count} ports needed are free in {low} to {high - 1}; "
            "stop what uses them (see `ss -ltn`) or choose a wider range"
        )
    return Reservation(held)


def reserve_again(port: int) -> Reservation:
    """Reserves the port that another process, which has died, had on this machine.

    Connections of that process may not quite have ended: they are in the way of `reserve`, but not of a server.

    Raises:
        OSError: If a process listens there.

    Example:
        >>> with reserve(1) as reservation:
        ...     port = reservation.ports[0]
        >>> with reserve_again(port) as reservation:
        ...     reservation.ports == (port,)
        True
    """
    return Reservation([sockets.bind_everywhere(port, reuse=True)])


def ephemeral_low(path: Path = _LINUX_RANGE) -> int:
    """The lowest port that the system gives to outgoing connections.

    Example:
        >>> from pathlib import Path
        >>> ephemeral_low(Path("/does/not/exist"))
        32768
    """
    try:
        return int(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return USUAL[1]


def default_range() -> tuple[int, int]:
    """The ports that are used where none are named: those from 20000 to where those of outgoing connections begin.

    Example:
        >>> default_range()[0]
        20000
    """
    high = ephemeral_low()
    # If the ports of outgoing connections begin below, none would be left. They never take a port that is held.
    return USUAL[0], (high if high > USUAL[0] else USUAL[1])


def _hold(port: int) -> socket.socket | None:
    """The socket that holds a port; `None` if it is not free."""
    try:
        holder = sockets.bind_everywhere(port, reuse=False)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            return None
        raise
    # Set only after the bind. Bound without it, two reservations of a port refuse each other; set afterwards, it admits
    # the later bind of a server that sets it as well, and still nobody who does not.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return holder


def own_loopback() -> str:
    """The address of this machine for itself: 127.0.0.1, or ::1 where there is no IPv4.

    Example:
        >>> own_loopback()
        '127.0.0.1'
    """
    return next((host for host in ("127.0.0.1", "::1") if sockets.is_own(host)), "127.0.0.1")
