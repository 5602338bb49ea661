"""The barrier, on loopback, with a thread for each task; with processes where a process has to die."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import Pipe

import pytest

from tfdist.cluster import ClusterConfig, ClusterError, connections, ports
from tfdist.cluster.barrier import chief, meet, messages
from tfdist.cluster.barrier.hosts import Hosts
from tfdist.cluster.barrier.messages import BarrierTimeoutError, JobUnderWayError
from tfdist.cluster.connections import Connection
from tfdist.cluster.reception import Guest

DEADLINE = 15.0


@pytest.fixture
def cluster() -> Iterator[ClusterConfig]:
    """Four workers whose ports are held, as the launcher holds them."""
    with ports.reserve(4) as reservation:
        yield ClusterConfig({"worker": [f"127.0.0.1:{port}" for port in reservation.ports]})


def _all(tasks: list[Callable[[], dict]]) -> list[dict | BaseException]:
    """Runs all at once; the result or the error of each."""
    with ThreadPoolExecutor(max_workers=len(tasks)) as pool:
        futures: list[Future] = [pool.submit(task) for task in tasks]
        return [future.exception(DEADLINE + 5) or future.result() for future in futures]


def _of(config: ClusterConfig, rank: int) -> ClusterConfig:
    return config.with_task(*config.compute_tasks[rank])


def _meet(config: ClusterConfig, rank: int, timeout: float = DEADLINE, info: dict | None = None) -> Callable[[], dict]:
    return lambda: meet(_of(config, rank), timeout, info)


def _chief_socket(config: ClusterConfig) -> socket.socket:
    """A connection to the chief, made as soon as it listens."""
    host, port = str(config.chief_address).rsplit(":", 1)
    until = time.monotonic() + DEADLINE
    while True:
        try:
            return socket.create_connection((host, int(port)), 5)
        except ConnectionRefusedError:
            assert time.monotonic() < until, "the chief does not listen"
            time.sleep(0.01)


def _until(true: Callable[[], object]) -> None:
    until = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


def _framed(message: bytes) -> bytes:
    return struct.pack("!i", len(message)) + message


def test_all_come(cluster: ClusterConfig) -> None:
    results = _all([_meet(cluster, rank, info={"rank": rank, "same.keras": "3.15"}) for rank in range(4)])
    expected = {rank: {"rank": rank, "same.keras": "3.15"} for rank in range(4)}
    assert results == [expected] * 4


@pytest.mark.parametrize("order", [[3, 2, 1, 0], [0, 1, 2, 3], [2, 0, 3, 1]])
def test_all_come_one_after_the_other(cluster: ClusterConfig, order: list[int]) -> None:
    def late(rank: int) -> dict:
        time.sleep(0.15 * order.index(rank))
        return _meet(cluster, rank, info={"n": rank})()

    results = _all([lambda rank=rank: late(rank) for rank in range(4)])  # type: ignore[misc]
    assert results == [{rank: {"n": rank} for rank in range(4)}] * 4


def test_all_come_where_the_program_has_set_a_timeout_for_all_sockets(cluster: ClusterConfig) -> None:
    socket.setdefaulttimeout(30.0)
    try:
        assert [isinstance(result, dict) for result in _all([_meet(cluster, rank) for rank in range(4)])] == [True] * 4
    finally:
        socket.setdefaulttimeout(None)


@pytest.mark.parametrize("host", ["localhost", "[::1]", "127.0.0.1"])
def test_names_ipv6_and_a_chief_job(host: str) -> None:
    if host == "[::1]" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with ports.reserve(3) as reservation:
        one, two, three = (f"{host}:{port}" for port in reservation.ports)
        config = ClusterConfig({"worker": [two], "chief": [one], "ps": [three]}, "chief")
        assert _all([_meet(config, rank, info={"r": rank}) for rank in range(2)]) == [{0: {"r": 0}, 1: {"r": 1}}] * 2


def test_the_port_is_free_at_once_even_for_a_plain_bind(cluster: ClusterConfig) -> None:
    jobs = cluster.jobs
    port = int(str(cluster.chief_address).rsplit(":", 1)[1])
    with ports.reserve(4) as other:  # only to have ports that nobody holds
        numbers = other.ports
    config = ClusterConfig({"worker": [f"127.0.0.1:{number}" for number in numbers]})
    for _ in range(5):
        assert len(_all([_meet(config, rank) for rank in range(4)])) == 4
        with socket.socket() as plain:
            plain.bind(("127.0.0.1", numbers[0]))
            plain.listen()
    assert all(
        isinstance(result, dict) for result in _all([_meet(cluster, rank) for rank in range(len(jobs["worker"]))])
    )
    with socket.socket() as server:  # held by the launcher, so with SO_REUSEADDR, as TensorFlow
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", port))
        server.listen()


def test_alone_it_does_not_wait() -> None:
    assert meet(ClusterConfig.single_process(), info={"a": 1}) == {0: {"a": 1}}
    assert meet(ClusterConfig({"worker": ["203.0.113.1:1"], "ps": ["203.0.113.2:1"]}), 0.1) == {0: {}}


@pytest.mark.parametrize("job", ["ps", "evaluator"])
def test_tasks_that_take_no_part(job: str) -> None:
    config = ClusterConfig({"worker": ["a:1"], "ps": ["p:1"]}, job)
    with pytest.raises(ClusterError, match=f"{job} 0 takes no part in the barrier; only chief and worker tasks do"):
        meet(config, 0.1)


def test_missing_tasks_are_named_by_everyone(cluster: ClusterConfig) -> None:
    results = _all([_meet(cluster, rank, timeout=1.0) for rank in (0, 2)])
    for result in results:
        assert isinstance(result, BarrierTimeoutError)
        message = str(result)
        assert "not all tasks came within start_timeout=1 s; missing: " in message
        for index in (1, 3):
            assert f"worker {index} ({cluster.jobs['worker'][index]})" in message
        assert "worker 2 (" not in message
        assert "look into their output" in message


def test_a_worker_whose_time_ends_first_names_the_missing_too(cluster: ClusterConfig) -> None:
    results = _all([_meet(cluster, 0, timeout=1.4), _meet(cluster, 1, timeout=0.7)])
    assert all(isinstance(result, BarrierTimeoutError) for result in results)
    assert f"missing: worker 2 ({cluster.jobs['worker'][2]}), worker 3" in str(results[1])
    assert f"missing: worker 1 ({cluster.jobs['worker'][1]}), worker 2" in str(results[0])


def test_no_chief_refused(cluster: ClusterConfig) -> None:
    started = time.monotonic()
    (result,) = _all([_meet(cluster, 1, timeout=0.5)])
    assert 0.4 < time.monotonic() - started < 3
    assert isinstance(result, BarrierTimeoutError)
    assert str(result).startswith(
        f"worker 1 could not reach the chief, worker 0 ({cluster.chief_address}), within start_timeout=0.5 s: "
        "connection refused; "
    )
    assert "no firewall is in between" in str(result)


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (
            socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
            "its name cannot be resolved (Name or service",
        ),
        (TimeoutError("timed out"), ": timed out; "),
        (OSError(113, "No route to host"), ": no route to host; "),
    ],
)
def test_no_chief_other_reasons(monkeypatch: pytest.MonkeyPatch, failure: OSError, words: str) -> None:
    def fail(*args: object, **options: object) -> socket.socket:
        raise failure

    monkeypatch.setattr(socket, "create_connection", fail)
    config = ClusterConfig({"worker": ["node-0:2222", "node-1:2222"]}, "worker", 1)
    with pytest.raises(BarrierTimeoutError) as caught:
        meet(config, 0.2)
    assert "could not reach the chief, worker 0 (node-0:2222)" in str(caught.value)
    assert words in str(caught.value)


# What a TensorFlow server says first; the length of a frame may look like the end of a line.
SERVERS = [b"\x00\x00\x12\x04\x00\x00\n\n", b"\x00\x00\n\x04\x00\x00\x00\x00\x00"]


@contextlib.contextmanager
def _greeting(cluster: ClusterConfig, *pieces: bytes) -> Iterator[ClusterConfig]:
    """A worker's view of a cluster in which something else than a chief that waits listens at the chief's place."""
    server = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{server.getsockname()[1]}"
    accepted: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                accepted.append(server.accept()[0])
                for piece in pieces:
                    accepted[-1].sendall(piece)
                    time.sleep(0.05)
            except OSError:
                return

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield ClusterConfig({"worker": [address, cluster.jobs["worker"][1]]}, "worker", 1)
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(5)
        for connection in accepted:
            connection.close()


@pytest.mark.parametrize("greeting", [b"", b'{"hello": 1}\n', b"\x00\x00\x12\x05\x00\x00\n\n"])
@pytest.mark.parametrize("rejoin", [False, True])
def test_a_stranger_in_the_place_of_the_chief(
    monkeypatch: pytest.MonkeyPatch, cluster: ClusterConfig, greeting: bytes, rejoin: bool
) -> None:
    monkeypatch.setattr(messages, "HELLO_SECONDS", 0.2)
    with (
        _greeting(cluster, greeting) as config,
        pytest.raises(BarrierTimeoutError, match="something else than a waiting tfdist chief answers there"),
    ):
        meet(config, 0.7, rejoin=rejoin)


@pytest.mark.parametrize("greeting", [*SERVERS, SERVERS[0] + b"\0" * 100_000])
def test_a_server_in_the_place_of_the_chief(cluster: ClusterConfig, greeting: bytes) -> None:
    begin = time.monotonic()
    found = "a TensorFlow server answers there instead of a waiting tfdist chief: a job is under way already"
    with _greeting(cluster, greeting) as config:
        with pytest.raises(BarrierTimeoutError, match=found):
            meet(config, 0.7)
        with pytest.raises(JobUnderWayError, match=f"^worker 1: {found}$"):
            meet(config, 10.0, rejoin=True)
    assert time.monotonic() - begin < 2.0


def test_a_server_that_greets_in_pieces_is_one(cluster: ClusterConfig) -> None:
    with _greeting(cluster, SERVERS[0][:2], SERVERS[0][2:4]) as config, pytest.raises(JobUnderWayError):
        meet(config, 10.0, rejoin=True)


def test_whoever_may_rejoin_waits_for_a_chief_that_is_about_to_call(cluster: ClusterConfig) -> None:
    def late() -> dict:
        time.sleep(0.5)
        return _meet(cluster, 0)()

    others = [lambda rank=rank: meet(_of(cluster, rank), DEADLINE, rejoin=True) for rank in (1, 2, 3)]
    assert _all([late, *others]) == [{rank: {} for rank in range(4)}] * 4


# --- Parameter servers ------------------------------------------------------------------------------------------------


@pytest.fixture
def ps_cluster(cluster: ClusterConfig) -> ClusterConfig:
    """A chief, a worker and two parameter servers."""
    places = list(cluster.jobs["worker"].values())
    return ClusterConfig({"chief": places[:1], "worker": places[1:2], "ps": places[2:]}, "chief")


PS_TASKS = [("chief", 0), ("worker", 0), ("ps", 0), ("ps", 1)]


def _meet_servers(config: ClusterConfig, task: tuple[str, int], timeout: float = DEADLINE) -> Callable[[], dict]:
    info = {"task": f"{task[0]} {task[1]}", "same.keras": "3.15"}
    return lambda: meet(config.with_task(*task), timeout, info, servers=True)


def test_parameter_servers_come_where_they_are_asked_for(ps_cluster: ClusterConfig) -> None:
    results = _all([_meet_servers(ps_cluster, task) for task in PS_TASKS])
    names = ["chief 0", "worker 0", "ps 0", "ps 1"]
    assert results == [{rank: {"task": name, "same.keras": "3.15"} for rank, name in enumerate(names)}] * 4


def test_a_worker_and_parameter_servers_alone(ps_cluster: ClusterConfig) -> None:
    jobs = {"worker": list(ps_cluster.jobs["chief"].values()), "ps": list(ps_cluster.jobs["ps"].values())}
    config = ClusterConfig(jobs)
    results = _all([_meet_servers(config, task) for task in (("worker", 0), ("ps", 0), ("ps", 1))])
    assert [sorted(result) for result in results] == [[0, 1, 2]] * 3


def test_missing_parameter_servers_are_named_by_everyone(ps_cluster: ClusterConfig) -> None:
    chief, *others = PS_TASKS[:3]
    results = _all([_meet_servers(ps_cluster, chief, 1.5), *(_meet_servers(ps_cluster, task) for task in others)])
    for result in results:
        assert isinstance(result, BarrierTimeoutError)
        assert f"missing: ps 1 ({ps_cluster.jobs['ps'][1]}); start them" in str(result)


def test_values_that_must_agree_on_parameter_servers(ps_cluster: ClusterConfig) -> None:
    other = ps_cluster.with_task("ps", 1)
    results = _all(
        [
            *(_meet_servers(ps_cluster, task) for task in PS_TASKS[:3]),
            lambda: meet(other, DEADLINE, {"same.keras": "3.14"}, servers=True),
        ]
    )
    for result in results:
        assert isinstance(result, ClusterError)
        assert result.problems == ["keras is 3.15 on chief 0 but 3.14 on ps 1; make it the same on every task"]


def test_an_evaluator_takes_no_part_with_parameter_servers_either(ps_cluster: ClusterConfig) -> None:
    text = "evaluator 0 takes no part in the barrier; only chief, worker and ps tasks do"
    with pytest.raises(ClusterError, match=text):
        meet(ps_cluster.with_task("evaluator", 0), 0.1, servers=True)


def test_different_clusters(cluster: ClusterConfig) -> None:
    jobs = {"worker": [*cluster.jobs["worker"].values()][:2]}
    config = ClusterConfig(jobs)
    wrong = ClusterConfig({"worker": [*jobs["worker"], "127.0.0.1:9"]}, "worker", 1)
    results = _all([_meet(config, 0), lambda: meet(wrong, DEADLINE)])
    for result in results:
        assert type(result) is ClusterError
        assert 'worker 0 and worker 1 have different cluster descriptions; give every task the same "cluster"' in str(
            result
        )
        assert json.dumps(config.to_tf_config()["cluster"]) in str(result)
        assert json.dumps(wrong.to_tf_config()["cluster"]) in str(result)
        assert config.fingerprint() in str(result)


def test_whoever_comes_late_hears_what_is_wrong(cluster: ClusterConfig) -> None:
    def late() -> dict:
        time.sleep(0.5)
        return _meet(cluster, 3, info={"same.keras": "3.15"})()

    versions = [_meet(cluster, rank, info={"same.keras": f"3.{15 - rank}"}) for rank in (0, 1)]
    begin = time.monotonic()
    for result in _all([*versions, _meet(cluster, 2, info={"same.keras": "3.15"}), late]):
        assert type(result) is ClusterError
        assert result.problems == ["keras is 3.15 on worker 0 but 3.14 on worker 1; make it the same on every task"]
    assert time.monotonic() - begin < DEADLINE


def test_nobody_waits_long_for_whoever_is_to_hear_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, cluster: ClusterConfig
) -> None:
    monkeypatch.setattr(chief, "_LATECOMERS_SECONDS", 0.3)
    results = _all([_meet(cluster, rank, info={"same.keras": f"3.{15 - rank}"}) for rank in (0, 1)])
    assert [type(result) for result in results] == [ClusterError] * 2


def test_the_same_task_twice(cluster: ClusterConfig) -> None:
    results = _all([_meet(cluster, 0), _meet(cluster, 1), _meet(cluster, 1)])
    for result in results:
        assert type(result) is ClusterError
        assert f"two processes claim the same task worker 1: process {os.getpid()} on " in str(result)
        assert "give each process its own task index" in str(result)


def test_nobody_goes_while_somebody_is_in_doubt(monkeypatch: pytest.MonkeyPatch, cluster: ClusterConfig) -> None:
    """To find out whether one belongs to the cluster may take a while: names are looked up."""
    three = ClusterConfig({"worker": [*cluster.jobs["worker"].values()][:3]})
    in_doubt = threading.Event()

    def include(self: Hosts, address: str) -> bool:
        in_doubt.set()
        time.sleep(0.5)
        return True

    def last() -> dict:
        assert in_doubt.wait(DEADLINE)
        return _meet(three, 2)()

    monkeypatch.setattr(Hosts, "include", include)
    for result in _all([*(_meet(three, rank) for rank in (0, 1, 1)), last]):
        assert type(result) is ClusterError and "two processes claim the same task worker 1" in str(result)


def test_two_chiefs_on_one_machine(monkeypatch: pytest.MonkeyPatch, cluster: ClusterConfig) -> None:
    monkeypatch.setattr(chief, "_BIND_SECONDS", 0.2)
    results = _all([_meet(cluster, 0, timeout=1.0), _meet(cluster, 0, timeout=1.0)])
    (refused,) = [result for result in results if not isinstance(result, BarrierTimeoutError)]
    assert isinstance(refused, ClusterError)
    assert f"worker 0 cannot listen on its address {cluster.chief_address}: " in str(refused)
    assert "claims the same task" in str(refused)


def test_values_that_must_agree(cluster: ClusterConfig) -> None:
    config = ClusterConfig({"worker": [*cluster.jobs["worker"].values()][:2]})
    infos = [
        {"same.tensorflow": "2.21.0", "same.keras": "3.15.0", "seed": 1, "same.policy": "float32"},
        {"same.tensorflow": "2.20.0", "same.keras": "3.15.0", "seed": 2},
    ]
    results = _all([_meet(config, rank, info=infos[rank]) for rank in range(2)])
    for result in results:
        assert isinstance(result, ClusterError)
        assert result.problems == [
            "policy is float32 on worker 0 but None on worker 1; make it the same on every task",
            "tensorflow is 2.21.0 on worker 0 but 2.20.0 on worker 1; make it the same on every task",
        ]


def test_another_version_of_the_barrier() -> None:
    own = messages.hello(ClusterConfig({"worker": ["a:1", "b:1"]}), {}, 0)
    (problem,) = messages.disagreements(own, {**own, "task": "worker 1", "version": 1, "fingerprint": "x"})
    assert "different versions of tfdist (version 2 and 1 of the barrier); install the same one" in problem


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00" * 200_000,
        _framed(b"x" * 200_000),
        _framed(b'{"rank": 1}'),
        _framed(b"[" * 60_000),
        _framed(b'{"rank": NaN, "task": []}'),
        _framed(b"\xff\xfe"),
        b"\x00\x00",
        b"",
    ],
    ids=["http", "zeros", "too-long", "partial", "deep", "types", "not-text", "begun", "silent"],
)
def test_strangers_do_no_harm(cluster: ClusterConfig, garbage: bytes) -> None:
    kept = []

    def strange() -> dict:
        for _ in range(5):
            connection = _chief_socket(cluster)
            kept.append(connection)
            try:
                connection.sendall(garbage)
            except OSError:
                continue  # the chief has had enough
        return {}

    chief = _meet(cluster, 0)
    workers = [lambda rank=rank: (time.sleep(0.3), _meet(cluster, rank)())[1] for rank in (1, 2, 3)]  # type: ignore[misc]
    started = time.monotonic()
    results = _all([chief, strange, *workers])
    for connection in kept:
        connection.close()
    assert [result for number, result in enumerate(results) if number != 1] == [{rank: {} for rank in range(4)}] * 4
    assert time.monotonic() - started < 3


def test_a_silent_stranger_is_dropped(monkeypatch: pytest.MonkeyPatch, cluster: ClusterConfig) -> None:
    monkeypatch.setattr(messages, "HELLO_SECONDS", 0.2)

    def silent() -> dict:
        with _chief_socket(cluster) as connection:
            connection.settimeout(5)
            assert connection.recv(1000) == _framed(b'{"roll_call": 2, "token": false}')
            started = time.monotonic()
            with pytest.raises(ConnectionResetError):
                connection.recv(1000)
            assert 0.1 < time.monotonic() - started < 2
        return {}

    results = _all([_meet(cluster, 0, timeout=1.5), silent])
    assert isinstance(results[0], BarrierTimeoutError)
    assert results[1] == {}


def test_a_rank_outside_the_cluster_is_a_stranger(cluster: ClusterConfig) -> None:
    hello = messages.hello(_of(cluster, 1), {}, rank=7)

    def strange() -> dict:
        with _chief_socket(cluster) as connection:
            connections.send(connections.framed(connection.dup()), hello)
            time.sleep(0.3)
        return {}

    results = _all(
        [strange, *[_meet(cluster, rank) for rank in range(3)], lambda: (time.sleep(0.3), _meet(cluster, 3)())[1]]
    )
    assert results[1:] == [{rank: {} for rank in range(4)}] * 4


def test_a_worker_that_dies_is_missed_and_its_successor_welcome(cluster: ClusterConfig) -> None:
    code = (
        "import sys; from tfdist.cluster import ClusterConfig; from tfdist.cluster.barrier import meet\n"
        "meet(ClusterConfig.from_tf_config(sys.argv[1]), 10.0)"
    )
    command = [sys.executable, "-c", code, _of(cluster, 1).to_json()]
    with ThreadPoolExecutor(max_workers=4) as pool:
        chief = pool.submit(_meet(cluster, 0))
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        try:
            time.sleep(0.7)
            assert process.poll() is None, process.communicate()[1].decode()
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=5)
        others = [pool.submit(_meet(cluster, rank)) for rank in (1, 2, 3)]
        assert [future.result(DEADLINE + 5) for future in (chief, *others)] == [{rank: {} for rank in range(4)}] * 4


def test_whoever_has_died_is_in_nobodys_way(monkeypatch: pytest.MonkeyPatch, cluster: ClusterConfig) -> None:
    """The chief's threads may run later than a process dies and its successor comes."""
    two = ClusterConfig({"worker": [*cluster.jobs["worker"].values()][:2]})
    introduced, first_may_go_on = chief.Chief.introduction, threading.Event()
    guests = []

    def slowly(self: chief.Chief, connection: Connection) -> tuple[int, dict] | None:
        found = introduced(self, connection)
        if found:
            guests.append(found)
            if len(guests) == 1:
                first_may_go_on.wait(DEADLINE)
        return found

    monkeypatch.setattr(chief.Chief, "introduction", slowly)
    waiting = chief.Chief(_of(two, 0), two.compute_tasks, {}, DEADLINE)
    with ThreadPoolExecutor(max_workers=2) as pool:
        # One whose introduction is read only when its successor is there.
        with connections.framed(_chief_socket(two)) as dying:
            assert connections.receive(dying) == messages.banner(has_secret=False)
            connections.send(dying, messages.hello(_of(two, 1), {}, 1))
            _until(lambda: guests)
        # One that was let in, and whose end nobody has noticed.
        ours, theirs = Pipe()
        theirs.close()
        waiting.present[1] = Guest(ours, 1, messages.hello(_of(two, 1), {}, 1))
        successor = pool.submit(_meet(two, 1))
        _until(lambda: len(guests) == 2 and waiting.present[1].connection is not ours)
        first_may_go_on.set()
        assert [future.result(DEADLINE) for future in (pool.submit(waiting.run), successor)] == [{0: {}, 1: {}}] * 2


