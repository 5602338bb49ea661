"""Whether the process behind a TensorFlow server's address still exists, known at once and without any protocol."""

from __future__ import annotations

import contextlib
import random
import socket
import time

from tfdist.cluster import address, sockets

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
_CONNECT_SECONDS = 5.0
# Refused: nobody listens there any more. Anything else may be the network's fault for a while.
_UNREACHABLE_SECONDS = 10.0
# How the chief of a roll call greets; a TensorFlow server begins with an HTTP/2 frame.
_ROLL_CALL = b"{"
# A machine that has lost its power closes no connection: it is asked after 10 s, and given up 15 s later.
_KEEP_ALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


class ServerWatch:
    """Holds a connection to a TensorFlow server. The kernel closes it when the process ends, however it ends.

    gRPC hangs up on a connection that says nothing (after a minute); then another one is made, which only works as long
    as the process is there. A stopped process (SIGSTOP) still exists.

    Args:
        place: `host:port` of the server.

    Example:
        >>> watch = ServerWatch("127.0.0.1:3000")
        >>> if watch.reach(within=60.0):
        ...     watch.wait()  # returns once the process is gone
    """

    def __init__(self, place: str) -> None:
        self._place = address.split(place)
        self._connection: socket.socket | None = None

    def reach(self, within: float) -> bool:
        """Waits until the server listens; returns whether it does.

        Args:
            within: for how many seconds to try.
        """
        deadline, pause = time.monotonic() + within, _FIRST_PAUSE
        while True:
            with contextlib.suppress(OSError):
                self._connection = self._connect()
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(min(pause, max(deadline - time.monotonic(), 0.0)))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def wait(self) -> None:
        """Returns when the process that was reached is gone."""
        while self._connection is not None:
            was_a_server = self._listen(self._connection)
            sockets.close_without_trace(self._connection)
            self._connection = self._reconnect() if was_a_server else None

    def _listen(self, connection: socket.socket) -> bool:
        """Reads until the connection ends; returns whether a TensorFlow server was at its other end."""
        first = True
        with contextlib.suppress(OSError):
            while data := connection.recv(4096):
                if first and data.startswith(_ROLL_CALL):
                    return False  # the next job's chief, at the same address
                first = False
        return True

    def _reconnect(self) -> socket.socket | None:
        deadline = time.monotonic() + _UNREACHABLE_SECONDS
        while True:
            try:
                return self._connect()
            except ConnectionRefusedError:
                return None
            except OSError:
                if time.monotonic() >= deadline:
                    return None
            time.sleep(_LONGEST_PAUSE * random.SystemRandom().uniform(0.5, 1.0))

    def _connect(self) -> socket.socket:
        connection = socket.create_connection(self._place, timeout=_CONNECT_SECONDS)
        if connection.getsockname() == connection.getpeername():
            # Connecting to a free local port can, by chance, be given that very port: the socket talks to itself.
            sockets.close_without_trace(connection)
            raise ConnectionRefusedError
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE:
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        connection.settimeout(None)
        return connection
