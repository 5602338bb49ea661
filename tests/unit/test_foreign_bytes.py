"""Whatever bytes come from outside: they are read, or refused in words; nothing else happens."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tfdist.cluster import ClusterConfig, ClusterError, connections, discovery, rendezvous, sockets
from tfdist.cluster.barrier import messages
from tfdist.cluster.barrier.chief import Chief
from tfdist.cluster.connections import Connection
from tfdist.cluster.connections.compressed import pack, unpack
from tfdist.cluster.connections.connection import object_of
from tfdist.cluster.environments import slurm
from tfdist.cluster.foreign_text import cleaned, listed
from tfdist.cluster.key_value import KeyValueClient, KeyValueServer
from tfdist.cluster.rendezvous import endpoints
from tfdist.cluster.rendezvous.pmi import PmiChannel
from tfdist.cluster.rendezvous.registration import Registration
from tfdist.launcher.check.answers import Answer
from tfdist.launcher.check.assembly import Assembly, Member
from tfdist.launcher.check.check import _read_links, links_table, members_table

SETTINGS = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
FEW = settings(SETTINGS, max_examples=40)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
NUMBERS = st.sampled_from(["0", "1", "2", "-1", "x", "", " 1 ", "9" * 30, "1e3", "٣", "0x1", "NaN"])
HOST_LISTS = st.text(alphabet="ab[]0123456789-,() x\x00é", max_size=30)
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)


def _fields(names: list[str]) -> st.SearchStrategy[dict]:
    """Objects with some of these keys, of any kind."""
    return st.dictionaries(st.sampled_from(names) | st.text(max_size=5), JSON, max_size=len(names))


# --- Descriptions -----------------------------------------------------------------------------------------------------

ADDRESSES = st.sampled_from(["a:1", "[::1]:2", "b:0", "c", "http://d:1", "e:99999", "a:1", "f g:1", "\x1b[2J:1"]) | JSON
JOBS = st.dictionaries(
    st.sampled_from(["worker", "chief", "ps", "evaluator", "wroker", "master"]) | st.text(max_size=5),
    st.lists(ADDRESSES, max_size=3) | st.dictionaries(NUMBERS | st.text(max_size=3), ADDRESSES, max_size=3) | JSON,
    max_size=4,
)
TASKS = st.fixed_dictionaries(
    {}, optional={"type": st.sampled_from(["worker", "chief", "ps", "evaluator", "x"]) | JSON, "index": JSON}
)
TF_CONFIGS = st.fixed_dictionaries(
    {}, optional={"cluster": JOBS | JSON, "sparseCluster": JOBS | JSON, "task": TASKS | JSON, "environment": JSON}
)


@SETTINGS
@given(TF_CONFIGS.map(json.dumps) | JSON.map(json.dumps) | st.text(max_size=60))
def test_any_tf_config(text: str) -> None:
    with contextlib.suppress(ClusterError):
        config = ClusterConfig.from_tf_config(text)
        assert ClusterConfig.from_tf_config(config.to_json()).to_json() == config.to_json()


def test_brackets_that_are_too_deep() -> None:
    with pytest.raises(ClusterError, match="whose brackets are too deep"):
        ClusterConfig.from_tf_config("[" * 100_000)


VARIABLES = [
    *("TFDIST_RANK", "TFDIST_SIZE", "TFDIST_LOCAL_RANK", "TFDIST_LOCAL_SIZE", "TFDIST_PS", "TFDIST_MEETING"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "PMI_FD", "MV2_COMM_WORLD_RANK"),
    *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    *("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "LSB_JOBID", "LSB_MCPU_HOSTS", "PBS_JOBID", "JOB_ID"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID", "SLURM_NTASKS"),
    *("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_JOB_NUM_NODES"),
    *("KUBERNETES_SERVICE_HOST", "HOSTNAME", "JOB_COMPLETION_INDEX", "SM_HOSTS", "SM_CURRENT_HOST", "VC_TASK_INDEX"),
    *("SM_RESOURCE_CONFIG", "AZUREML_RUN_ID", "CLUSTER_SPEC", "PADDLE_TRAINER_ID", "TF_CONFIG", "VC_WORKER_HOSTS"),
]
VALUES = NUMBERS | HOST_LISTS | TEXT | TF_CONFIGS.map(json.dumps) | JSON.map(json.dumps)


@settings(SETTINGS, max_examples=400)
@given(st.dictionaries(st.sampled_from(VARIABLES), VALUES, max_size=12))
def test_any_environment(env: dict[str, str]) -> None:
    with contextlib.suppress(ClusterError):
        discovery.find(env)


@SETTINGS
@given(HOST_LISTS | st.text(max_size=30))
def test_any_list_of_nodes(text: str) -> None:
    with contextlib.suppress(ClusterError):
        assert slurm.first_host(text)
    assert all(isinstance(count, int) for count in slurm.tasks_per_node(text[:12]))


@SETTINGS
@given(st.text(max_size=30) | st.integers() | st.none())
def test_any_address(text: object) -> None:
    with contextlib.suppress(ValueError):
        host, port = sockets.split_address(text)  # type: ignore[arg-type]
        assert host and 1 <= port <= 65535
    with contextlib.suppress(ClusterError):
        low, high = endpoints.port_range({"TFDIST_PORTS": str(text)})
        assert 0 < low < high <= 65536


# --- Messages ---------------------------------------------------------------------------------------------------------


@SETTINGS
@given(st.binary(max_size=200) | JSON.map(json.dumps).map(str.encode))
def test_any_message(data: bytes) -> None:
    with contextlib.suppress(OSError):
        assert isinstance(object_of(data), dict)
    with contextlib.suppress(ValueError):
        assert Registration.from_json(data)
    with contextlib.suppress(OSError):
        assert isinstance(unpack(data.decode("latin-1"), 1000), dict)


def test_a_message_that_would_fill_the_memory_is_refused() -> None:
    text = pack({"a": "x" * 10_000_000})
    assert len(text) < 20_000
    with pytest.raises(OSError, match="no compressed JSON object"):
        unpack(text, 1_000_000)


HELLO = messages.hello(ClusterConfig({"worker": ["127.0.0.1:1", "127.0.0.1:2"]}), {"same.keras": "3"}, 1)
HELLOS = st.builds(lambda changed: {**HELLO, **changed}, _fields(list(HELLO))) | _fields(list(HELLO))


@SETTINGS
@given(HELLOS, JSON)
def test_any_hello(said: dict, infos: object) -> None:
    found = messages.read_hello(said)
    if found is not None:
        own = messages.hello(ClusterConfig({"worker": ["127.0.0.1:1", "127.0.0.1:2"]}), {"same.keras": "3"}, 0)
        problems = messages.disagreements(own, found)
        assert all(problem.isprintable() and len(problem) < 20_000 for problem in problems)
    with contextlib.suppress(OSError):
        assert len(messages.infos_of(pack(infos), 2)) == 2


REGISTRATION = json.loads(Registration(1, 2, 2001, None, "127.0.0.1", "node-1", 7).to_json())


@SETTINGS
@given(st.builds(lambda changed: {**REGISTRATION, **changed}, _fields(list(REGISTRATION))))
def test_any_registration(content: dict) -> None:
    with contextlib.suppress(ValueError):
        said = Registration.from_json(json.dumps(content).encode())
        assert str(said).isprintable() and 0 < said.port < 65536


@SETTINGS
@given(st.text(max_size=100) | JSON, st.integers(0, 50))
def test_any_text_is_printable_when_it_is_cleaned(text: object, most: int) -> None:
    assert cleaned(text).isprintable()
    assert len(cleaned(text, most)) <= 10 * most + 3
    assert "\x1b" not in listed([cleaned(text)], more=most)


# --- Conversations ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _no_thread_fails(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    failures: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    yield
    assert not failures, failures[0].exc_value


def _say(port: int, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger, contextlib.suppress(OSError):
        stranger.sendall(data)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(65536):
            pass


BYTES = st.binary(max_size=300)
FRAMES = st.lists(
    (st.binary(max_size=80) | _fields([*HELLO, "tfdist", "challenge", "proof"]).map(json.dumps).map(str.encode)).map(
        lambda data: len(data).to_bytes(4, "big") + data
    ),
    max_size=3,
).map(b"".join)


def test_any_bytes_to_each_meeting_point(monkeypatch: pytest.MonkeyPatch) -> None:
    from tfdist.cluster.rendezvous.server import MeetingServer

    monkeypatch.setattr(messages, "HELLO_SECONDS", 2.0)
    with _no_thread_fails(monkeypatch):
        places = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}
        monkeypatch.setattr(Chief, "_bind", lambda self: sockets.bind_host("127.0.0.1", 0))
        config = ClusterConfig(places)
        chief = Chief(config, config.compute_tasks, {}, 60.0)
        meeting = MeetingServer(Registration(0, 2, 2000, None, "127.0.0.1", "node-0", 7), [0], b"secret")
        store = KeyValueServer(b"secret")

        @FEW
        @given(BYTES | FRAMES)
        def converse(data: bytes) -> None:
            for port in (chief.port, meeting.port, store.port):
                _say(port, data)

        converse()
        assert not chief.present and not meeting.present and not store._texts
        for point in (chief, meeting):
            point.end()
        store._listener.end()


def test_any_request_to_the_store_of_whoever_knows_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    names = st.sampled_from(["join", "set", "get", "decide", "delete"]) | SCALARS
    requests = st.lists(names | SCALARS, max_size=5).filter(lambda words: words[:1] != ["get"] or len(words) < 3) | JSON
    with _no_thread_fails(monkeypatch), KeyValueServer(b"secret") as store:

        @FEW
        @given(st.lists(requests, min_size=1, max_size=3))
        def ask(messages_: list) -> None:
            connection = connections.framed(sockets.connect(("127.0.0.1", store.port), 5.0))
            with connection, contextlib.suppress(*connections.ENDS):
                connections.authenticate(connection, b"secret", first=False)
                for message in messages_:
                    connections.send(connection, message)
                    connection.recv_bytes(deadline=time.monotonic() + 10.0)

        ask()
        client = KeyValueClient(("localhost", store.port), b"secret", 1)
        client.set("a", "b")
        assert client.get("a", 1.0) == "b"
        client.close()


@FEW
@given(st.lists(st.binary(max_size=80), max_size=4), st.integers(0, 100))
def test_any_bytes_on_a_connection(pieces: list[bytes], largest: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = socket.create_connection(listening.getsockname())
        other: Connection = connections.framed(listening.accept()[0])
    with one, other:
        for piece in pieces:
            one.sendall(piece)
        one.shutdown(socket.SHUT_WR)
        with contextlib.suppress(*connections.ENDS):
            while True:
                assert len(other.recv_bytes(largest, time.monotonic() + 5.0)) <= largest


@FEW
@given(st.lists(st.binary(max_size=60).map(lambda line: line.replace(b"\n", b" ") + b"\n"), max_size=6))
def test_any_answers_of_mpiexec(lines: list[bytes]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, contextlib.suppress(ClusterError, OSError):
        theirs.sendall(b"".join(lines))
        theirs.shutdown(socket.SHUT_WR)
        PmiChannel(ours.fileno()).hear(1.0)


@SETTINGS
@given(_fields(["hosts", "port", "secret"]).map(json.dumps) | JSON.map(json.dumps) | st.text(max_size=40))
def test_anything_from_a_launchers_channel(text: str) -> None:
    with contextlib.suppress(ClusterError):
        _, (port,), secret = rendezvous._told(text)
        assert 0 < port < 65536 and isinstance(secret, bytes)


def test_a_key_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / ".config" / "tfdist" / "key"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\xff\0" * 40)
    from tfdist.cluster.membership import Membership

    assert len(endpoints.secret_of(Membership(0, 2, "test", "job", shared_home=True), {}, tmp_path)) == 32


# --- The check --------------------------------------------------------------------------------------------------------

HOSTS_TOLD = _fields(["host", "cores", "gpus", "versions", "public"]) | st.fixed_dictionaries(
    {
        "host": st.text(max_size=400),
        "cores": st.integers(-1, 9),
        "gpus": st.integers(0, 9),
        "versions": st.dictionaries(st.sampled_from(["keras", "python"]), st.text(max_size=9) | SCALARS, max_size=2),
        "public": st.lists(st.text(), max_size=2),
    }
)
LINKS_TOLD = st.dictionaries(
    st.sampled_from(["0", "1", "2", "x"]),
    JSON
    | st.fixed_dictionaries({"latency": st.floats() | SCALARS, "bandwidth": st.floats() | SCALARS})
    | st.fixed_dictionaries({"problem": SCALARS}),
    max_size=2,
)


@SETTINGS
@given(HOSTS_TOLD | JSON, LINKS_TOLD | JSON)
def test_whatever_a_process_tells_the_check(host: object, links: object) -> None:
    try:
        members = [Member.read(Answer(host, "worker 1", "introduction"), "worker 1", "a:1")] * 2
        tables = [members_table(members)]
        tables.append(links_table(members, [_read_links(Answer(links, "worker 1", "links"), 2), {}]))
    except ClusterError as error:
        assert "worker 1. Expected: " in str(error) and str(error).isprintable()
    else:
        assert all(line.isprintable() for table in tables for line in table.splitlines())


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100_000, '{"a": "' + "x" * 10**6 + '"}'])
def test_a_text_that_is_no_answer(text: str) -> None:
    member = Member("worker 0", "a:1", "node-1", 1, 0, {})
    with KeyValueServer(b"secret", 1) as store:
        store.set("links of 0", text)
        with pytest.raises(ClusterError, match=r"as the links of worker 0\. Expected: a JSON object") as caught:
            Assembly(0, [member], [1], b"", store, 1.0).receive("links", 0)
    assert len(str(caught.value)) < 400
