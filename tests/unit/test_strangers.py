"""Strangers at the barrier and the rendezvous: silent, slow, many, lying, or in between. No job ends by them."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tfdist.cluster import ClusterConfig, ClusterError, connections, ports
from tfdist.cluster.barrier import chief, hosts, meet, messages
from tfdist.cluster.barrier.hosts import Hosts
from tfdist.cluster.barrier.messages import BarrierTimeoutError
from tfdist.cluster.connections import handshake, listener
from tfdist.cluster.connections.open_files import make_room
from tfdist.cluster.rendezvous import attend, server
from tfdist.cluster.rendezvous.registration import Registration

DEADLINE = 30.0
SECRET = b"of this job"
# Where strangers come from; all of 127/8 is this machine.
ELSEWHERE = "127.0.0.9"


@pytest.fixture
def cluster() -> Iterator[ClusterConfig]:
    with ports.reserve(3) as reservation:
        yield ClusterConfig({"worker": [f"127.0.0.1:{port}" for port in reservation.ports]})


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(300) as started:
        yield started


@pytest.fixture
def kept() -> Iterator[list[socket.socket]]:
    """Connections that are open until the test ends."""
    connected: list[socket.socket] = []
    yield connected
    for one in connected:
        one.close()


def _connect(port: int, source: str = "127.0.0.1") -> socket.socket:
    until = time.monotonic() + DEADLINE
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 10, source_address=(source, 0))
        except ConnectionRefusedError:
            assert time.monotonic() < until, "nobody listens"
            time.sleep(0.01)


def _port(cluster: ClusterConfig) -> int:
    return int(str(cluster.chief_address).rpartition(":")[2])


def _start(pool: ThreadPoolExecutor, cluster: ClusterConfig, rank: int, timeout: float = DEADLINE, **other) -> Future:
    config = cluster.with_task("worker", rank)
    return pool.submit(lambda: meet(config, timeout, other.get("info"), env=other.get("env", {})))


def _registration(rank: int, size: int) -> Registration:
    return Registration(rank, size, 2000 + rank, None, "127.0.0.1", f"node-{rank}", 70 + rank)


def _attend(pool: ThreadPoolExecutor, rank: int, size: int, port: int, timeout: float = DEADLINE) -> Future:
    return pool.submit(attend, _registration(rank, size), [("127.0.0.1", port)], SECRET, timeout)


def _rank_0(size: int) -> server.MeetingServer:
    with ports.reserve(1) as reservation:
        free = reservation.ports[0]
    return server.MeetingServer(_registration(0, size), [free], SECRET)


# --- Silent, slow, many -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strangers", [80, 500])
def test_silent_connections_keep_nobody_out(
    monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor, cluster: ClusterConfig, kept: list, strangers: int
) -> None:
    monkeypatch.setattr(messages, "HELLO_SECONDS", DEADLINE)
    monkeypatch.setattr(handshake, "SECONDS", DEADLINE)
    began = time.monotonic()
    first = _start(pool, cluster, 0)
    kept += [_connect(_port(cluster)) for _ in range(strangers)]
    others = [_start(pool, cluster, rank) for rank in (1, 2)]
    assert [one.result(DEADLINE) for one in (first, *others)] == [{rank: {} for rank in range(3)}] * 3

    meeting = _rank_0(3)
    kept += [_connect(meeting.port) for _ in range(strangers)]
    first = pool.submit(meeting.meet, DEADLINE)
    others = [_attend(pool, rank, 3, meeting.port) for rank in (1, 2)]
    assert all(one.result(DEADLINE) == first.result(DEADLINE) for one in others)
    assert time.monotonic() - began < DEADLINE
    assert meeting._listener.dropped == max(0, strangers - listener._SPARE_STRANGERS - 3) or strangers > 100


def test_those_who_come_at_once_all_get_in(pool: ThreadPoolExecutor) -> None:
    for size in (80, 200):
        with ports.reserve(size) as reservation:
            config = ClusterConfig({"worker": [f"127.0.0.1:{port}" for port in reservation.ports]})
            results = [_start(pool, config, rank, info={"rank": rank}) for rank in range(size)]
            expected = {rank: {"rank": rank} for rank in range(size)}
            assert all(one.result(DEADLINE) == expected for one in results)


@pytest.mark.parametrize(
    ("message", "pause"),
    # For three seconds; the barrier ends later. The length of the second one is never complete.
    [(b"\0\0\1\0" + b" " * 56, 0.05), pytest.param(b"\0\0\1", 1.0, marks=pytest.mark.exhaustive)],
    ids=["message", "length"],
)
def test_a_byte_now_and_then_keeps_no_thread(
    monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor, cluster: ClusterConfig, message: bytes, pause: float
) -> None:
    monkeypatch.setattr(messages, "HELLO_SECONDS", 0.4)
    monkeypatch.setattr(handshake, "SECONDS", 0.4)
    first, meeting = _start(pool, cluster, 0, 4.0), _rank_0(2)
    for port in (_port(cluster), meeting.port):
        with _connect(port) as slow, pytest.raises(ConnectionError):
            for byte in message:
                slow.sendall(bytes([byte]))
                time.sleep(pause)
    meeting.end()
    assert isinstance(first.exception(DEADLINE), BarrierTimeoutError)


# Rank 0 alone, with few open files; it prints where it listens.
FEW_FILES = """
import resource, sys
from tfdist.cluster.rendezvous.registration import Registration
from tfdist.cluster.rendezvous import server
soft, hard, size = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
own = Registration(0, size, 2000, None, "127.0.0.1", "node-0", 70)
meeting = server.MeetingServer(own, [0], b"of this job")
print(meeting.port, flush=True)
print(len(meeting.meet(60.0)["addresses"]), resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)
"""


@contextlib.contextmanager
def _with_few_files(soft: int, hard: int, size: int) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-c", FEW_FILES, *map(str, (soft, hard, size))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=10)


def test_silent_connections_take_all_open_files_and_rank_0_goes_on(pool: ThreadPoolExecutor, kept: list) -> None:
    with _with_few_files(64, 64, 3) as process:
        port = int(process.stdout.readline())
        kept += [_connect(port) for _ in range(300)]
        others = [_attend(pool, rank, 3, port) for rank in (1, 2)]
        assert all(len(one.result(DEADLINE)["addresses"]) == 3 for one in others)
        assert process.stdout.readline() == "3 64\n"


def test_the_soft_limit_is_raised_for_many_ranks(pool: ThreadPoolExecutor) -> None:
    with _with_few_files(64, 4096, 150) as process:
        port = int(process.stdout.readline())
        others = [_attend(pool, rank, 150, port) for rank in range(1, 150)]
        assert all(len(one.result(DEADLINE)["addresses"]) == 150 for one in others)
        size, soft = map(int, process.stdout.readline().split())
        assert size == 150 and 150 < soft < 1000


# With so many open files, and no /proc; it prints for how many more there is room, and the limit.
NO_PROC = """
import resource, sys
from pathlib import Path
from tfdist.cluster.connections import open_files
open_files._OPEN = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 200))
kept = []
try:
    for _ in range(int(sys.argv[2])):
        kept.append(open("/dev/null"))
