"""Connections between the processes of a job: a listener, a proof that both ends belong, messages, and how to connect.

A message is bytes with their length before them, the framing of `multiprocessing.connection`; nothing is unpickled.
Where the processes share a secret, each end proves that it knows it by an HMAC of a random challenge, which is that
module's protocol too: the secret is never sent.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TypeVar

from tfdist.cluster import sockets

T = TypeVar("T")
_HANDSHAKE_SECONDS = 10
# The errors by which a connection ends. Before Python 3.12, a stranger's first message is an AssertionError.
ENDS = (OSError, EOFError, AuthenticationError, AssertionError)
_CUT_SECONDS = 5.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5


class Listener:
    """A listening socket that gives each connection a thread, from now on until it is closed.

    Args:
        bound: A bound TCP socket, which it takes over.
        serve: Is called with each connection, in a thread of its own. When it returns, or raises one of `ENDS` or a
            ValueError, the connection is closed by a reset.
        name: The name of the threads.

    Attributes:
        port: Where it listens.

    Raises:
        OSError: If another process listens there.
    """

    def __init__(self, bound: socket.socket, serve: Callable[[Connection], None], name: str):
        self._bound, self._serve, self._name = bound, serve, name
        self._open: set[Connection] = set()
        self._closing = False
        self._ended = threading.Condition()
        try:
            bound.listen(socket.SOMAXCONN)
        except OSError:
            bound.close()
            raise
        self.port: int = bound.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening; whoever is connected is served until its connection ends."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._bound.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._bound.close()

    def end(self) -> None:
        """Stops listening, and ends all connections: the port is free on return."""
        self.close()
        with self._ended:
            for connection in self._open:
                with contextlib.suppress(OSError), socket_of(connection) as same:
                    same.shutdown(socket.SHUT_RD)  # wakes the thread, which closes it, and sends nothing
            self._ended.wait_for(lambda: not self._open, _CUT_SECONDS)

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._bound.accept()
            except OSError:
                if self._closing:
                    return
                # Too many open files, no memory, somebody who has hung up already: others can still connect.
                time.sleep(0.01)
                continue
            try:
                connection = framed(accepted)
            except OSError:  # it has ended already
                accepted.close()
                continue
            with self._ended:
                self._open.add(connection)
            try:
                threading.Thread(target=self._run, args=(connection,), name=f"{self._name}-client", daemon=True).start()
            except RuntimeError:  # there are too many threads: whoever it is may come again
                self._close(connection)

    def _run(self, connection: Connection) -> None:
        try:
            with contextlib.suppress(*ENDS, ValueError):
                self._serve(connection)
        finally:
            self._close(connection)

    def _close(self, connection: Connection) -> None:
        with self._ended:
            self._open.discard(connection)
            leave_without_trace(connection)
            self._ended.notify_all()


def framed(connected: socket.socket) -> Connection:
    """A connection that carries messages, over a connected TCP socket, which it takes over."""
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return Connection(connected.detach())


def authenticate(connection: Connection, token: bytes, first: bool) -> None:
    """Lets each end of a new connection prove that it knows the secret; the server is the `first` to challenge.

    Raises:
        multiprocessing.AuthenticationError: If the other end does not know the secret.
        OSError: If it sends nothing.
    """
    with patience(connection, _HANDSHAKE_SECONDS):
        try:
            for challenges in (first, not first):
                (deliver_challenge if challenges else answer_challenge)(connection, token)
        except ValueError as error:
            raise OSError(
                f"this Python authenticates with MD5, which is not allowed here ({error}); 3.12 does not"
            ) from None


@contextlib.contextmanager
def socket_of(connection: Connection) -> Iterator[socket.socket]:
    """The socket of a connection, by another descriptor."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        # With `socket.setdefaulttimeout` both ends of the copy would be non-blocking: it is a flag of what is open.
        same.settimeout(None)
        yield same


@contextlib.contextmanager
def patience(connection: Connection, seconds: float) -> Iterator[None]:
    """For how long the other end may send nothing while something is read from it; then there is an OSError."""
    _set_seconds(connection, socket.SO_RCVTIMEO, seconds)
    yield
    _set_seconds(connection, socket.SO_RCVTIMEO, 0.0)


def limit_sends(connection: Connection, seconds: float) -> None:
    """From now on the other end may take nothing for so long while something is sent to it."""
    _set_seconds(connection, socket.SO_SNDTIMEO, seconds)


def send(connection: Connection, message: object) -> None:
    """Sends JSON."""
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection, largest: int | None = None) -> dict:
    """Reads a JSON object of at most so many bytes.

    Raises:
        EOFError: If the connection has ended.
        OSError: If it breaks, or what comes is no such message; that has no errno.
    """
    try:
        message = json.loads(connection.recv_bytes(largest))
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise OSError("it sends no JSON object")
    return message


def leave_without_trace(connection: Connection) -> None:
    """Closes a connection by a reset, see `sockets.close_without_trace`."""
    with contextlib.suppress(OSError), socket_of(connection) as same:
        sockets.close_without_trace(same)
    connection.close()


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


def _set_seconds(connection: Connection, option: int, seconds: float) -> None:
    with socket_of(connection) as same:
        whole = int(seconds)
        same.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", whole, int(1e6 * (seconds - whole))))
