"""Addresses of tasks (the text `host:port`), and sockets bound and connected as TensorFlow's server needs it."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import random
import re
import socket
import struct
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
_ADDRESS = re.compile(r"(\[(?P<ipv6>[^][\s]+)]|(?P<host>[^][:/\s]+)):(?P<port>[0-9]{1,5})")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5


def split_address(address: str) -> tuple[str, int]:
    """Splits `host:port`; an IPv6 host stands in brackets, which the result leaves out.

    Args:
        address: Such as `10.0.0.1:2222`, `node-1:2222` or `[::1]:2222`.

    Raises:
        ValueError: If it is not of that form; the message says what to write.

    Example:
        >>> split_address("[::1]:2222")
        ('::1', 2222)
    """
    found = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if found is None or not 1 <= int(found["port"]) <= 65535:
        raise ValueError(
            f'address {address!r} is not of the form "host:port", or "[::1]:port", with a port from 1 to 65535'
        )
    return found["ipv6"] or found["host"], int(found["port"])


def join_address(host: str, port: int) -> str:
    """The text for a host and a port.

    Example:
        >>> join_address("::1", 2222), join_address("node-1", 2222)
        ('[::1]:2222', 'node-1:2222')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reason_of(error: BaseException) -> str:
    """What the system, or else the error itself, says about why something has failed.

    Example:
        >>> reason_of(ConnectionRefusedError(111, "Connection refused")), reason_of(EOFError())
        ('Connection refused', 'EOFError')
    """
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def is_loopback(host: str) -> bool:
    """Whether a host, as written, means "this machine" on every machine.

    Example:
        >>> is_loopback("localhost"), is_loopback("127.0.1.1"), is_loopback("10.0.0.1"), is_loopback("node-1")
        (True, True, False, False)
    """
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def plain(place: str) -> str:
    """An address without what a socket adds to it.

    Example:
        >>> plain("::ffff:10.0.0.1"), plain("fe80::1%eth0")
        ('10.0.0.1', 'fe80::1')
    """
    host = place.partition("%")[0]
    mapped = getattr(ipaddress.ip_address(host), "ipv4_mapped", None)
    return str(mapped) if mapped else host


def connect(place: tuple[str, int], seconds: float) -> socket.socket:
    """A TCP connection to another socket than itself.

    The system may give a connecting socket the very port of this machine that it connects to, if nobody listens there.
    The socket then talks to itself, although the connection should have been refused.

    Args:
        place: Host and port.
        seconds: How long to wait for an answer; also the timeout of the result.

    Raises:
        OSError: If there is no connection; ConnectionRefusedError if nobody listens there.
    """
    connection = socket.create_connection(place, timeout=seconds)
    if connection.getsockname() == connection.getpeername():
        close_without_trace(connection)
        raise ConnectionRefusedError("connection refused")
    return connection


def bind_everywhere(port: int, *, reuse: bool) -> socket.socket:
    """A TCP socket bound to a port on every interface, for IPv6 and IPv4 at once where there is IPv6; not listening.

    Args:
        port: The port number.
        reuse: Whether to set SO_REUSEADDR before the bind: then only a listening socket is in the way.

    Raises:
        OSError: If the port cannot be bound.

    Example:
        >>> with bind_everywhere(0, reuse=False) as bound:
        ...     bound.getsockname()[1] > 0
        True
    """
    return _bind(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET, "", port, reuse)


def bind_host(host: str, port: int) -> socket.socket:
    """A TCP socket bound, with SO_REUSEADDR, to a port of one host: on its first address that can be bound.

    Raises:
        OSError: If none can; socket.gaierror if the host has no address.

    Example:
        >>> with bind_host("localhost", 0) as bound:
        ...     bound.getsockname()[1] > 0
        True
    """
    failure: OSError | None = None
    for family, _, _, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE):
        try:
            return _bind(family, str(place[0]), port, reuse=True)
        except OSError as error:
            failure = failure or error
    raise failure or OSError(f"{host} has no address")


def is_own(host: str) -> bool:
    """Whether a host is this machine; not, if its name cannot be resolved.

    Example:
        >>> is_own("localhost"), is_own("192.0.2.7"), is_own("no.such.host.invalid")
        (True, False, False)
    """
    try:
        bind_host(host, 0).close()
    except (OSError, UnicodeError) as error:
        return getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES)
    return True


def addresses_of(host: str) -> set[str]:
    """The addresses of a host; none if its name cannot be resolved.

    Example:
        >>> addresses_of("127.0.0.1")
        {'127.0.0.1'}
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return set()
    return {plain(str(entry[4][0])) for entry in found}


def leave_no_trace(connection: Any) -> None:
    """Lets a socket end its connection by a reset, which leaves no TIME_WAIT state behind that would block the port."""
    with contextlib.suppress(OSError):  # the other end may be gone already: nothing is left to linger then
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def close_without_trace(connection: socket.socket) -> None:
    """Closes a connection by a reset."""
    leave_no_trace(connection)
    connection.close()


def notice_end(connected: socket.socket, probes: int = 6) -> None:
    """Lets the system notice, 10 s and 5 s a probe later, that the other host is gone, and send what is small at once.

    A machine that has lost its power closes no connection.
    """
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, probes)):
        connected.setsockopt(socket.IPPROTO_TCP, option, value)


# Sockets, and others that have a `fileno()`, which is -1 once they are closed.
_own: weakref.WeakSet[Any] = weakref.WeakSet()


def keep_from_children(connection: Any) -> None:
    """Closes a connection in processes that are forked later: it ends with this process, whatever they still do."""
    _own.add(connection)


def _close_copies() -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for connection in _own:
        if (number := connection.fileno()) >= 0:
            os.dup2(nowhere, number)  # closing it later closes nothing else
    os.close(nowhere)
    _own.clear()


os.register_at_fork(after_in_child=_close_copies)


class UnreachedError(Exception):
    """An attempt that failed; the text says why."""


def keep_trying(
    attempts: Mapping[str, Callable[[float], T]],
    deadline: float,
    problems: dict[str, str],
    waiting: Callable[[], object] = lambda: None,
) -> T:
    """Makes attempts in turn until one of them succeeds; each is made at least once.

    Args:
        attempts: By the place at which they are made. Each is given the seconds that are left, a tenth at least, and
            raises an `UnreachedError` or an OSError if it fails.
        deadline: Until when to try, on `time.monotonic`'s clock.
        problems: Is filled with why the last attempt at each place has failed.
        waiting: Is called after each round.

    Raises:
        UnreachedError: If none has succeeded.
    """
    pause = _FIRST_PAUSE
    while True:
        for place, attempt in attempts.items():
            if place in problems and time.monotonic() >= deadline:
                break
            try:
                return attempt(max(0.1, deadline - time.monotonic()))
            except (UnreachedError, OSError) as problem:
                problems[place] = str(problem)
        left = deadline - time.monotonic()
        if left <= 0:
            raise UnreachedError
        waiting()
        # A generator of its own: the program's random numbers stay those that it would get alone.
        time.sleep(min(pause * random.SystemRandom().uniform(0.5, 1.0), left))
        pause = min(2 * pause, _LONGEST_PAUSE)


def _bind(family: int, host: str, port: int, reuse: bool) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1 if host else 0)
        if reuse:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except BaseException:
        bound.close()
        raise
    return bound