except OSError:
    pass
print(open_files.make_room(20) >= 20, open_files.make_room(500) < 170, resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize("there", ["/no/such/folder", "/dev/null"])
@pytest.mark.parametrize("kept", [0, 50, 100])
def test_open_files_are_counted_without_proc(there: str, kept: int) -> None:
    command = [sys.executable, "-c", NO_PROC, there, str(kept)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert (done.stdout, done.stderr) == ("True True (200, 200)\n", "")


def test_too_low_a_hard_limit_is_told_in_words() -> None:
    with _with_few_files(1024, 1024, 2000) as process:
        told = process.communicate(timeout=DEADLINE)[1]
    assert "Received: a limit of 1024 open files for rank 0, which can open 9" in told
    assert "Expected: one for each of 2000 processes. Raise the hard limit of this process to 20" in told
    assert "/etc/security/limits.conf (nofile)" in told


@pytest.mark.exhaustive
def test_two_thousand_ranks_meet_under_the_usual_limit() -> None:
    """Rank 0 has a soft limit of 1024; the others are simulated by this process."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 3000:
        pytest.skip("this machine allows too few open files")
    assert make_room(2500) >= 2500
    met: list[int] = []
    with _with_few_files(1024, 4096, 2000) as process:
        port = int(process.stdout.readline())

        def one(rank: int) -> None:
            met.append(len(attend(_registration(rank, 2000), [("127.0.0.1", port)], SECRET, 100.0)["addresses"]))

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(1, 2000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120.0)
        assert process.stdout.readline().startswith("2000 ")
    assert met == [2000] * 1999


# --- In between -------------------------------------------------------------------------------------------------------


class _Between:
    """Passes on what two ends say to each other, message by message, and may alter it. It knows no secret."""

    def __init__(self, port: int, alter: Callable[[bytes], bytes]):
        self._to, self._alter = port, alter
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self.passed: list[bytes] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                one = connections.framed(self._server.accept()[0])
                other = connections.framed(socket.create_connection(("127.0.0.1", self._to)))
                for ends in ((one, other), (other, one)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: connections.Connection, target: connections.Connection) -> None:
        try:
            while True:
                message = source.recv_bytes()
                self.passed.append(message)
                target.send_bytes(self._alter(message))
        except connections.ENDS:
            source.shutdown()
            target.shutdown()


ALTERED = {
    "another address": lambda message: message.replace(b"127.0.0.1", b"127.6.6.6"),
    "a byte": lambda message: message[:-1] + bytes([message[-1] ^ 1]) if b"challenge" not in message else message,
}


@pytest.mark.parametrize("alter", ALTERED.values(), ids=ALTERED)
def test_who_sits_in_between_can_alter_nothing(pool: ThreadPoolExecutor, alter: Callable[[bytes], bytes]) -> None:
    meeting = _rank_0(2)
    between = _Between(meeting.port, alter)
    first = pool.submit(meeting.meet, 2.0)
    failure = _attend(pool, 1, 2, between.port, 1.0).exception(DEADLINE)
    assert isinstance(failure, ClusterError) and "no meeting of all 2 processes" in str(failure)
    assert "Received: 1 of 2 processes in 2 s: rank 0" in str(first.exception(DEADLINE))
    between.close()
    assert any(b"proof" in message for message in between.passed)


def test_who_only_passes_on_does_no_harm(pool: ThreadPoolExecutor) -> None:
    meeting = _rank_0(2)
    between = _Between(meeting.port, lambda message: message)
    first = pool.submit(meeting.meet, DEADLINE)
    assert _attend(pool, 1, 2, between.port).result(DEADLINE) == first.result(DEADLINE)
    between.close()


def test_a_repeated_message_is_noticed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = connections.framed(socket.create_connection(listening.getsockname()))
        other = connections.framed(listening.accept()[0])
    with one, other, ThreadPoolExecutor(1) as pool:
        done = pool.submit(connections.authenticate, one, SECRET, first=True)
        connections.authenticate(other, SECRET, first=False)
        done.result(DEADLINE)
        one.send_bytes(b"pay")
        raw = bytes(other.first(4 + 32 + 3, time.monotonic() + 5.0))
        assert other.recv_bytes() == b"pay"
        one.socket.send(raw)
        with pytest.raises(connections.ENDS, match="altered, repeated or left out"):
            other.recv_bytes()
        # Nor can it be sent back to where it came from.
        other.socket.send(raw)
        with pytest.raises(connections.ENDS, match="altered, repeated or left out"):
            one.recv_bytes()


# --- Lying ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets one address be none of the cluster's."""
    monkeypatch.setattr(Hosts, "include", lambda self, address: address != ELSEWHERE)


def _lie(cluster: ClusterConfig, source: str = ELSEWHERE, rank: int = 1, **lies: object) -> connections.Connection:
    connection = connections.framed(_connect(_port(cluster), source))
    assert "roll_call" in connections.receive(connection, 1000, time.monotonic() + 10.0)
    hello = messages.hello(cluster.with_task("worker", rank), {"same.keras": "3"}, rank)
    connections.send(connection, {**hello, **lies})
    return connection


LIES = {
    "version": {"version": 99},
    "cluster": {"fingerprint": "x", "jobs": "\x1b]0;mine\x07"},
    "keras": {"info": {"same.keras": "\x1b[2J4"}},
    "a short line": {"version": 99, "info": None, "jobs": None, "process": None},
}


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_the_word_of_a_stranger_ends_no_job(
    pool: ThreadPoolExecutor, cluster: ClusterConfig, lie: dict, caplog: pytest.LogCaptureFixture
) -> None:
    first = _start(pool, cluster, 0, info={"same.keras": "3"})
    for _ in range(3):
        with _lie(cluster, task="worker 1\x1b[2J", **lie) as stranger:
            (told,) = connections.receive(stranger, 10_000, time.monotonic() + 10.0)["error"]
            assert "worker 0" in told and told.isprintable()
    others = [_start(pool, cluster, rank, info={"same.keras": "3"}) for rank in (1, 2)]
    assert all(len(one.result(DEADLINE)) == 3 for one in (first, *others))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1, "each kind of lie is told once"
    assert warnings[0].startswith(f"tfdist: turned away somebody from {ELSEWHERE}, no host of this cluster: ")
    assert warnings[0].isprintable()


@pytest.mark.usefixtures("elsewhere")
def test_strangers_are_counted_where_tasks_do_not_come(
    pool: ThreadPoolExecutor, cluster: ClusterConfig, kept: list
) -> None:
    first = _start(pool, cluster, 0, 2.0, info={"same.keras": "3"})
    for number in range(30):
        kept.append(_lie(cluster, version=100 + number).socket)
    failure = first.exception(DEADLINE)
    assert isinstance(failure, BarrierTimeoutError)
    assert f"; turned away: somebody from {ELSEWHERE}, which is no host of this cluster (" in str(failure)
    assert "others (2" in str(failure) and len(str(failure)) < 6000


@pytest.mark.exhaustive
@pytest.mark.usefixtures("elsewhere")
def test_everybody_is_told_of_a_task_with_another_cluster(
    monkeypatch: pytest.MonkeyPatch,
    pool: ThreadPoolExecutor,
    cluster: ClusterConfig,
    kept: list,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A wrong address in TF_CONFIG looks to the chief as a stranger does."""
    monkeypatch.setattr(messages, "WAIT_NOTE_SECONDS", 1.0)
    first, impatient = _start(pool, cluster, 0, 3.0), _start(pool, cluster, 1, 2.0)
    time.sleep(0.2)
    kept.append(_lie(cluster, rank=2, fingerprint="wrong", jobs="\x1b[2J").socket)
    said = f"; turned away: somebody from {ELSEWHERE}, which is no host of this cluster (worker 0 and worker 2 have "
    for one in (first, impatient):
        failure = one.exception(DEADLINE)
        assert isinstance(failure, BarrierTimeoutError) and said in str(failure) and str(failure).isprintable()
    notes = [record.getMessage() for record in caplog.records if "waiting for worker" in record.getMessage()]
    assert len(notes) == 2 and all(said in note for note in notes)

    first, other = _start(pool, cluster, 0, 1.5), _start(pool, cluster, 1, 3.0)
    kept.append(_lie(cluster, rank=2, fingerprint="wrong").socket)
    assert str(other.exception(DEADLINE)) == str(first.exception(DEADLINE))
    assert said in str(other.exception(DEADLINE))


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("comes_first", [True, False])
def test_a_stranger_with_the_name_of_a_task(
    monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor, cluster: ClusterConfig, comes_first: bool
) -> None:
    monkeypatch.setattr(chief, "_FAREWELL_SECONDS", 2 * DEADLINE)  # nobody waits for the stranger to leave
    first = _start(pool, cluster, 0, info={"same.keras": "3"})
    if not comes_first:
        second = _start(pool, cluster, 1, info={"same.keras": "3"})
        time.sleep(0.5)
    stranger = _lie(cluster)
    if comes_first:
        assert "waiting" in connections.receive(stranger, 10_000, time.monotonic() + 10.0)
        second = _start(pool, cluster, 1, info={"same.keras": "3"})
    told = connections.receive(stranger, 10_000, time.monotonic() + 10.0)
    assert "two processes claim the same task worker 1" in told["error"][0]
    third = _start(pool, cluster, 2, info={"same.keras": "3"})
    assert all(len(one.result(DEADLINE)) == 3 for one in (first, second, third))
    stranger.close()


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_task_of_the_job_still_ends_it_at_once(
    monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor, cluster: ClusterConfig, lie: dict
) -> None:
    monkeypatch.setattr(chief, "_FAREWELL_SECONDS", 0.3)
    others = [_start(pool, cluster, rank, info={"same.keras": "3"}) for rank in (0, 2)]
    with _lie(cluster, "127.0.0.1", **lie):
        for one in others:
            failure = one.exception(DEADLINE)
            assert type(failure) is ClusterError and "worker 0" in str(failure) and str(failure).isprintable()


@pytest.fixture
def no_name_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No lookup of a name ends before the test; the address of whoever comes has to be looked up."""
    ended, include = threading.Event(), Hosts.include

    def look_up(host: str) -> set[str]:
        ended.wait(4 * DEADLINE)
        return set()

    monkeypatch.setattr(hosts, "_addresses", look_up)
    monkeypatch.setattr(Hosts, "include", lambda self, address: include(self, "198.51.100.9"))
    yield ended
    ended.set()
    for thread in _lookups():
        thread.join(DEADLINE)


def _lookups() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tfdist-hosts"]


@pytest.mark.usefixtures("no_name_server")
@pytest.mark.parametrize(("timeout", "patience"), [(0.7, 2 * DEADLINE), (DEADLINE, 0.3)], ids=["deadline", "names"])
def test_names_that_are_never_found_hold_nobody(
    monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor, cluster: ClusterConfig, timeout: float, patience: float
) -> None:
    monkeypatch.setattr(hosts, "_SECONDS", patience)
    first = _start(pool, cluster, 0, timeout, info={"same.keras": "3"})
    with _lie(cluster, version=99) as stranger:
        told = connections.receive(stranger, 10_000, time.monotonic() + DEADLINE)
    if patience > timeout:
        # The search for names and the barrier end at the same moment: either may be told first.
        assert "different versions" in told["error"][0] if "error" in told else "not all tasks" in told["timeout"][0]
        assert isinstance(first.exception(DEADLINE), BarrierTimeoutError)
    else:
        assert "different versions" in told["error"][0]
        others = [_start(pool, cluster, rank, info={"same.keras": "3"}) for rank in (1, 2)]
        assert all(len(one.result(DEADLINE)) == 3 for one in (first, *others))
    assert 1 <= len(_lookups()) <= 16 and all(thread.daemon for thread in _lookups()), "no end of a program waits"


def test_as_few_threads_as_there_may_be_look_names_up(no_name_server: threading.Event) -> None:
    many = Hosts(ClusterConfig({"worker": [f"node-{number}:1" for number in range(100)]}), time.monotonic() + 0.2)
    assert not many.include("198.51.100.9") and len(_lookups()) == 16
    no_name_server.set()
    for thread in _lookups():
        thread.join(DEADLINE)
    assert len(many._unknown) == 100 - 16, "none is looked up after the deadline"


# --- With a token -----------------------------------------------------------------------------------------------------

TOKEN = {"TFDIST_TOKEN": "of this job"}


def test_with_a_token_strangers_are_not_even_heard(pool: ThreadPoolExecutor, cluster: ClusterConfig) -> None:
    first = _start(pool, cluster, 0, env=TOKEN)
    for _ in range(3):
        with _lie(cluster, "127.0.0.1", version=99) as stranger, pytest.raises(connections.ENDS):
            connections.receive(stranger, 10_000, time.monotonic() + 10.0)  # a challenge, then the end
            connections.receive(stranger, 10_000, time.monotonic() + 10.0)
    others = [_start(pool, cluster, rank, env=TOKEN) for rank in (1, 2)]
    assert [one.result(DEADLINE) for one in (first, *others)] == [{rank: {} for rank in range(3)}] * 3


@pytest.mark.parametrize(
    ("env", "chiefs", "said"),
    [
        ({"TFDIST_TOKEN": "of another"}, TOKEN, "the chief there has another TFDIST_TOKEN"),
        ({}, TOKEN, "worker 1 has no TFDIST_TOKEN, and the chief has one; set it to the same text on all tasks"),
        (TOKEN, {}, "worker 1 has TFDIST_TOKEN, and the chief has none; set it to the same text on all tasks"),
    ],
)
def test_another_token_is_told_in_words(
    pool: ThreadPoolExecutor, cluster: ClusterConfig, env: dict, chiefs: dict, said: str
) -> None:
    first, second = _start(pool, cluster, 0, 2.0, env=chiefs), _start(pool, cluster, 1, 1.0, env=env)
    assert said in str(second.exception(DEADLINE))
    failure = str(first.exception(DEADLINE))
    assert "missing: worker 1" in failure
    if env and chiefs:
        assert "turned away: somebody from 127.0.0.1 who does not know this job's TFDIST_TOKEN" in failure


@pytest.mark.parametrize("env", [TOKEN, {}], ids=["token", "no token"])
def test_who_says_nothing_is_counted_apart(
    monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor, cluster: ClusterConfig, kept: list, env: dict
) -> None:
    monkeypatch.setattr(listener, "_SPARE_STRANGERS", 0)
    first = _start(pool, cluster, 0, 1.0, env=env)
    kept += [_connect(_port(cluster)) for _ in range(5)]  # more than tasks: the oldest two are dropped
    failure = str(first.exception(DEADLINE))
    said = "; turned away: 2 connections that did not introduce themselves (2 of them cut off to let others in)"
    assert failure.endswith(said)


def test_at_a_barrier_with_a_token_nobody_in_between_can_alter_anything(
    pool: ThreadPoolExecutor, cluster: ClusterConfig
) -> None:
    first = _start(pool, cluster, 0, 2.0, env=TOKEN)
    _connect(_port(cluster)).close()
    between = _Between(_port(cluster), lambda message: message.replace(b'"version": 2', b'"version": 3'))
    places = [f"127.0.0.1:{between.port}", *list(cluster.jobs["worker"].values())[1:]]
    second = _start(pool, ClusterConfig({"worker": places}), 1, 1.0, env=TOKEN)
    assert isinstance(second.exception(DEADLINE), BarrierTimeoutError)
    assert isinstance(first.exception(DEADLINE), BarrierTimeoutError)
    between.close()


# --- Other versions ---------------------------------------------------------------------------------------------------

OTHER = {"tfdist": 3, "challenge": "0" * 64}
SAID = "it uses another version of tfdist (received version 3 of the handshake, expected 2); install the same one on "


def _as_client_of_another_version(port: int) -> None:
    with connections.framed(_connect(port)) as stranger:
        hear = functools.partial(connections.receive, stranger, 1000, time.monotonic() + 10.0)
        while "challenge" not in hear():
            pass  # the barrier's greeting
        connections.send(stranger, OTHER)
        with pytest.raises(connections.ENDS):
            hear()


@contextlib.contextmanager
def _as_server_of_another_version(*said: dict) -> Iterator[tuple[int, list[dict]]]:
    """A port where somebody greets so, and what was answered."""
    heard: list[dict] = []

    def serve(connection: connections.Connection) -> None:
        for one in said:
            connections.send(connection, one)
        heard.append(connections.receive(connection, 10_000, time.monotonic() + 10.0))

    with socket.create_server(("127.0.0.1", 0)) as bound:
        server = connections.Listener(bound, serve, "test")
        yield server.port, heard
        server.end()


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "another version" in record.getMessage()]


def test_a_task_that_says_it_is_of_another_version_ends_no_job(
    pool: ThreadPoolExecutor, cluster: ClusterConfig, caplog: pytest.LogCaptureFixture
) -> None:
    first = _start(pool, cluster, 0, env=TOKEN)
    for _ in range(3):
        _as_client_of_another_version(_port(cluster))
    said = f"tfdist: turned away somebody from 127.0.0.1: {SAID}every machine"
    assert _warnings(caplog) == [said], "at once, and once"
    others = [_start(pool, cluster, rank, env=TOKEN) for rank in (1, 2)]
    assert all(len(one.result(DEADLINE)) == 3 for one in (first, *others))


def test_a_rank_that_says_it_is_of_another_version_ends_no_meeting(
    pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    meeting = _rank_0(2)
    for _ in range(3):
        _as_client_of_another_version(meeting.port)
    assert len(_warnings(caplog)) == 1
    assert _warnings(caplog)[0].startswith(f"turned away: somebody from 127.0.0.1: {SAID}")
    assert f"; turned away: somebody from 127.0.0.1: {SAID}" in str(pool.submit(meeting.meet, 0.1).exception(DEADLINE))


def test_a_registration_of_another_version_is_refused_at_once(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    meeting = _rank_0(2)
    monkeypatch.setattr(Registration, "to_json", lambda self: b'{"rank": 1, "mood": "good"}')
    failure = _attend(pool, 1, 2, meeting.port).exception(DEADLINE)
    assert "knows the secret of this job, but sends something else than this version of tfdist does" in str(failure)
    assert "Expected: the same version of tfdist on every machine" in str(failure)
    assert len([record for record in caplog.records if "turned away" in record.getMessage()]) == 1
    meeting.end()


def test_what_a_task_says_to_a_chief_that_says_it_is_of_another_version(
    pool: ThreadPoolExecutor, cluster: ClusterConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with _as_server_of_another_version(messages.banner(has_secret=True), OTHER) as (port, heard):
        places = [f"127.0.0.1:{port}", *list(cluster.jobs["worker"].values())[1:]]
        failure = _start(pool, ClusterConfig({"worker": places}), 1, 1.5, env=TOKEN).exception(DEADLINE)
    assert isinstance(failure, BarrierTimeoutError) and SAID in str(failure)
    assert len(heard) > 1 and all(one["tfdist"] == 2 for one in heard)
    assert len(_warnings(caplog)) == 1 and SAID in _warnings(caplog)[0]


def test_what_a_rank_says_to_a_rank_0_that_says_it_is_of_another_version(
    pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    with _as_server_of_another_version(OTHER) as (port, heard):
        failure = _attend(pool, 1, 2, port, 1.0).exception(DEADLINE)
    assert SAID in str(failure) and "TFDIST_JOB" not in str(failure)
    assert len(heard) > 1 and all(one["tfdist"] == 2 for one in heard)
    assert len(_warnings(caplog)) == 1


def test_without_a_token_another_version_of_the_barrier_ends_a_task_at_once(
    pool: ThreadPoolExecutor, cluster: ClusterConfig
) -> None:
    with _as_server_of_another_version({"roll_call": 3, "token": False}) as (port, heard):
        places = [f"127.0.0.1:{port}", *list(cluster.jobs["worker"].values())[1:]]
        failure = _start(pool, ClusterConfig({"worker": places}), 1).exception(DEADLINE)
    assert type(failure) is ClusterError
    assert str(failure).startswith(
        "worker 1 and the chief use different versions of tfdist (version 2 and 3 of the bar"
    )
    assert [(one["rank"], one["version"]) for one in heard] == [(1, 2)], "the chief learns it as well"


def test_texts_of_whoever_is_in_the_place_of_the_chief_are_cleaned(cluster: ClusterConfig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound, ThreadPoolExecutor(1) as pool:
        places = [f"127.0.0.1:{bound.getsockname()[1]}", *list(cluster.jobs["worker"].values())[1:]]
        task = _start(pool, ClusterConfig({"worker": places}), 1, 10.0)
        with connections.framed(bound.accept()[0]) as connection:
            connections.send(connection, messages.banner(has_secret=False))
            assert json.loads(connection.recv_bytes())["rank"] == 1
            connections.send(connection, {"error": ["\x1b]0;mine\x07", 7, None]})
            failure = task.exception(DEADLINE)
    assert isinstance(failure, ClusterError)
    assert failure.problems == ["\\x1b]0;mine\\x07", "7", "None"]
