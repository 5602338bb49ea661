"""Port reservations, alone and against each other."""

from __future__ import annotations

import multiprocessing
import socket
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tfdist.cluster import ClusterError, ports


def _listen(host: str, port: int, family: int = socket.AF_INET) -> socket.socket:
    server = socket.socket(family)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "SO_REUSEPORT"):  # as gRPC does
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    server.bind((host, port))
    server.listen()
    return server


@pytest.mark.parametrize("host", ["127.0.0.1", "", "::"])
def test_a_server_listens_over_a_held_port(host: str) -> None:
    family = socket.AF_INET6 if host == "::" else socket.AF_INET
    with ports.reserve(1) as reservation:
        (port,) = reservation.ports
        for _ in range(2):  # again after a first server has gone, as when a process is restarted
            with _listen(host, port, family) as server, socket.create_connection(("127.0.0.1", port), 5) as client:
                accepted, _ = server.accept()
                with accepted:
                    client.sendall(b"over the held port")
                    assert accepted.recv(100) == b"over the held port"


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_a_plain_bind_is_refused_until_close(host: str) -> None:
    reservation = ports.reserve(1)
    (port,) = reservation.ports
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind((host, port))
    with pytest.raises(ClusterError, match="only 0 of the 1 ports"):
        ports.reserve(1, low=port, high=port + 1)
    reservation.close()
    reservation.close()
    with socket.socket() as stranger:
        stranger.bind((host, port))


def test_taken_ports_are_passed_over() -> None:
    with ports.reserve(1) as first:
        low = first.ports[0]
        with ports.reserve(3, low=low, high=low + 40) as second:
            assert len(set(second.ports)) == 3
            assert low not in second.ports


def test_exhaustion_gives_everything_back() -> None:
    with ports.reserve(1) as first:
        low = first.ports[0]
    with pytest.raises(ClusterError) as caught:
        ports.reserve(10, low=low, high=low + 3)
    message = str(caught.value)
    assert f"of the 10 ports needed are free in {low} to {low + 2}" in message
    assert "choose a wider range" in message
    with ports.reserve(1, low=low, high=low + 1) as again:
        assert again.ports == (low,)


def test_an_empty_range_is_exhausted() -> None:
    with pytest.raises(ClusterError, match="only 0 of the 1 ports"):
        ports.reserve(1, low=30000, high=30000)


def test_the_default_range_is_below_that_of_outgoing_connections(tmp_path: Path) -> None:
    with ports.reserve(5) as reservation:
        assert all(20000 <= port < max(ports.ephemeral_low(), 32768) for port in reservation.ports)
    file = tmp_path / "range"
    file.write_text("40000\t50000\n")
    assert ports.ephemeral_low(file) == 40000
    file.write_text("")
    assert ports.ephemeral_low(file) == 32768


@pytest.mark.parametrize(
    ("host", "words"),
    [("203.0.113.1", "is not an address of this machine"), ("no-such-host.invalid", "has no address")],
)
def test_a_foreign_host(host: str, words: str) -> None:
    with pytest.raises(ClusterError) as caught:
        ports.reserve(1, host=host)
    assert words in str(caught.value)
    assert "use 127.0.0.1" in str(caught.value)


def _reserve_many(pipe: Connection) -> None:
    pipe.recv()
    held = [ports.reserve(1, low=24000, high=24400) for _ in range(25)]
    pipe.send([reservation.ports[0] for reservation in held])
    pipe.recv()


def test_contention_of_processes() -> None:
    context = multiprocessing.get_context("fork")
    pipes, children = [], []
    try:
        for _ in range(8):
            ours, theirs = context.Pipe()
            child = context.Process(target=_reserve_many, args=(theirs,))
            child.start()
            pipes.append(ours)
            children.append(child)
        for pipe in pipes:
            pipe.send("start")
        taken: list[int] = []
        for pipe in pipes:
            assert pipe.poll(20), "a child did not answer"
            taken += pipe.recv()
        assert len(taken) == 200
        assert len(set(taken)) == 200
        for pipe in pipes:
            pipe.send("end")
        for child in children:
            child.join(10)
        assert [child.exitcode for child in children] == [0] * 8
    finally:
        for child in children:
            if child.is_alive():
                child.kill()
                child.join(5)
