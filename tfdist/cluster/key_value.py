"""Texts by name, kept by one process of a job for all of them, where TensorFlow's coordination service is not there.

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

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable

from tfdist.cluster import sockets
from tfdist.cluster.authentication import ENDS, authenticate
from tfdist.cluster.listener import Listener

# How long an answer may take besides what was to be waited for: the server only looks it up.
_ANSWER_SECONDS = 20.0


class ProcessGone(ConnectionError):
    """The process that a text is awaited from is gone."""


class KeyValueServer:
    """Keeps the texts, and serves the other processes from a thread for each of them.

    Args:
        token: a secret that the clients know, too.

    Attributes:
        port: where it listens, on every interface.

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
        self._listener.start()

    def set(self, name: str, text: str) -> None:
        """Keeps a text, in the place of an earlier one of that name."""
        with self._changed:
            self._texts[name] = text
            self._changed.notify_all()

    def decide(self, name: str, text: str) -> str:
        """Keeps a text, unless there is one of that name; returns the one that is kept, the same to all who ask."""
        with self._changed:
            return self._texts.setdefault(name, text)

    def get(self, name: str, seconds: float, of: int | None = None) -> str | None:
        """The text of that name, once there is one; `None` if there is none within `seconds`.

        Args:
            name: of the text.
            seconds: how long to wait.
            of: the rank that sets it.

        Raises:
            ProcessGone: if there is none, and that rank's connection has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: name in self._texts or of in self._gone, seconds)
            if name not in self._texts and of in self._gone:
                raise ProcessGone(f"rank {of} is gone")
            return self._texts.get(name)

    def wait_until_left(self, seconds: float) -> None:
        """Waits until all that have joined are gone again, so that nothing is left to be read."""
        with self._changed:
            self._changed.wait_for(lambda: self._joined <= self._gone, seconds)

    def close(self) -> None:
        """Stops; who is connected is served until its connection ends."""
        self._listener.close()

    def __enter__(self) -> KeyValueServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _serve(self, accepted: socket.socket) -> None:
        with contextlib.suppress(*ENDS, ValueError), authenticate(accepted, self._token, first=True) as connection:
            _, rank = json.loads(connection.recv_bytes())
            self._note(self._joined.add, rank)
            self._note(self._gone.discard, rank)
            connection.send_bytes(b"[true]")
            try:
                while True:
                    connection.send_bytes(json.dumps(self._answer(*json.loads(connection.recv_bytes()))).encode())
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
        except ProcessGone:
            return []


class KeyValueClient:
    """Another process' texts.

    Args:
        address: host and port of the server.
        token: the secret.
        rank: of this process.
        timeout: how long to try to reach it, in seconds.

    Raises:
        ConnectionError: if the server cannot be reached, or knows another secret.
    """

    def __init__(self, address: tuple[str, int], token: bytes, rank: int, timeout: float = 30.0):
        self._name = "{}:{}".format(*address)
        self._lock = threading.Lock()
        deadline = time.monotonic() + timeout
        while True:
            try:
                connected = socket.create_connection(address, timeout=max(0.1, deadline - time.monotonic()))
                break
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise ConnectionError(f"nobody listens at {self._name}: {error}") from None
                time.sleep(0.1)
        try:
            self._connection = authenticate(connected, token, first=False)
            self._ask(0.0, "join", rank)
        except ENDS as error:
            raise ConnectionError(f"{self._name} does not speak to this job: {error or 'it hung up'}") from None

    def set(self, name: str, text: str) -> None:
        """As `KeyValueServer.set`.

        Raises:
            ConnectionError: if the server is gone, or does not answer.
        """
        self._ask(0.0, "set", name, text)

    def decide(self, name: str, text: str) -> str:
        """As `KeyValueServer.decide`.

        Raises:
            ConnectionError: if the server is gone, or does not answer.
        """
        return self._ask(0.0, "decide", name, text)[0]

    def get(self, name: str, seconds: float, of: int | None = None) -> str | None:
        """As `KeyValueServer.get`.

        Raises:
            ConnectionError: if the server is gone.
        """
        answer = self._ask(seconds, "get", name, seconds, of)
        if not answer:
            raise ProcessGone(f"rank {of} is gone")
        return answer[0]

    def close(self) -> None:
        """Leaves."""
        self._connection.close()

    def _ask(self, patience: float, *message: str | float | None) -> list:
        try:
            with self._lock:
                self._connection.send_bytes(json.dumps(message).encode())
                if self._connection.poll(patience + _ANSWER_SECONDS):
                    return json.loads(self._connection.recv_bytes())
                self._connection.close()  # what it says later would be taken for another answer
        except (OSError, EOFError):
            raise ConnectionError(f"the process that keeps the messages of this job, {self._name}, is gone") from None
        raise ConnectionError(f"the process that keeps the messages of this job, {self._name}, does not answer")
