"""Addresses of tasks: the text `host:port`."""

from __future__ import annotations

import ipaddress


def split(address: str) -> tuple[str, int]:
    """Splits `host:port`; an IPv6 host stands in brackets, which the result leaves out.

    Args:
        address: Such as `10.0.0.1:2222`, `node-1:2222` or `[::1]:2222`.

    Returns:
        The host and the port number.

    Raises:
        ValueError: If it is not of that form; the message says what to write.

    Example:
        >>> split("[::1]:2222")
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


def is_loopback(host: str) -> bool:
    """Whether a host, as written, means "this machine" on every machine.

    Example:
        >>> is_loopback("localhost"), is_loopback("127.0.0.1"), is_loopback("node-1")
        (True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"
