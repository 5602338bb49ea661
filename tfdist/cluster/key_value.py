"""A key-value store: texts that one process of a job keeps for all, where TensorFlow has no coordination service.

Messages are JSON, one array a message. Both ends have proved that they know the secret, and each message has a code
that nobody else can make (see connections/); nothing that comes from the network is ever unpickled.

client                        server
["join", 1]              -->               it is rank 1, which is gone when this connection ends
                         <--  [true]
["set", name, text]      -->
                         <--  [true]
["get", name, 5.0, 2]    -->               waits for a text of that name, 5 s at most, or until rank 2 is gone
                         <--  [text], [null] or []
["decide", name, text]   -->               keeps the text, unless there is one of that name
                         <--  [text]       the one that is kept
["delete", name, ""]     -->               nobody needs it any more
                         <--  [true]
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError

from tfdist.cluster import sockets
from tfdist.cluster.connections import (
    ENDS,
    Connection,
    Listener,
    UnreachedError,
    authenticate,
    framed,
    keep_trying,
    send,
)

# How long an answer may take, apart from the wait that was asked for: the server only looks it up.
_ANSWER_SECONDS = 20.0
_LARGEST_JOIN = 1024
# More than any wait here; a lock accepts no more than `threading.TIMEOUT_MAX`.
_LONGEST_WAIT = 1e6


class ProcessGoneError(ConnectionError):
    """The process that should have set a text is gone."""


class KeyValueServer:
    """Keeps the texts, and serves the other processes from a thread for each of them.

    Args:
        token: A secret that the clients know, too.
        size: How many processes there are, this one included; it stops listening when all have joined. By default it
            listens until it is closed.

    Attributes:
        port: Where it listens, on every interface.

    Example:
        >>> with KeyValueServer(b"secret") as server:
        ...     client = KeyValueClient(("localhost", server.port), b"secret", rank=1)
        ...     client.set("greeting", "hello")
        ...     client.close()
        ...     server.get("greeting", seconds=1.0)
        'hello'
    """

    def __init__(self, token: bytes, size: int | None = None):
        self._token, self._size = token, size
        self._texts: dict[str, str] = {}
        self._joined: set[int] = set()
        self._gone: set[int] = set()
        self._changed = threading.Condition()
        self._listener = Listener(sockets.bind_everywhere(0, reuse=False), self._serve, "tfdist-key-value", size or 0)
        self.port: int = self._listener.port

    def set(self, name: str, text: str) -> None:
        """Keeps a text; it replaces an earlier one of that name."""
        with self._changed:
            self._texts[name] = text
            self._changed.notify_all()

    def decide(self, name: str, text: str) -> str:
        """Keeps a text, unless there is one of that name; returns the one that is kept, the same to all who ask."""
        with self._changed:
            return self._texts.setdefault(name, text)

    def delete(self, name: str) -> None:
        """Forgets a text, if there is one of that name."""
        with self._changed:
            self._texts.pop(name, None)

    def get(self, name: str, seconds: float, of: int | None = None) -> str | None:
        """Waits for a text of that name, which rank `of` sets; `None` if there is none within `seconds`.

        Raises:
            ProcessGoneError: If there is none, and that rank's connection has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: name in self._texts or of in self._gone, seconds)
            if name not in self._texts and of in self._gone:
                raise ProcessGoneError(f"rank {of} is gone")
            return self._texts.get(name)

    def wait_until_left(self, seconds: float) -> None:
        """Waits until all ranks that have joined are gone again: nobody needs the texts then."""
        with self._changed:
            self._changed.wait_for(lambda: self._joined <= self._gone, seconds)

    def close(self) -> None:
        """Stops; who is connected is served until its connection ends."""
        self._listener.close()

    def __enter__(self) -> KeyValueServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _serve(self, connection: Connection) -> None:
        authenticate(connection, self._token, first=True)
        verb, rank = _array(connection.recv_bytes(_LARGEST_JOIN, time.monotonic() + _ANSWER_SECONDS), 2)
        if verb != "join" or type(rank) is not int:
            raise ValueError(f"received {verb!r}, expected to hear which rank joins")
        self._note(self._joined.add, rank)
        self._note(self._gone.discard, rank)
        if self._size is not None and len(self._joined - {0}) >= self._size - 1:
            self._listener.close()
        send(connection, [True])
        try:
            while True:
                send(connection, self._answer(_array(connection.recv_bytes(), 3, 4)))
        finally:
            self._note(self._gone.add, rank)

    def _note(self, change: Callable[[int], object], rank: int) -> None:
        with self._changed:
            change(rank)
            self._changed.notify_all()

    def _answer(self, message: list) -> list:
        verb, name, value, of = (*message, None)[:4]
        if not isinstance(name, str):
            raise ValueError(f"received {name!r}, expected the name of a text")
        if verb == "set":
            self.set(name, str(value))
            return [True]
        if verb == "decide":
            return [self.decide(name, str(value))]
        if verb == "delete":
            self.delete(name)
            return [True]
        if verb != "get" or not isinstance(value, int | float) or not (of is None or isinstance(of, int)):
            raise ValueError(f"received {verb!r}, expected set, get, decide or delete")
        try:
            return [self.get(name, max(0.0, min(float(value), _LONGEST_WAIT)), of)]
        except ProcessGoneError:
            return []


