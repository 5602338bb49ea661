"""Addresses of tasks (the text `host:port`), and sockets bound and connected as TensorFlow's server needs it."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import struct


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
    if not isinstance(address, str):
        raise ValueError(f'address {address!r} is not text; write it as "host:port"')
    if "://" in address:
        raise ValueError(f'address {address!r} starts with a protocol; write only "host:port"')
    if address != address.strip() or any(character.isspace() for character in address):
        raise ValueError(f'address {address!r} contains white space; write it as "host:port"')
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port or address.endswith("]"):
        raise ValueError(f'address {address!r} has no host or no port; write it as "host:port"')
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f'address {address!r} is ambiguous; write an IPv6 address in brackets, as "[::1]:2222"')
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ValueError(f"address {address!r} has port {port}; use a number from 1 to 65535")
    return host, int(port)


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


def is_known(host: str | None) -> bool:
    """Whether a host name has an address here.

    Example:
        >>> is_known("localhost"), is_known("no.such.host.invalid")
        (True, False)
    """
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return False
    return True


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
    """Whether a host is this machine.

    Raises:
        socket.gaierror: If it has no address; UnicodeError if it cannot be a name.

    Example:
        >>> is_own("localhost"), is_own("192.0.2.7")
        (True, False)
    """
    try:
        bind_host(host, 0).close()
    except socket.gaierror:
        raise
    except OSError as error:
        return error.errno in (errno.EADDRINUSE, errno.EACCES)
    return True


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
