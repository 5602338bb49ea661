"""Connections between processes: each end makes the other one prove that it knows the secret."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError

import pytest

from tfdist.cluster import reception, sockets
from tfdist.cluster.connections import (
    Connection,
    Listener,
    UnreachedError,
    authenticate,
    framed,
    keep_trying,
    receive,
    send,
)
from tfdist.launcher.check import network

# The best that somebody can do who does not know the secret, whatever order the other end asks for.
GUESSED = [json.dumps({"tfdist": 2, "challenge": "0" * 64, "proof": "1" * 64}).encode()] * 2


@pytest.mark.parametrize("first", [True, False], ids=["by the server", "by the client"])
def test_who_does_not_know_the_secret_is_refused(first: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        stranger = framed(socket.create_connection(listening.getsockname()))
        accepted, _ = listening.accept()
    with stranger:
        for message in GUESSED:
            stranger.send_bytes(message)
        with pytest.raises(AuthenticationError):
            authenticate(framed(accepted), b"of this job", first=first)


def test_a_socket_that_reached_itself_counts_as_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    itself = socket.socket()
    itself.bind(("127.0.0.1", 0))
    itself.connect(itself.getsockname())
    monkeypatch.setattr(socket, "create_connection", lambda *args, **options: itself)
    with pytest.raises(ConnectionRefusedError, match="connection refused"):
        sockets.connect(("127.0.0.1", 1), 1.0)
    assert itself.fileno() == -1


@pytest.mark.parametrize("lack", [errno.EMFILE, errno.ENOMEM, errno.EPROTO])
def test_a_listener_outlives_a_lack_of_open_files(lack: int) -> None:
    class Exhausted(socket.socket):
        lacking = True

        def accept(self) -> tuple[socket.socket, object]:
            if self.lacking:
                self.lacking = False
                raise OSError(lack, os.strerror(lack))
            return super().accept()

    served = threading.Event()
    bound = Exhausted()
    bound.bind(("127.0.0.1", 0))
    listener = Listener(bound, lambda connection: served.set(), "test")
    with socket.create_connection(("127.0.0.1", listener.port)):
        assert served.wait(10.0)
    listener.close()


def test_a_listener_outlives_a_lack_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking, start = [True], threading.Thread.start

    def refuse_once(thread: threading.Thread) -> None:
        if thread.name == "test-client" and lacking:
            lacking.clear()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_once)
    served = threading.Event()
    listener = Listener(sockets.bind_everywhere(0, reuse=False), lambda connection: served.set(), "test")
    with socket.create_connection(("127.0.0.1", listener.port)) as refused, pytest.raises(ConnectionResetError):
        refused.recv(1)
    with socket.create_connection(("127.0.0.1", listener.port)):
        assert served.wait(10.0)
    listener.close()


class Meeting(reception.Reception[None]):
    """Whoever says its rank is let in."""

    def introduction(self, connection: Connection) -> tuple[int, None]:
        return int(receive(connection, 100, time.monotonic() + 10.0)["rank"]), None

    def admit(self, guest: reception.Guest[None]) -> None:
        self.present[guest.rank] = guest


@contextlib.contextmanager
def _meeting(size: int) -> Iterator[Meeting]:
    meeting = Meeting(sockets.bind_everywhere(0, reuse=False), size, "test")
    try:
        yield meeting
    finally:
        meeting.end()


def _guest(meeting: Meeting, rank: int, host: str = "127.0.0.1") -> Connection:
    guest = framed(socket.create_connection((host, meeting.port), timeout=10))
    send(guest, {"rank": rank})
    return guest


def test_who_takes_no_message_is_in_nobodys_way() -> None:
    with _meeting(3) as meeting, _guest(meeting, 1) as stalled, _guest(meeting, 2) as other:
        with meeting.changed:
            assert meeting.changed.wait_for(lambda: meeting.all_present, 10.0)
            began = time.monotonic()
            meeting.tell(meeting.present.values(), {"much": "x" * 20_000_000})
            assert time.monotonic() - began < 4.0  # nobody takes it yet
            news = len(meeting.present[1].connection._unsent)
            meeting.tell(meeting.present.values(), {"news": 1}, is_news=True)
            assert len(meeting.present[1].connection._unsent) == news  # it can do without
        told: list[dict] = []
        reader = threading.Thread(target=lambda: told.append(receive(other)) or other.close())
        reader.start()
        meeting.farewell(4.0)
        reader.join(10.0)
        assert len(told[0]["much"]) == 20_000_000
        with meeting.changed:
            assert meeting.changed.wait_for(lambda: not meeting.guests, 10.0), "the stalled one is sent away"
        assert stalled.socket.fileno() >= 0


def test_the_end_of_a_listener_frees_its_port() -> None:
    begun, ended = threading.Barrier(3), []

    def serve(connection: Connection) -> None:
        begun.wait(10.0)
        try:
            connection.recv_bytes()
        finally:
            ended.append(connection)

    listener = Listener(sockets.bind_everywhere(0, reuse=False), serve, "test")
    guests = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(2)]
    begun.wait(10.0)
    began = time.monotonic()
    listener.end()
    assert len(ended) == 2 and time.monotonic() - began < 4.0
    sockets.bind_everywhere(listener.port, reuse=False).close()
    for guest in guests:
        with guest, pytest.raises(ConnectionResetError):
            guest.recv(1)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", listener.port))


@pytest.mark.parametrize("sent", [b"[1]", b"no JSON", b"\xff", b"[" * 100_000])
def test_what_is_no_message(sent: bytes) -> None:
    one, other = _pair()
    with one, other:
        sender = threading.Thread(target=one.send_bytes, args=(sent,))
        sender.start()
        with pytest.raises(OSError, match="it sends no JSON object") as caught:
            receive(other)
        sender.join()
        assert caught.value.errno is None
        one.send_bytes(b'{"a": 1}')
        with pytest.raises(OSError, match="bad message length"):
            receive(other, largest=5)


def test_every_place_is_tried_until_the_deadline() -> None:
    tried = []

    def fail(place: str, left: float) -> None:
        tried.append((place, left >= 0.1))
        raise (UnreachedError if place == "a" else OSError)(f"not at {place}")

    problems: dict[str, str] = {}
    attempts = {place: functools.partial(fail, place) for place in "ab"}
    with pytest.raises(UnreachedError):
        keep_trying(attempts, time.monotonic(), problems)
    assert tried == [("a", True), ("b", True)]
    assert problems == {"a": "not at a", "b": "not at b"}
    waits = []
    with pytest.raises(UnreachedError):
        keep_trying(attempts, time.monotonic() + 0.3, problems, lambda: waits.append(1))
    assert len(waits) >= 3
    assert keep_trying({**attempts, "c": lambda left: "found"}, time.monotonic() + 10.0, {}) == "found"


def _pair() -> tuple[Connection, Connection]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = framed(socket.create_connection(listening.getsockname()))
        return one, framed(listening.accept()[0])


def _sealed_pair() -> tuple[Connection, Connection]:
    one, other = _pair()
    one.seal(b"there", b"back")
    other.seal(b"back", b"there")
    return one, other


@pytest.mark.parametrize("pair", [_pair, _sealed_pair])
def test_messages_arrive_whole_however_they_are_cut(pair: Callable[[], tuple[Connection, Connection]]) -> None:
    one, other = pair()
    one.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 200_000)
    sent = [os.urandom(size) for size in (0, 1, 3, 0, *[70] * 200, 100_000, 4_000_000, 0, *[70] * 100)]
    with one, other:
        for message in sent:
            one.post(message)
        assert one.pending
        rest = threading.Thread(target=one.send_bytes, args=(b"last",))
        rest.start()
        for number, message in enumerate(sent):
            if number % 3 == 0:
                assert other.first(2) == other.first(4)[:2]
            assert other.recv_bytes() == message
        assert other.recv_bytes() == b"last"
        rest.join(10.0)
        assert not one.pending


@pytest.mark.parametrize(
    ("pair", "read", "copies"),
    [(_pair, "recv_bytes", 2), (_sealed_pair, "recv_bytes", 2), (_pair, "skip_bytes", 0)],
)
def test_a_large_message_is_copied_once(
    pair: Callable[[], tuple[Connection, Connection]], read: str, copies: int
) -> None:
    """As it comes, and put together. `tfdist check` measures a network, not copies."""
    one, other = pair()
    data = bytes(20_000_000)
    with one, other:
        sender = threading.Thread(target=one.send_bytes, args=(data,))
        tracemalloc.start()
        try:
            sender.start()
            getattr(other, read)()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        sender.join(10.0)
    assert peak < (copies + 0.2) * len(data)


def test_a_block_that_is_faster_than_a_ping_has_no_absurd_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_seconds", lambda connection, message: 1e-3)
    one, other = _pair()
    with one, other:
        assert network._bandwidth(one, latency=2e-3) == network._LARGEST / 0.5e-3
