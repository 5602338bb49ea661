"""Connections of which both ends have proved that they know a secret, which itself is never sent.

The protocol is that of `multiprocessing.connection`: an HMAC of a random challenge. Nothing is unpickled; who uses the
connection sends bytes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from tfdist.cluster import sockets

_HANDSHAKE_SECONDS = 10
# What a connection ends with; before Python 3.12, a stranger's first words are an AssertionError.
ENDS = (OSError, EOFError, AuthenticationError, AssertionError)


def authenticate(connected: socket.socket, token: bytes, first: bool) -> Connection:
    """The connection, once each has proved to the other that it knows the secret.

    Args:
        connected: a connected TCP socket, which the result takes over.
        token: the secret.
        first: whether this side challenges first: that of the server.

    Raises:
        multiprocessing.AuthenticationError: if the other one does not.
        OSError: if it is silent.
    """
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _HANDSHAKE_SECONDS, 0))
    connection = Connection(connected.detach())
    try:
        for challenges in (first, not first):
            (deliver_challenge if challenges else answer_challenge)(connection, token)
    except ValueError as error:
        connection.close()
        raise OSError(
            f"this Python authenticates with MD5, which is not allowed here ({error}); 3.12 does not"
        ) from None
    except BaseException:
        connection.close()
        raise
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    return connection


def leave_without_trace(connection: Connection) -> None:
    """Closes a connection by a reset, see `sockets.close_without_trace`."""
    with contextlib.suppress(OSError):
        sockets.close_without_trace(socket.socket(fileno=os.dup(connection.fileno())))
    connection.close()
