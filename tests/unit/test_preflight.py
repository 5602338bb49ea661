"""Every check before the start."""

from __future__ import annotations

import os
import socket
import sys
from types import SimpleNamespace

import pytest

from tfdist.cluster import ClusterConfig, ClusterError, ports, preflight


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
    preflight.require(config, {})


def test_a_reserved_port_is_well() -> None:
    with ports.reserve(1) as reservation:
        config = ClusterConfig({"worker": [f"127.0.0.1:{reservation.ports[0]}"]})
        assert preflight.check(config, {}) == []


def test_somebody_listens(free: tuple[int, int]) -> None:
    config = ClusterConfig({"worker": [f"127.0.0.1:{free[0]}"]})
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", free[0]))
        stranger.listen()
        (problem,) = preflight.check(config, {})
    assert problem.startswith(f"worker 0: cannot bind port {free[0]} of 127.0.0.1:{free[0]}: address already in use")
    assert "another process listens there; stop it" in problem
    assert "or choose another port" in problem


def test_the_port_of_a_peer_is_not_ours_to_check(free: tuple[int, int]) -> None:
    config = ClusterConfig({"worker": [f"127.0.0.1:{free[0]}", f"127.0.0.1:{free[1]}"]}, "worker", 0)
    with socket.socket() as peer:
        peer.bind(("127.0.0.1", free[1]))
        peer.listen()
        assert preflight.check(config, {}) == []


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
    (problem,) = preflight.check(config, {})
    assert problem.startswith(f"worker 0: 203.0.113.1:{free[0]} is not an address of this machine")
    assert "set the task type and index of this process" in problem
    # There the address may be that of a service.
    assert preflight.check(config, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == []


@pytest.mark.parametrize(("value", "count"), [("1", 0), ("true", 0), ("0", 1), ("", 1)])
def test_forwarded_address(free: tuple[int, int], value: str, count: int) -> None:
    config = ClusterConfig({"worker": [f"203.0.113.1:{free[0]}"]})
    problems = preflight.check(config, {"TFDIST_SKIP_ADDRESS_CHECK": value})
    assert len(problems) == count
    for problem in problems:
        assert problem.endswith(
            "if it is forwarded to this machine (NAT, the published port of a container), "
            "set TFDIST_SKIP_ADDRESS_CHECK=1"
        )


def test_forwarded_port_must_still_be_free(free: tuple[int, int]) -> None:
    config = ClusterConfig({"worker": [f"203.0.113.1:{free[0]}"]})
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", free[0]))
        stranger.listen()
        (problem,) = preflight.check(config, {"TFDIST_SKIP_ADDRESS_CHECK": "1"})
    assert problem.startswith(f"worker 0: cannot bind port {free[0]} of 203.0.113.1:{free[0]}: address already in use")


def test_unknown_host(monkeypatch: pytest.MonkeyPatch, free: tuple[int, int]) -> None:
    _names(monkeypatch, {})
    config = ClusterConfig({"worker": [f"127.0.0.1:{free[0]}", "node-7:2222", "node-8:2222"]})
    problems = preflight.check(config, {})
    assert len(problems) == 2
    assert problems[0].startswith("worker 1: the host 'node-7' cannot be resolved (Name or service not known)")
    assert "add it to /etc/hosts, or use an IP address" in problems[1]
    assert preflight.check(config, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == []


def test_a_peer_on_loopback_among_others_on_the_network(monkeypatch: pytest.MonkeyPatch, free: tuple[int, int]) -> None:
    _names(monkeypatch, {"node-0": "127.0.1.1", "node-1": "127.0.0.1", "node-2": "203.0.113.9"})
    config = ClusterConfig({"worker": [f"node-0:{free[0]}", "node-1:2222", "node-2:2222"]})
    (problem,) = preflight.check(config, {})
    assert problem.startswith("worker 1: the host 'node-1' is only a loopback address here (127.0.0.1)")
    assert "use the address that every machine reaches it by" in problem


def test_own_address_written_as_loopback_among_others_on_the_network(free: tuple[int, int]) -> None:
    config = ClusterConfig({"worker": [f"localhost:{free[0]}", "203.0.113.9:2222"]})
    (problem,) = preflight.check(config, {})
    assert problem.startswith("worker 0: the host 'localhost' is only a loopback address here")


@pytest.mark.parametrize("value", ["1", "true", "True"])
def test_keras_2(value: str) -> None:
    (problem,) = preflight.check(ClusterConfig.single_process(), {"TF_USE_LEGACY_KERAS": value})
    assert problem == (f"TF_USE_LEGACY_KERAS={value} selects Keras 2, which is not supported; unset it to use Keras 3")


@pytest.mark.parametrize("env", [{}, {"TF_USE_LEGACY_KERAS": "0"}, {"TF_USE_LEGACY_KERAS": ""}])
def test_keras_3(env: dict[str, str]) -> None:
    assert preflight.check(ClusterConfig.single_process(), env) == []


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
