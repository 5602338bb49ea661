"""How long a message takes from one process to another, and how many bytes go through in a second."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

from tfdist.cluster import sockets
from tfdist.cluster.authentication import ENDS, authenticate, leave_without_trace
from tfdist.cluster.listener import Listener

_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 30.0
_PINGS = 20
# Blocks grow until one takes long enough to be measured.
_SMALLEST, _LARGEST = 64 << 10, 4 << 20
_LONG_SECONDS = 0.05


@dataclasses.dataclass(frozen=True)
class Link:
    """What was measured from one process to another.

    Attributes:
        latency: seconds that a message and its answer take, the median.
        bandwidth: bytes a second, one way.
        problem: why there was nothing to measure.
    """

    latency: float | None = None
    bandwidth: float | None = None
    problem: str | None = None


class EchoServer:
    """Answers each message with a short one.

    Args:
        token: what the others know.
        port: where it listens, on every interface.
    """

    def __init__(self, token: bytes, port: int):
        self._token = token
        # The port is reserved by this process already.
        self._listener = Listener(sockets.bind_everywhere(port, reuse=True), self._answer, "tfdist-echo")
        self._listener.start()

    def close(self) -> None:
        """Stops."""
        self._listener.close()

    def _answer(self, accepted: socket.socket) -> None:
        with contextlib.suppress(*ENDS), authenticate(accepted, self._token, first=True) as connection:
            while True:
                connection.recv_bytes()
                connection.send_bytes(b"!")


def measure(places: Sequence[tuple[str, int]], token: bytes) -> list[Link]:
    """Measures the ways to `EchoServer`s, one after the other.

    Args:
        places: host and port of each.
        token: what they know.
    """
    with ThreadPoolExecutor(max_workers=max(1, len(places))) as pool:
        # At once: a host that is cut off does not answer at all.
        connections = list(pool.map(lambda place: _connected(*place, token), places))
    return [found if isinstance(found, Link) else _measured(found) for found in connections]


def _connected(host: str, port: int, token: bytes) -> Connection | Link:
    try:
        return authenticate(socket.create_connection((host, port), timeout=_CONNECT_SECONDS), token, first=False)
    except ENDS as error:
        return _blocked(error)


def _measured(connection: Connection) -> Link:
    try:
        pings = [_seconds(connection, b"?") for _ in range(_PINGS)]
        latency = statistics.median(pings)
        return Link(latency, _bandwidth(connection, latency))
    except ENDS as error:
        return _blocked(error)
    finally:
        leave_without_trace(connection)


def _blocked(error: BaseException) -> Link:
    return Link(problem=getattr(error, "strerror", None) or str(error) or type(error).__name__)


def _bandwidth(connection: Connection, latency: float) -> float:
    block = os.urandom(_LARGEST)  # a link may compress
    size, best = _SMALLEST, 0.0
    while True:
        seconds = max(_seconds(connection, block[:size]) - latency, 1e-9)
        best = max(best, size / seconds)
        if seconds > _LONG_SECONDS or size == _LARGEST:
            return best
        size *= 2


def _seconds(connection: Connection, message: bytes) -> float:
    started = time.perf_counter()
    connection.send_bytes(message)
    if not connection.poll(_ANSWER_SECONDS):
        raise TimeoutError(f"no answer within {_ANSWER_SECONDS:g} s")
    connection.recv_bytes()
    return time.perf_counter() - started


def partners(rank: int, size: int) -> list[int]:
    """To whom a process measures, in which order: at each step everybody is measured to by one other.

    Example:
        >>> partners(1, 4)
        [2, 3, 0]
    """
    return [(rank + step) % size for step in range(1, size)]
