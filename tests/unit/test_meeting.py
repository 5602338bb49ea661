"""The barrier, on loopback, with a thread for each task; with processes where a process has to die."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.launcher.conftest import wait_until
from tests.unit.conftest import Clock
from tfdist.cluster import ClusterConfig, ClusterError, meeting, ports, server
from tfdist.cluster.meeting import meet, store_of
from tfdist.cluster.server import BarrierTimeoutError, JobUnderWayError, ProcessGoneError, Server

# For who comes. Nothing waits longer than until that has come.
DEADLINE = 60.0


@pytest.fixture(autouse=True)
def stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No connection outlives its test."""
    kept: dict = {}
    monkeypatch.setattr(meeting, "_stores", kept)
    yield
    for store, _ in kept.values():
        store.leave()


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[Server]:
    """The servers that chiefs start."""
    made: list[Server] = []

    def start(*arguments: Any) -> Server:
        made.append(Server(*arguments))
        return made[-1]

    monkeypatch.setattr(meeting, "Server", start)
    return made


@pytest.fixture
def cluster() -> Iterator[ClusterConfig]:
    """Four workers whose ports are held, as the launcher holds them."""
    with ports.reserve(4) as reservation:
        yield ClusterConfig({"worker": [f"127.0.0.1:{port}" for port in reservation.ports]})


def _all(tasks: list[Callable[[], dict]]) -> list[dict | BaseException]:
    """Runs all at once; the result or the error of each."""
    with ThreadPoolExecutor(max_workers=len(tasks)) as pool:
        started: list[Future] = [pool.submit(task) for task in tasks]
        return [one.exception(DEADLINE + 5) or one.result() for one in started]


def _of(config: ClusterConfig, rank: int) -> ClusterConfig:
    return config.with_task(*config.compute_tasks[rank])


def _meet(config: ClusterConfig, rank: int, timeout: float = DEADLINE, info: dict | None = None) -> Callable[[], dict]:
    return lambda: meet(_of(config, rank), timeout, info)


def test_all_come(cluster: ClusterConfig) -> None:
    """Where the program has set a timeout for all sockets, too."""
    socket.setdefaulttimeout(30.0)

    def late(rank: int) -> dict:
        time.sleep([0.3, 0.0, 0.45, 0.15][rank])
        return _meet(cluster, rank, info={"n": rank})()

    try:
        results = _all([lambda rank=rank: late(rank) for rank in range(4)])  # type: ignore[misc]
    finally:
        socket.setdefaulttimeout(None)
    assert results == [{rank: {"n": rank} for rank in range(4)}] * 4


@pytest.mark.parametrize("host", ["localhost", "[::1]"])
def test_names_ipv6_and_a_chief_job(host: str) -> None:
    if host == "[::1]" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with ports.reserve(3) as reservation:
        one, two, three = (f"{host}:{port}" for port in reservation.ports)
        config = ClusterConfig({"worker": [two], "chief": [one], "ps": [three]}, "chief")
        assert _all([_meet(config, rank, info={"r": rank}) for rank in range(2)]) == [{0: {"r": 0}, 1: {"r": 1}}] * 2


def test_alone_it_does_not_wait() -> None:
    assert meet(ClusterConfig.single_process(), info={"a": 1}) == {0: {"a": 1}}
    assert meet(ClusterConfig({"worker": ["203.0.113.1:1"], "ps": ["203.0.113.2:1"]}), 0.1) == {0: {}}


@pytest.mark.parametrize(
    ("job", "servers", "do"), [("ps", False, "chief and"), ("evaluator", True, "chief, worker and ps")]
)
def test_tasks_that_take_no_part(job: str, servers: bool, do: str) -> None:
    config = ClusterConfig({"worker": ["a:1"], "ps": ["p:1"]}, job)
    with pytest.raises(ClusterError, match=f"{job} 0 takes no part in the barrier; only {do}"):
        meet(config, 0.1, servers=servers)


