"""The texts that processes of a job keep for each other, between threads here."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from tfdist.cluster import key_value
from tfdist.cluster.connections import handshake
from tfdist.cluster.key_value import KeyValueClient, KeyValueServer, ProcessGoneError

TOKEN = b"of this job"


@pytest.fixture
def server():
    with KeyValueServer(TOKEN) as started:
        yield started


def client_of(server: KeyValueServer, token: bytes = TOKEN, rank: int = 1) -> KeyValueClient:
    return KeyValueClient(("localhost", server.port), token, rank, timeout=5.0)


def test_texts_go_in_all_directions(server):
    one, other = client_of(server), client_of(server)
    one.set("a", "from one")
    server.set("b", "from the server")
    assert (other.get("a", 1.0), one.get("b", 1.0), server.get("a", 1.0)) == ("from one", "from the server", "from one")
    one.set("a", 'ünïcode "and" more')
    assert other.get("a", 1.0) == 'ünïcode "and" more'
    one.close()
    other.close()


def test_what_the_first_decides_holds(server):
    one, other = client_of(server), client_of(server)
    assert [one.decide("a", "mine"), other.decide("a", "yours"), server.decide("a", "ours")] == ["mine"] * 3
    assert [server.decide("b", "ours"), other.decide("b", "yours"), other.get("b", 1.0)] == ["ours"] * 3


def test_who_comes_first_waits(server):
    early, late = client_of(server), client_of(server)
    threading.Timer(0.2, late.set, ("a", "at last")).start()
    began = time.monotonic()
    assert early.get("a", 5.0) == "at last"
    assert 0.1 < time.monotonic() - began < 4.0


def test_a_wait_has_an_end(server):
    began = time.monotonic()
    assert client_of(server).get("never", 0.2) is None
    assert 0.2 <= time.monotonic() - began < 2.0


def test_another_secret_is_refused(server):
    with pytest.raises(ConnectionError, match=rf"localhost:{server.port} does not speak to this job"):
        client_of(server, b"of another job")
    assert client_of(server).get("a", 0.0) is None


def test_strangers_are_left_alone(server):
    with socket.create_connection(("localhost", server.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        client = client_of(server)
        client.set("a", "1")
        assert server.get("a", 1.0) == "1"


def test_a_server_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(key_value, "_ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(handshake, "SECONDS", 1.0)
    with socket.create_server(("localhost", 0)) as silent:
        began = time.monotonic()
        with pytest.raises(ConnectionError, match="does not speak to this job"):
            KeyValueClient(("localhost", silent.getsockname()[1]), TOKEN, 1, timeout=5.0)
        assert time.monotonic() - began < 4.0
    with KeyValueServer(TOKEN) as server:
        client = client_of(server)
        with server._changed, pytest.raises(ConnectionError, match="does not answer"):
            client.set("a", "1")


def test_a_server_that_is_gone_is_named(server):
    client = client_of(server)
    client.set("a", "1")
    server.close()
    with pytest.raises(ConnectionError, match="nobody listens at localhost"):
        KeyValueClient(("localhost", server.port), TOKEN, 1, timeout=0.3)


def test_who_waits_for_a_process_that_is_gone_is_told(server):
    waits, leaves = client_of(server, rank=1), client_of(server, rank=2)
    leaves.set("last words", "goodbye")
    threading.Timer(0.2, leaves.close).start()
    began = time.monotonic()
    with pytest.raises(ProcessGoneError, match="rank 2 is gone"):
        waits.get("never", 10.0, of=2)
    assert time.monotonic() - began < 5.0
    assert waits.get("last words", 1.0, of=2) == "goodbye"
    assert waits.get("never", 0.1, of=3) is None
    with pytest.raises(ProcessGoneError):
        server.get("never", 10.0, of=2)
    client_of(server, rank=2).set("never", "again")
    assert waits.get("never", 10.0, of=2) == "again"


def test_many_clients_at_once(server):
    def exchange(rank: int) -> None:
        client = client_of(server, rank=rank)
        client.set(f"of {rank}", str(rank))
        found[rank] = [client.get(f"of {other}", 10.0) for other in range(20)]
        client.close()

    found: dict[int, list] = {}
    threads = [threading.Thread(target=exchange, args=(rank,)) for rank in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == {rank: [str(other) for other in range(20)] for rank in range(20)}
