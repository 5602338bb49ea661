"""A connection that carries messages: bytes with their length before them, four bytes, the highest first.

Nothing is unpickled. After `seal` each message has a code before it, made of a key of its direction, its number and its
content: nobody who sits in between can alter, repeat, reorder or leave out any. What is sent can still be read.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import select
import socket
import threading
import time
from collections.abc import Iterable
from multiprocessing import AuthenticationError

from tfdist.cluster import sockets

_HEADER = 4
_CODE = 32
_LARGEST = 2**31 - 1
_CHUNK = 1 << 20
_PIECES = 64  # the system takes 1024 at once


class Connection:
    """Messages over a connected TCP socket, which it takes over. One thread may read while others send.

    Args:
        connected: The socket.

    Attributes:
        known: Whether the other end has shown that it belongs to this job; until then a `Listener` may drop it.
        peer: The address of the other end.

    Raises:
        OSError: If it has ended already.
    """

    def __init__(self, connected: socket.socket):
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.known = False
        self.peer = sockets.plain(str(connected.getpeername()[0]))
        self.socket = connected
        # Both in pieces: a message is copied once where it is read, and not at all where it is sent.
        self._received: list[bytes] = []
        self._count = 0  # of the bytes in it
        self._unsent: list[memoryview] = []
        self._sending = threading.Lock()
        self._keys: tuple[bytes, bytes] | None = None
        self._counts = [0, 0]

    def seal(self, sends: bytes, receives: bytes) -> None:
        """From now on each message has a code before it, made with a key for each direction."""
        self._keys = sends, receives

    def send_bytes(self, data: bytes, deadline: float | None = None) -> None:
        """Sends a message, and waits until the system has taken all of it.

        Raises:
            TimeoutError: If the other end does not take it until the deadline, on `time.monotonic`'s clock.
            OSError: If the connection is broken.
        """
        self.post(data)
        while not self.flush():
            self._wait(select.POLLOUT, deadline)

    def post(self, data: bytes) -> None:
        """Sends as much of a message as the system takes at once, without waiting; `flush` sends the rest.

        Raises:
            OSError: If the connection is broken.
        """
        with self._sending:
            code = self._code(0, data) if self._keys else b""
            before = (len(code) + len(data)).to_bytes(_HEADER, "big") + code
            self._unsent += [memoryview(piece) for piece in (before, data) if piece]
        self.flush()

    def flush(self) -> bool:
        """Sends what the system takes of the rest, without waiting; returns whether nothing is left.

        Raises:
            OSError: If the connection is broken.
        """
        with self._sending:
            with contextlib.suppress(BlockingIOError):
                while self._unsent:
                    sent = self.socket.sendmsg(self._unsent[:_PIECES])
                    while self._unsent and sent >= len(self._unsent[0]):
                        sent -= len(self._unsent.pop(0))
                    if sent:
                        self._unsent[0] = self._unsent[0][sent:]
            return not self._unsent

    @property
    def pending(self) -> bool:
        """Whether the other end has not taken all yet."""
        return bool(self._unsent)

    def recv_bytes(self, largest: int | None = None, deadline: float | None = None) -> bytes:
        """Reads a message.

        Args:
            largest: The most bytes that are accepted.
            deadline: Until when all of it has to be there, on `time.monotonic`'s clock.

        Raises:
            EOFError: If the connection has ended.
            TimeoutError: If the message is not complete in time.
            multiprocessing.AuthenticationError: If somebody has altered it, on a sealed connection.
            OSError: If the connection breaks, or the message is too large; that has no errno.
        """
        length = int.from_bytes(self.first(_HEADER, deadline), "big")
        coded = _CODE if self._keys else 0
        most = (_LARGEST if largest is None else largest) + coded
        if length > most:
            raise OSError(f"bad message length: it announces {length} bytes, expected {most} at most")
        start = _HEADER + min(coded, length)
        code = self.first(start, deadline)[_HEADER:]
        self._fill(_HEADER + length, deadline)
        begin, *rest = self._received
        data = b"".join((begin[start:], *rest))
        self._received, self._count = [], 0
        if self._keys and not hmac.compare_digest(code, self._code(1, data)):
            raise AuthenticationError("somebody in between has altered, repeated or left out a message")
        return data

    def skip_bytes(self) -> None:
        """Reads a message without keeping it, on a connection that is not sealed: it has no code that could be checked.

        Raises:
            EOFError: If the connection has ended.
            OSError: If it breaks.
        """
        left = int.from_bytes(self.first(_HEADER), "big")
        self._received, self._count = [], 0
        into = memoryview(bytearray(min(left, _CHUNK)))
        while left:
            try:
                got = self.socket.recv_into(into[:left])
            except BlockingIOError:
                self._wait(select.POLLIN, None)
                continue
            if not got:
                raise EOFError
            left -= got

    def first(self, count: int, deadline: float | None = None) -> bytes:
        """The first bytes of the next message and its length, which stay there to be read.

        Raises:
            EOFError: If the connection has ended.
            TimeoutError: If they are not there in time.
            OSError: If the connection breaks.
        """
        self._fill(count, deadline)
        self._received = [b"".join(self._received)]
        return self._received[0][:count]

    def poll(self, seconds: float | None = 0.0) -> bool:
        """Waits until there is something to read, or the connection ends; for ever with `None`."""
        if self._received:
            return True
        with contextlib.suppress(TimeoutError):
            self._wait(select.POLLIN, None if seconds is None else time.monotonic() + seconds)
            return True
        return False

    def shutdown(self, how: int = socket.SHUT_RDWR) -> None:
        """Ends it without giving up its descriptor: whoever reads from it wakes up."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(how)

    def close(self) -> None:
        """Closes it; a second call does nothing."""
        self.socket.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _fill(self, count: int, deadline: float | None) -> None:
        while self._count < count:
            try:
                more = self.socket.recv(min(count - self._count, _CHUNK))
            except BlockingIOError:
                self._wait(select.POLLIN, deadline)
                continue
            if not more:
                raise EOFError
            self._received.append(more)
            self._count += len(more)
            if deadline is not None and self._count < count and time.monotonic() > deadline:
                raise TimeoutError("timed out")

    def _wait(self, event: int, deadline: float | None) -> None:
        left = None if deadline is None else deadline - time.monotonic()
        poller = select.poll()  # not `select.select`, which knows no descriptor above 1023
        try:
            poller.register(self.socket, event)
        except ValueError:  # another thread has closed it
            raise OSError(errno.EBADF, "closed") from None
        if not poller.poll(None if left is None else max(0.0, 1000 * left)) and left is not None:
            raise TimeoutError("timed out")

    def _code(self, receives: int, data: bytes) -> bytes:
        number = self._counts[receives]
        self._counts[receives] += 1
        code = hmac.new(self._keys[receives], number.to_bytes(8, "big"), "sha256")
        code.update(data)
        return code.digest()


