"""How long a message takes from one process to another, and how many bytes go through in a second.

Both ends prove first that they belong to the job. The bytes that are then measured have no codes, and are thrown away
where they arrive: the time is that of the network, not of this program.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tfdist.cluster import sockets
from tfdist.cluster.connections import ENDS, Connection, Listener, authenticate, framed, leave_without_trace
from tfdist.launcher.check.answers import Answer

_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 30.0
_PINGS = 20
# Blocks grow until one takes long enough to be measured.
_SMALLEST, _LARGEST = 64 << 10, 4 << 20
_LONG_SECONDS = 0.05
_LONGEST = 300  # of a problem that another process tells


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

    @classmethod
    def read(cls, answer: Answer) -> Link:
        """What another process has measured."""
        if "problem" in answer:
            return cls(problem=answer.text("problem", _LONGEST))
        return cls(answer.real("latency"), answer.real("bandwidth"))


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

    def close(self) -> None:
        """Stops."""
        self._listener.close()

    def _answer(self, connection: Connection) -> None:
        authenticate(connection, self._token, first=True, seal=False)
        while True:
            connection.skip_bytes()
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
        connection = framed(sockets.connect((host, port), _CONNECT_SECONDS))
        authenticate(connection, token, first=False, seal=False)
        return connection
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
    return Link(problem=sockets.reason_of(error))


def _bandwidth(connection: Connection, latency: float) -> float:
    block = os.urandom(_LARGEST)  # a link may compress
    size, best = _SMALLEST, 0.0
    while True:
        seconds = _seconds(connection, block[:size])
        seconds -= min(latency, seconds / 2)  # a small block may be faster than the median of the pings
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
    """The ranks to which a process measures, in order: at each step no two processes measure to the same one.

    Example:
        >>> partners(1, 4)
        [2, 3, 0]
    """
    return [(rank + step) % size for step in range(1, size)]