def test_missing_tasks_are_named_by_everyone(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, cluster: ClusterConfig, called: list[Server]
) -> None:
    made, clients = server.Client, []

    def connect(*arguments: Any) -> server.Client:
        clients.append(made(*arguments))
        return clients[-1]

    monkeypatch.setattr(server, "Client", connect)

    def pass_time() -> dict:
        wait_until(lambda: any(len(one.news[0]) == 2 for one in clients), DEADLINE, "the news for worker 1")
        clock.ahead += 500.0
        wait_until(lambda: 1 in called[0]._left_at, DEADLINE, "worker 1 to leave")
        clock.ahead += 500.0
        return {}

    results = _all([_meet(cluster, 0, timeout=1000.0), _meet(cluster, 1, timeout=500.0), pass_time])[:2]
    assert all(isinstance(result, BarrierTimeoutError) for result in results)
    assert f"missing: worker 2 ({cluster.jobs['worker'][2]}), worker 3" in str(results[1])
    assert f"missing: worker 1 ({cluster.jobs['worker'][1]}), worker 2" in str(results[0])
    assert all("look into their output" in str(result) for result in results)


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (
            socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
            "its name cannot be resolved (Name or service",
        ),
        (TimeoutError("timed out"), "within start_timeout=0.2 s: timed out; "),
        (ConnectionRefusedError(111, "Connection refused"), ": connection refused; "),
        (OSError(113, "No route to host"), ": no route to host; "),
    ],
)
def test_no_chief(monkeypatch: pytest.MonkeyPatch, failure: OSError, words: str) -> None:
    def fail(*args: object, **options: object) -> socket.socket:
        raise failure

    monkeypatch.setattr(socket, "create_connection", fail)
    config = ClusterConfig({"worker": ["node-0:2222", "node-1:2222"]}, "worker", 1)
    with pytest.raises(BarrierTimeoutError) as caught:
        meet(config, 0.2)
    assert "could not reach the chief, worker 0 (node-0:2222)" in str(caught.value)
    assert words in str(caught.value) and "no firewall is in between" in str(caught.value)


def test_whoever_may_rejoin_waits_for_a_chief_that_is_about_to_call(cluster: ClusterConfig) -> None:
    def late() -> dict:
        time.sleep(0.3)
        return _meet(cluster, 0)()

    others = [lambda rank=rank: meet(_of(cluster, rank), DEADLINE, rejoin=True) for rank in (1, 2, 3)]
    assert _all([late, *others]) == [{rank: {} for rank in range(4)}] * 4


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


def test_whoever_comes_late_hears_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, cluster: ClusterConfig, called: list[Server]
) -> None:
    monkeypatch.setattr(server, "LATECOMERS_SECONDS", DEADLINE)

    def late() -> dict:
        wait_until(lambda: called and "keras" in str(called[0]._problems), DEADLINE, "what is wrong")
        return _meet(cluster, 3, info={"same.keras": "3.15"})()

    infos = [{"same.keras": "3.15", "seed": 1, "same.policy": "float32"}, {"same.keras": "3.14"}]
    versions = [_meet(cluster, rank, info=info) for rank, info in enumerate(infos)]
    for result in _all([*versions, _meet(cluster, 2, info={"same.keras": "3.15"}), late]):
        assert type(result) is ClusterError
        # Who comes first is told of first.
        assert "keras is 3.15 on worker 0 but 3.14 on worker 1; make it the same on every task" in result.problems
        assert any(one.startswith("policy is float32 on worker 0 but None on worker") for one in result.problems)


def test_two_chiefs_on_one_machine(monkeypatch: pytest.MonkeyPatch, clock: Clock, cluster: ClusterConfig) -> None:
    monkeypatch.setattr(meeting, "BIND_SECONDS", 0.2)
    with ThreadPoolExecutor(2) as pool:
        ended, waiting = futures.wait([pool.submit(_meet(cluster, 0)) for _ in range(2)], DEADLINE, "FIRST_COMPLETED")
        clock.ahead += DEADLINE
        (refused,) = (one.exception() for one in ended)
        (first,) = (one.exception(DEADLINE) for one in waiting)
    assert isinstance(first, BarrierTimeoutError)
    assert isinstance(refused, ClusterError)
    assert f"worker 0 cannot listen on its address {cluster.chief_address}: " in str(refused)
    assert "claims the same task" in str(refused)


def test_tasks_stay_connected_and_meet_again(cluster: ClusterConfig) -> None:
    for number in range(3):
        results = _all([_meet(cluster, rank, info={"same.number": number}) for rank in range(4)])
        assert results == [{rank: {"same.number": number} for rank in range(4)}] * 4
    stores = [store_of(_of(cluster, rank)) for rank in range(4)]
    stores[2].set("a", "1")
    assert [store.get("a", 1.0) for store in stores] == ["1"] * 4
    # TensorFlow's server takes the port meanwhile.
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("", int(str(cluster.chief_address).rpartition(":")[2])))
        taken.listen()
        stores[1].set("b", "2")
        assert stores[3].get("b", 1.0) == "2"
    stores[1].leave()
    with pytest.raises(ProcessGoneError):
        stores[3].get("c", DEADLINE, of=1)
    (result,) = _all([_meet(cluster, 0)])
    assert str(result) == f"worker 1 ({cluster.jobs['worker'][1]}) is gone, after all tasks had met"