def _array(text: bytes, *lengths: int) -> list:
    """The JSON array of one of these lengths that a text is.

    Raises:
        ValueError: If it is none.
    """
    try:
        found = json.loads(text)
    except RecursionError:
        found = None
    if not isinstance(found, list) or len(found) not in lengths:
        raise ValueError(f"received {text[:50]!r}, expected a JSON array of {' or '.join(map(str, lengths))} values")
    return found


class KeyValueClient:
    """Access to the texts from another process; the methods are those of `KeyValueServer`.

    Each of them raises a ConnectionError if the server is gone, or does not answer.

    Args:
        address: Host and port of the server.
        token: The secret.
        rank: That of this process.
        timeout: How long to try to reach the server, in seconds.

    Raises:
        ConnectionError: If the server cannot be reached, or knows another secret.
    """

    def __init__(self, address: tuple[str, int], token: bytes, rank: int, timeout: float = 30.0):
        self._name = "{}:{}".format(*address)
        self._lock = threading.Lock()
        problems: dict[str, str] = {}
        attempts = {self._name: functools.partial(sockets.connect, address)}
        try:
            self._connection = framed(keep_trying(attempts, time.monotonic() + timeout, problems))
        except UnreachedError:
            raise ConnectionError(f"nobody listens at {self._name}: {problems[self._name]}") from None
        try:
            authenticate(self._connection, token, first=False)
            self._ask(0.0, "join", rank)
        except ENDS as error:
            self._connection.close()
            raise ConnectionError(f"{self._name} does not speak to this job: {error or 'it hung up'}") from None

    def set(self, name: str, text: str) -> None:
        """As `KeyValueServer.set`."""
        self._ask(0.0, "set", name, text)

    def decide(self, name: str, text: str) -> str:
        """As `KeyValueServer.decide`."""
        return self._ask(0.0, "decide", name, text)[0]

    def delete(self, name: str) -> None:
        """As `KeyValueServer.delete`."""
        self._ask(0.0, "delete", name, "")

    def get(self, name: str, seconds: float, of: int | None = None) -> str | None:
        """As `KeyValueServer.get`."""
        answer = self._ask(seconds, "get", name, seconds, of)
        if not answer:
            raise ProcessGoneError(f"rank {of} is gone")
        return answer[0]

    def close(self) -> None:
        """Ends the connection: this rank then counts as gone."""
        self._connection.close()

    def _ask(self, patience: float, *message: str | float | None) -> list:
        try:
            with self._lock:
                deadline = time.monotonic() + patience + _ANSWER_SECONDS
                send(self._connection, message, deadline)
                if self._connection.poll(deadline - time.monotonic()):
                    return json.loads(self._connection.recv_bytes(deadline=deadline))
                self._connection.close()  # what it says later would be taken for another answer
        except TimeoutError:
            self._connection.close()
        except (OSError, EOFError):
            raise ConnectionError(f"the process that keeps the messages of this job, {self._name}, is gone") from None
        except AuthenticationError as error:
            self._connection.close()
            raise ConnectionError(f"the process that keeps the messages of this job, {self._name}: {error}") from None
        raise ConnectionError(f"the process that keeps the messages of this job, {self._name}, does not answer")
