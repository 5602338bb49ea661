"""Port reservations, alone and against each other, and every other check before the start."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tfdist.cluster import ClusterConfig, ClusterError, ports, preflight


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
    [
        ("203.0.113.1", "is not an address of this machine"),
        ("no-such-host.invalid", "is not an address of this machine"),
    ],
)
def test_a_foreign_host(host: str, words: str) -> None:
    with pytest.raises(ClusterError) as caught:
        ports.reserve(1, host=host)
    assert words in str(caught.value)
    assert "use 127.0.0.1" in str(caught.value)


def test_without_ipv4_the_other_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports.sockets, "is_own", lambda host: host == "::1")
    assert ports.own_loopback() == "::1"
    with pytest.raises(ClusterError, match=r"host '127\.0\.0\.1' is not an address of this machine; use ::1, or"):
        ports.reserve(1, "127.0.0.1")
    # Where nobody has named an address, it is not asked.
    with ports.reserve(1) as reservation:
        assert len(reservation.ports) == 1


@pytest.fixture(autouse=True)
def no_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of the same run may have initialised TensorFlow, which preflight would rightly complain about."""
    monkeypatch.delitem(sys.modules, "tensorflow.python.eager.context", raising=False)


@pytest.fixture
def free() -> tuple[int, int]:
    """Two ports that were free a moment ago."""
    with ports.reserve(2) as reservation:
        return reservation.ports


def _names(monkeypatch: pytest.MonkeyPatch, table: dict[str, str]) -> None:
    real = socket.getaddrinfo

    def resolve(host: str, *args: object, **options: object) -> list:
        if host in table:
            return real(table[host], *args, **options)  # type: ignore[arg-type]
        if host[0].isalpha() and host != "localhost":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(host, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


def test_all_well(free: tuple[int, int]) -> None:
    config = ClusterConfig({"worker": [f"127.0.0.1:{free[0]}", f"localhost:{free[1]}"]}, "worker", 1)
    assert preflight.check(config, {}) == []
    preflight.require(config)


def test_somebody_listens(free: tuple[int, int]) -> None:
    config = ClusterConfig({"worker": [f"127.0.0.1:{free[0]}"]})
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", free[0]))
        stranger.listen()
        (problem,) = preflight.check(config, {})
    assert problem.startswith(f"worker 0: cannot bind port {free[0]} of 127.0.0.1:{free[0]}: address already in use")
    assert "another process listens there; stop it" in problem
    assert "or choose another port" in problem


def test_no_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(port: int, *, reuse: bool) -> socket.socket:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tfdist.cluster.sockets.bind_everywhere", refuse)
    (problem,) = preflight.check(ClusterConfig({"worker": ["127.0.0.1:80"]}), {})
    assert "cannot bind port 80 of 127.0.0.1:80: permission denied" in problem
    assert "ports below 1024" in problem
    assert "choose another port" in problem


def test_not_an_address_of_this_machine(free: tuple[int, int]) -> None:
    config = ClusterConfig({"worker": [f"203.0.113.1:{free[0]}"]})
    for forwarded in ({}, {"TFDIST_SKIP_ADDRESS_CHECK": "0"}):
        (problem,) = preflight.check(config, forwarded)
        assert problem.startswith(f"worker 0: 203.0.113.1:{free[0]} is not an address of this machine")
        assert "set the task type and index of this process" in problem
        assert problem.endswith("the published port of a container), set TFDIST_SKIP_ADDRESS_CHECK=1")
    # There the address may be that of a service.
    for env in ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {"TFDIST_SKIP_ADDRESS_CHECK": "1"}):
        assert preflight.check(config, env) == []


def test_unknown_host(monkeypatch: pytest.MonkeyPatch, free: tuple[int, int]) -> None:
    _names(monkeypatch, {})
    config = ClusterConfig({"worker": [f"127.0.0.1:{free[0]}", "node-7:2222", "node-8:2222"]})
    problems = preflight.check(config, {})
    assert len(problems) == 2
    assert problems[0].startswith("worker 1: the host 'node-7' cannot be resolved; correct the name")
    assert "add it to /etc/hosts, or use an IP address" in problems[1]
    assert preflight.check(config, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == []


def test_a_peer_on_loopback_among_others_on_the_network(monkeypatch: pytest.MonkeyPatch, free: tuple[int, int]) -> None:
    _names(monkeypatch, {"node-0": "127.0.1.1", "node-1": "127.0.0.1", "node-2": "203.0.113.9"})
    config = ClusterConfig({"worker": [f"node-0:{free[0]}", "node-1:2222", "node-2:2222"]})
    (problem,) = preflight.check(config, {})
    assert problem.startswith("worker 1: the host 'node-1' is only a loopback address here (127.0.0.1)")
    assert "use the address that every machine reaches it by" in problem


@pytest.mark.parametrize(
    ("context", "workers", "count"),
    [
        ({"_initialized": True, "_context_handle": None}, 2, 1),
        ({"_initialized": False, "_context_handle": object()}, 2, 1),
        ({"_initialized": False, "_context_handle": None}, 2, 0),
        ({}, 2, 0),
        ({"_initialized": True}, 1, 0),
    ],
)
def test_tensorflow_already_initialised(
    monkeypatch: pytest.MonkeyPatch, free: tuple[int, int], context: dict, workers: int, count: int
) -> None:
    module = SimpleNamespace(context=lambda: SimpleNamespace(**context))
    monkeypatch.setitem(sys.modules, "tensorflow.python.eager.context", module)  # type: ignore[arg-type]
    config = ClusterConfig({"worker": [f"127.0.0.1:{port}" for port in free[:workers]]})
    problems = preflight.check(config, {})
    assert len(problems) == count
    for problem in problems:
        assert '"Collective ops must be configured at program startup"' in problem
        assert "create the strategy before any other TensorFlow or Keras operation" in problem
        assert "first line of the script" in problem
    beside = ClusterConfig(config.jobs, "evaluator", 0)
    assert preflight.check(beside, {}) == []


def test_require_raises_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TF_USE_LEGACY_KERAS", "1")
    with pytest.raises(ClusterError) as caught:
        preflight.require(ClusterConfig({"worker": ["203.0.113.1:2222"]}))
    assert len(caught.value.problems) == 2
    assert "TF_USE_LEGACY_KERAS=1" in caught.value.problems[0]