def test_a_chief_that_dies_is_named(cluster: ClusterConfig) -> None:
    with socket.socket() as dying:
        dying.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        host, port = str(cluster.chief_address).rsplit(":", 1)
        dying.bind((host, int(port)))
        dying.listen()
        with ThreadPoolExecutor(max_workers=1) as pool:
            worker = pool.submit(_meet(cluster, 1, timeout=1.0))
            connection = connections.framed(dying.accept()[0])
            connections.send(connection, messages.banner(has_secret=False))
            connections.send(connection, {"waiting": ["worker 2 (x:1)"]})
            time.sleep(0.2)
            connection.close()
            dying.close()
            failure = worker.exception(DEADLINE)
    assert isinstance(failure, BarrierTimeoutError)
    assert f"could not reach the chief, worker 0 ({cluster.chief_address})" in str(failure)


def test_a_socket_that_reached_itself_counts_as_refused(
    monkeypatch: pytest.MonkeyPatch, cluster: ClusterConfig
) -> None:
    def itself(*args: object, **options: object) -> socket.socket:
        connection = socket.socket()
        connection.bind(("127.0.0.1", random.randrange(61000, 65000)))
        connection.connect(connection.getsockname())
        return connection

    monkeypatch.setattr(socket, "create_connection", itself)
    with pytest.raises(BarrierTimeoutError, match="connection refused"):
        meet(_of(cluster, 1), 0.2)