def test_a_task_that_outlives_its_chief_meets_the_next_one(cluster: ClusterConfig) -> None:
    two = ClusterConfig({"worker": [*cluster.jobs["worker"].values()][:2]})
    assert _all([_meet(two, rank) for rank in range(2)]) == [{0: {}, 1: {}}] * 2
    store_of(_of(two, 0)).leave()
    wait_until(lambda: store_of(_of(two, 1)).is_lost, DEADLINE, "the end of the connection")
    meeting._stores.pop(meeting._key(_of(two, 0), two.compute_tasks), None)
    assert _all([_meet(two, rank, info={"n": rank}) for rank in range(2)]) == [{0: {"n": 0}, 1: {"n": 1}}] * 2


def test_a_job_that_is_under_way(clock: Clock, cluster: ClusterConfig) -> None:
    greeted: list[socket.socket] = []
    two = ClusterConfig({"worker": [*cluster.jobs["worker"].values()][:2]})
    with socket.create_server(("127.0.0.1", int(str(two.chief_address).rpartition(":")[2]))) as taken:

        def greet() -> None:
            while True:
                greeted.append(taken.accept()[0])
                greeted[-1].sendall(b"\x00\x00\x12\x04\x00\x00")

        threading.Thread(target=greet, daemon=True).start()
        found = "a TensorFlow server answers there instead of a waiting tfdist chief: a job is under way already"
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(_meet(two, 1))
            wait_until(lambda: len(greeted) > 1, DEADLINE, "the second attempt")
            clock.ahead += DEADLINE
            with pytest.raises(BarrierTimeoutError, match=found):
                waits.result(DEADLINE)
        with pytest.raises(JobUnderWayError, match=f"^worker 1: {found}$"):
            meet(_of(two, 1), DEADLINE, rejoin=True)


def test_tokens_are_the_same_on_all_tasks(monkeypatch: pytest.MonkeyPatch, cluster: ClusterConfig) -> None:
    two = ClusterConfig({"worker": [*cluster.jobs["worker"].values()][:2]})
    monkeypatch.setenv("TFDIST_TOKEN", "of this job")
    assert _all([_meet(two, rank) for rank in range(2)]) == [{0: {}, 1: {}}] * 2
    assert store_of(_of(two, 0)).secret not in (b"", b"of this job")


def test_what_other_versions_say_is_refused() -> None:
    own = meeting.introduction(ClusterConfig({"worker": ["a:1", "b:1"]}), {})
    assert meeting.read_introduction(own) == own
    for wrong in (None, [], {**own, "info": 1}, {**own, "jobs": None}, {}):
        with pytest.raises(ValueError, match=r"^it"):
            meeting.read_introduction(wrong)
    said = meeting.read_introduction({**own, "task": "worker 1\x1b[2J", "fingerprint": "\x1b]0;mine\x07"})
    assert all(problem.isprintable() for problem in meeting.disagreements(own, said))
    for infos in ({}, {"infos": [{}]}, {"infos": [1, 2]}):
        with pytest.raises(server.UnreachedError, match="something else than what all tasks have said"):
            meeting.infos_of(server.pack(infos), 2)


def test_waiting_is_logged_as_a_warning_and_again(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, cluster: ClusterConfig, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "NOTE_SECONDS", 0.0)
    places = [f"worker {index} ({place})" for index, place in enumerate(cluster.jobs["worker"].values())]
    for rank, missing in ((0, ", ".join(places[1:])), (1, places[0])):
        said = f"tfdist: waiting for {missing} (start_timeout 1000 s){': connection refused' * rank}"

        def pass_time(said: str = said) -> dict:
            wait_until(lambda: caplog.messages.count(said) == 1, DEADLINE, "the first warning")
            clock.ahead += server.NOTE_AGAIN_SECONDS
            wait_until(lambda: caplog.messages.count(said) == 2, DEADLINE, "the second warning")
            clock.ahead += 1000.0
            return {}

        _all([_meet(cluster, rank, timeout=1000.0), pass_time])
        assert caplog.messages.count(said) in (2, 3)
    # Nobody configures this logger: anything below a warning would not be seen.
    assert {record.levelno for record in caplog.records if record.name == "tfdist"} == {logging.WARNING}


def test_large_infos_arrive_and_too_large_ones_are_refused(cluster: ClusterConfig) -> None:
    info = {"text": "x" * 50_000}
    assert _all([_meet(cluster, rank, info=info) for rank in range(4)]) == [{rank: info for rank in range(4)}] * 4
    for rank in (0, 1):
        with pytest.raises(ValueError, match="info takes 70012 bytes; keep it below"):
            meet(_of(cluster, rank), 1.0, {"text": "x" * 70_000})
    with pytest.raises(TypeError, match="JSON"):
        meet(_of(cluster, 0), 1.0, {"text": object()})