def framed(connected: socket.socket) -> Connection:
    """A connection that carries messages, over a connected TCP socket, which it takes over."""
    return Connection(connected)


def send(connection: Connection, message: object, deadline: float | None = None) -> None:
    """Sends JSON; see `Connection.send_bytes`."""
    connection.send_bytes(json.dumps(message).encode(), deadline)


def receive(connection: Connection, largest: int | None = None, deadline: float | None = None) -> dict:
    """Reads a JSON object of at most so many bytes; see `Connection.recv_bytes`.

    Raises:
        EOFError: If the connection has ended.
        OSError: If it breaks, or what comes is no such message; that has no errno.
    """
    return object_of(connection.recv_bytes(largest, deadline))


def object_of(text: bytes) -> dict:
    """The JSON object that a text is.

    Raises:
        OSError: If it is none; without errno.
    """
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise OSError("it sends no JSON object")
    return message


def drain(connections: Iterable[Connection], deadline: float) -> None:
    """Sends what is left to all at once; who is slow is in nobody's way, and ends nothing."""
    left = {connection.socket.fileno(): connection for connection in connections if connection.pending}
    poller = select.poll()
    for descriptor in left:
        if descriptor >= 0:
            poller.register(descriptor, select.POLLOUT)
    left.pop(-1, None)
    while left and time.monotonic() < deadline:
        for descriptor, _ in poller.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
            done = True
            with contextlib.suppress(OSError):  # its end is noticed by whoever reads from it
                done = left[descriptor].flush()
            if done:
                poller.unregister(descriptor)
                del left[descriptor]


def leave_without_trace(connection: Connection) -> None:
    """Closes a connection by a reset, see `sockets.close_without_trace`."""
    sockets.close_without_trace(connection.socket)
