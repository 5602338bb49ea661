"""Connections between two processes of a job that both know what comes next: bytes, into memory that is there."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

from tfdist.cluster import sockets

# Whether it goes on, the three numbers of a `Header`.
_HEADER = struct.Struct("<?QQQ")
_LONGEST_TEXT = 500
_LAST_WORDS_SECONDS = 1.0
_CHECK_MILLISECONDS = 1000.0
# So much of each direction at a time, so that neither waits for the other.
_PIECE = 1 << 20


class ExchangeError(ConnectionError):
    """An exchange cannot go on: a process is gone, does not come, or exchanges something else."""


class Header(NamedTuple):
    """What a process exchanges; the same on all of them.

    Attributes:
        number: how many exchanges there have been.
        size: bytes that a process has.
        kind: checksum of dtype and shape.
    """

    number: int
    size: int
    kind: int


class Link:
    """A connection to another process.

    Args:
        connected: a connected TCP socket, which it takes over.
        name: of the other process, such as "worker 1 (host:port)".
        timeout: how long to wait for the other process, in seconds.
        lost: is asked now and then while it is waited for; says who is known to be lost, if somebody is.

    Attributes:
        name: the same.
    """

    def __init__(self, connected: socket.socket, name: str, timeout: float, lost: Callable[[], str]) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setblocking(False)
        self.name = name
        self._timeout = timeout
        self._lost = lost
        self._socket = connected

    def send(self, data: bytes | memoryview) -> None:
        """Sends all of it.

        Raises:
            ExchangeError: if the other process is gone, or does not take it in time.
        """
        transfer(self, memoryview(data), None, memoryview(b""))

    def receive(self, into: bytearray | memoryview) -> None:
        """Fills memory.

        Raises:
            ExchangeError: if the other process is gone, or does not send so much in time.
        """
        transfer(None, memoryview(b""), self, memoryview(into))

    def send_header(self, header: Header, data: bytes = b"") -> None:
        """Says what this process exchanges, and sends some of it; `expect_header` is the other end."""
        self.send(_HEADER.pack(True, *header) + data)

    def expect_header(self, own: Header) -> None:
        """Hears what the other process exchanges.

        Raises:
            ExchangeError: if that is something else, or the process has failed: with the text that it has sent.
        """
        said = bytearray(_HEADER.size)
        self.receive(said)
        goes_on, *numbers = _HEADER.unpack(said)
        if not goes_on:
            text = bytearray(min(numbers[0], _LONGEST_TEXT))
            self.receive(text)
            raise ExchangeError(text.decode(errors="replace"))
        theirs = Header(*numbers)
        if theirs != own:
            raise ExchangeError(
                f"Received: exchange {theirs.number} of {self.name}, {theirs.size} bytes. Expected: what others have, "
                f"exchange {own.number}, {own.size} bytes, of the same dtype and shape. Every process has to make the "
                "same calls in the same order: look for code that only one rank runs"
            )

    def send_failure(self, text: str) -> None:
        """Tells the other process, which expects a header, why this one does not go on."""
        data = text.encode()[:_LONGEST_TEXT]
        with contextlib.suppress(OSError):
            self._socket.settimeout(_LAST_WORDS_SECONDS)
            self._socket.sendall(_HEADER.pack(False, len(data), 0, 0) + data)

    def close(self) -> None:
        """Ends the connection: whoever waits at its other end is told."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def fileno(self) -> int:
        """Its file descriptor, for `select.poll`."""
        return self._socket.fileno()

    def try_to_send(self, data: memoryview) -> int:
        """Sends what the system takes at once; returns the number of bytes."""
        try:
            return self._socket.send(data[:_PIECE])
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ExchangeError(f"{self.name} is gone: {sockets.reason_of(error)}") from None

    def try_to_receive(self, into: memoryview) -> int:
        """Receives what is there; returns the number of bytes."""
        try:
            count = self._socket.recv_into(into[:_PIECE])
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ExchangeError(f"{self.name} is gone: {sockets.reason_of(error)}") from None
        if not count:
            raise ExchangeError(f"{self.name} is gone: it has ended its connection")
        return count

    def check(self, waited: float) -> None:
        """Is called now and then while nothing moves.

        Raises:
            ExchangeError: if that has lasted for too many seconds, or somebody is lost.
        """
        if text := self._lost():
            raise ExchangeError(text)
        if waited > self._timeout:
            raise ExchangeError(f"{self.name} has not come to this exchange within {self._timeout:g} s")


def transfer(to: Link | None, data: memoryview, source: Link | None, into: memoryview) -> None:
    """Sends to one process while another one, or the same, sends to this one.

    Args:
        to: who gets `data`; `None` if it is empty.
        data: bytes.
        source: who fills `into`; `None` if it is empty.
        into: memory for bytes.

    Raises:
        ExchangeError: if one of them is gone, or too slow.
    """
    moved_at = time.monotonic()
    while data or into:
        sent = to.try_to_send(data) if data else 0
        received = source.try_to_receive(into) if into else 0
        data, into = data[sent:], into[received:]
        if sent or received:
            moved_at = time.monotonic()
            continue
        poller = select.poll()
        # One registration for both directions of one link: a second one would replace the first.
        events: dict[Link, int] = {}
        if data:
            events[to] = select.POLLOUT
        if into:
            events[source] = events.get(source, 0) | select.POLLIN
        for link, event in events.items():
            poller.register(link, event)
        if not poller.poll(_CHECK_MILLISECONDS):
            for link in events:
                link.check(time.monotonic() - moved_at)