def test_waiting_is_logged_as_a_warning(
    monkeypatch: pytest.MonkeyPatch, cluster: ClusterConfig, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(messages, "WAIT_NOTE_SECONDS", 0.3)
    _all([_meet(cluster, 0, timeout=0.8), _meet(cluster, 1, timeout=0.8)])
    _all([_meet(cluster, 1, timeout=0.6)])
    addresses = cluster.jobs["worker"]
    records = [record for record in caplog.records if record.name == "tfdist"]
    # Nobody configures this logger: anything below a warning would not be seen.
    assert {record.levelno for record in records} == {logging.WARNING}
    lines = [record.getMessage() for record in records]
    assert f"tfdist: waiting for worker 2 ({addresses[2]}), worker 3 ({addresses[3]}) (start_timeout 0.8 s)" in lines
    assert f"tfdist: waiting for worker 0 ({addresses[0]}) (start_timeout 0.6 s): connection refused" in lines
    # Each process says it once: the next line would come a minute later.
    assert len(lines) <= 3


def test_waiting_is_logged_again(
    monkeypatch: pytest.MonkeyPatch, cluster: ClusterConfig, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(messages, "WAIT_NOTE_SECONDS", 0.2)
    monkeypatch.setattr(messages, "WAIT_AGAIN_SECONDS", 0.6)
    _all([_meet(cluster, 0, timeout=2.2)])
    _all([_meet(cluster, 1, timeout=2.2)])
    lines = [record.getMessage() for record in caplog.records if record.name == "tfdist"]
    places = [f"worker {index} ({place})" for index, place in enumerate(cluster.jobs["worker"].values())]
    assert lines.count(f"tfdist: waiting for {', '.join(places[1:])} (start_timeout 2.2 s)") in (2, 3, 4)
    assert lines.count(f"tfdist: waiting for {places[0]} (start_timeout 2.2 s): connection refused") in (2, 3, 4)


def test_large_infos_arrive_and_too_large_ones_are_refused(cluster: ClusterConfig) -> None:
    info = {"text": "x" * 50_000}
    assert _all([_meet(cluster, rank, info=info) for rank in range(4)]) == [{rank: info for rank in range(4)}] * 4
    for rank in (0, 1):
        with pytest.raises(ValueError, match="info takes 70012 bytes; keep it below"):
            meet(_of(cluster, rank), 1.0, {"text": "x" * 70_000})
    with pytest.raises(TypeError, match="JSON"):
        meet(_of(cluster, 0), 1.0, {"text": object()})


def test_many_workers() -> None:
    with ports.reserve(40) as reservation:
        config = ClusterConfig({"worker": [f"127.0.0.1:{port}" for port in reservation.ports]})
        results = _all([_meet(config, rank, info={"r": rank}) for rank in range(40)])
    assert results == [{rank: {"r": rank} for rank in range(40)}] * 40
