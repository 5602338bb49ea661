"""Sockets bound the way TensorFlow's server binds: to every interface, IPv6 and IPv4 at once where there is IPv6."""

from __future__ import annotations

import contextlib
import socket
import struct


def bind_everywhere(port: int, *, reuse: bool) -> socket.socket:
    """A TCP socket bound to a port on every interface, not listening.

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


def bind_host(host: str, port: int, *, reuse: bool) -> socket.socket:
    """The same for one host: its first address that can be bound.

    Raises:
        OSError: If none can; socket.gaierror if the host has no address.

    Example:
        >>> with bind_host("localhost", 0, reuse=False) as bound:
        ...     bound.getsockname()[1] > 0
        True
    """
    failure: OSError | None = None
    for family, _, _, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE):
        try:
            return _bind(family, str(place[0]), port, reuse)
        except OSError as error:
            failure = failure or error
    raise failure or OSError(f"{host} has no address")


def close_without_trace(connection: socket.socket) -> None:
    """Closes a connection by a reset, which leaves no TIME_WAIT state behind that would block the port."""
    with contextlib.suppress(OSError):  # the other end may be gone already: nothing is left to linger then
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


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
