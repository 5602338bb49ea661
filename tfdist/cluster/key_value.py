"""A key-value store: texts that one process of a job keeps for all, where TensorFlow has no coordination service.

Messages are JSON, one array a message, framed and authenticated by `multiprocessing.connection`; nothing that comes
from the network is ever unpickled.

client                        server
["join", 1]              -->               it is rank 1, which is gone when this connection ends
                         <--  [true]
["set", name, text]      -->
                         <--  [true]
["get", name, 5.0, 2]    -->               waits for a text of that name, 5 s at most, or until rank 2 is gone
                         <--  [text], [null] or []
["decide", name, text]   -->               keeps the text, unless there is one of that name
                         <--  [text]       the one that is kept
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from tfdist.cluster import sockets
from tfdist.cluster.connections import ENDS, Listener, UnreachedError, authenticate, framed, keep_trying, send

# How long an answer may take, apart from the wait that was asked for: the server only looks it up.
_ANSWER_SECONDS = 20.0


class ProcessGoneError(ConnectionError):
    """The process that should have set a text is gone."""


class KeyValueServer:
    """Keeps the texts, and serves the other processes from a thread for each of them.

    Args:
        token: A secret that the clients know, too.

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

    def __init__(self, token: bytes):
        self._token = token
        self._texts: dict[str, str] = {}
        self._joined: set[int] = set()
        self._gone: set[int] = set()
        self._changed = threading.Condition()
        self._listener = Listener(sockets.bind_everywhere(0, reuse=False), self._serve, "tfdist-key-value")
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
        _, rank = json.loads(connection.recv_bytes())
        self._note(self._joined.add, rank)
        self._note(self._gone.discard, rank)
        send(connection, [True])
        try:
            while True:
                send(connection, self._answer(*json.loads(connection.recv_bytes())))
        finally:
            self._note(self._gone.add, rank)

    def _note(self, change: Callable[[int], object], rank: int) -> None:
        with self._changed:
            change(rank)
            self._changed.notify_all()

    def _answer(self, verb: str, name: str, value: str | float, of: int | None = None) -> list:
        if verb == "set":
            self.set(name, str(value))
            return [True]
        if verb == "decide":
            return [self.decide(name, str(value))]
        try:
            return [self.get(name, float(value), of)]
        except ProcessGoneError:
            return []


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
                send(self._connection, message)
                if self._connection.poll(patience + _ANSWER_SECONDS):
                    return json.loads(self._connection.recv_bytes())
                self._connection.close()  # what it says later would be taken for another answer
        except (OSError, EOFError):
            raise ConnectionError(f"the process that keeps the messages of this job, {self._name}, is gone") from None
        raise ConnectionError(f"the process that keeps the messages of this job, {self._name}, does not answer")
