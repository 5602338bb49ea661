"""The one server of a job: what it keeps, and strangers that are silent, slow, many, lying or in between."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.launcher.conftest import wait_until
from tests.tiers import daily
from tfdist.cluster import ClusterError, server, sockets
from tfdist.cluster.server import (
    BarrierTimeoutError,
    Client,
    Listener,
    ProcessGoneError,
    Server,
    UnderWayError,
    call,
    hello,
    make_room,
)
from tfdist.cluster.sockets import UnreachedError

# For who comes. Nothing waits longer than until that has come.
DEADLINE = 60.0
SECRET = b"of this job"
# Where strangers come from; all of 127/8 is this machine.
ELSEWHERE = "127.0.0.9"


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(300) as started:
        yield started


@pytest.fixture
def kept() -> Iterator[list[Any]]:
    """What is closed when the test ends."""
    opened: list[Any] = []
    yield opened
    for one in opened:
        (one.close if isinstance(one, socket.socket) else one.leave)()


@pytest.fixture
def start(kept: list) -> Callable[..., Server]:
    """Starts the server of a job."""

    def started(size: int = 3, secret: bytes = SECRET, **options: Any) -> Server:
        made = Server(sockets.bind_host("127.0.0.1", 0), secret, size, hello(0, "rank 0"), **options)
        kept.append(made)
        return made

    return started


@pytest.fixture
def come(kept: list) -> Callable[..., Client]:
    """Connects another process."""

    def connected(at: Server | int, rank: int, secret: bytes = SECRET, who: str = "") -> Client:
        port = at if isinstance(at, int) else at.port
        client = Client(("127.0.0.1", port), secret, hello(rank, who or f"rank {rank}"), DEADLINE, DEADLINE)
        kept.append(client)
        return client

    return connected


def names(ranks: Any) -> list[str]:
    return [f"rank {rank}" for rank in ranks]


def collect(started: Server, timeout: float = DEADLINE, check: Callable = lambda said: []) -> dict:
    """Rank 0's part of a gathering."""
    came = started.collect("meeting", "own", timeout, names, check)
    started.publish("meeting", {"met": list(came.values())})
    return came


def gather(client: Client, value: Any = None, timeout: float = DEADLINE) -> dict:
    _, result = client.gather("meeting", value, time.monotonic() + timeout, lambda *news: None)
    return server.unpack(result, 1 << 20)


def _connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), DEADLINE)


def _line(connection: socket.socket) -> dict:
    line = b""
    while not line.endswith(b"\n"):
        more = connection.recv(1)
        if not more:
            raise ConnectionResetError
        line += more
    return json.loads(line)


# --- What it keeps ----------------------------------------------------------------------------------------------------


def test_texts_go_in_all_directions(start, come) -> None:
    started = start()
    everybody = [started, come(started, 1), come(started, 2)]
    for number, giver in enumerate(everybody):
        giver.set("a", text := f'ünïcode "and"\nmore {number}' + "x" * number * 1_500_000)
        assert [one.get("a", 1.0) == text for one in everybody] == [True] * 3
        assert [one.decide(f"c {number}", f"of {number}") for one in (giver, *everybody)] == [f"of {number}"] * 4
    everybody[2].delete("a")
    assert everybody[1].get("a", 0.0) is None


def test_waits_end_with_the_text_or_with_their_time(start, come, pool: ThreadPoolExecutor) -> None:
    started = start()
    early = come(started, 1)
    waiting = [pool.submit(one.get, "a", DEADLINE) for one in (early, started)]
    wait_until(lambda: len(started._waiting.get("a", [])) == 2, DEADLINE, "both requests")
    # A long wait holds no other request of the process.
    early.set("a", "at last")
    assert [one.result(DEADLINE) for one in waiting] == ["at last"] * 2
    began = time.monotonic()
    assert early.get("never", 0.2) is None and started.get("never", 0.2) is None
    assert time.monotonic() - began >= 0.4


def test_who_waits_for_a_process_that_is_gone_is_told(start, come, pool: ThreadPoolExecutor) -> None:
    started = start()
    waits, leaves = come(started, 1), come(started, 2)
    leaves.set("last words", "goodbye")
    waiting = [pool.submit(one.get, "never", DEADLINE, 2) for one in (waits, started)]
    wait_until(lambda: len(started._waiting.get("never", [])) == 2, DEADLINE, "both requests")
    leaves.leave()
    # After the time that was asked for they would get None.
    for one in waiting:
        with pytest.raises(ProcessGoneError, match="rank 2 is gone"):
            one.result(DEADLINE)
    with pytest.raises(ProcessGoneError):
        started.get("never", DEADLINE, of=2)
    assert waits.get("last words", 1.0, of=2) == "goodbye"
    assert waits.get("never", 0.1, of=3) is None
    come(started, 2).set("never", "again")
    assert waits.get("never", DEADLINE, of=2) == "again"
    began = time.monotonic()
    started.wait_until_left(0.3)
    assert time.monotonic() - began >= 0.3


def test_a_server_that_is_gone_or_does_not_answer_is_named(monkeypatch, start, come) -> None:
    started = start()
    client = come(started, 1)
    monkeypatch.setattr(server, "ANSWER_SECONDS", 0.3)
    goes_on = threading.Event()
    server.loop().call_soon_threadsafe(goes_on.wait, DEADLINE)
    with pytest.raises(ConnectionError, match=rf"the messages of this job, 127\.0\.0\.1:{started.port}, does not answ"):
        client.set("a", "1")
    monkeypatch.setattr(server, "_SOON", 0.1)
    assert client.glance("a") is None
    goes_on.set()
    monkeypatch.setattr(server, "_SOON", DEADLINE)
    assert client.glance("a") == "1"  # it came before
    monkeypatch.setattr(server, "ANSWER_SECONDS", DEADLINE)
    started.leave()
    assert client.glance("a") is None
    with pytest.raises(ProcessGoneError, match=rf"127\.0\.0\.1:{started.port}, is gone"):
        client.get("a", DEADLINE, of=0)
    with pytest.raises(ConnectionError, match="is gone"):
        client.set("a", "1")
    assert client.is_lost
    with pytest.raises(UnreachedError, match="connection refused"):
        come(started, 1)


def test_a_gathering_and_the_next_one(start, come, pool: ThreadPoolExecutor) -> None:
    started = start()
    clients = [come(started, rank) for rank in (1, 2)]
    for _ in range(2):
        first = pool.submit(collect, started)
        others = [pool.submit(gather, client, {"rank": rank}) for rank, client in enumerate(clients, 1)]
        assert [one.result(DEADLINE) for one in others] == [{"met": ["own", {"rank": 1}, {"rank": 2}]}] * 2
        assert first.result(DEADLINE) == {0: "own", 1: {"rank": 1}, 2: {"rank": 2}}
        started._over.clear()
    with pytest.raises(UnreachedError, match="connection refused"):
        come(started, 1)  # it listens no longer, and the connections stay
    clients[0].set("a", "1")
    assert clients[1].get("a", 1.0) == "1"


def test_it_listens_no_longer_when_they_hear_that_all_have_met(
    monkeypatch, start, come, pool: ThreadPoolExecutor
) -> None:
    """Who hears it looks for TensorFlow's server at the same port, and must not find this one."""
    started, send, found = start(2), server._Guest.send, []

    def look_and_send(guest: Any, message: Any) -> None:
        if "all" in message:
            with socket.socket() as other:
                found.append(other.connect_ex(("127.0.0.1", started.port)))
        send(guest, message)

    monkeypatch.setattr(server._Guest, "send", look_and_send)
    first = pool.submit(collect, started)
    gather(come(started, 1))
    first.result(DEADLINE)
    assert found == [errno.ECONNREFUSED]


def test_who_comes_after_all_have_met_is_not_said_to_lack_the_secret(monkeypatch, start, come, pool) -> None:
    started = start(2)
    early = _connect(started.port)
    early.recv(1, socket.MSG_PEEK)  # accepted while it listens
    first = pool.submit(collect, started)
    gather(come(started, 1))
    first.result(DEADLINE)
    monkeypatch.setattr(sockets, "connect", lambda place, seconds: early)
    with pytest.raises(UnreachedError, match="it was there, and is gone"):
        come(started, 1)


def test_who_comes_late_gives_the_others_no_more_time(clock, start, come, pool: ThreadPoolExecutor) -> None:
    started, others = start(4), []
    first = pool.submit(collect, started, 1000.0)
    for rank in (1, 2):
        others.append(pool.submit(gather, come(started, rank), None, 10_000.0))
        wait_until(
            lambda: started._gatherings and len(started._gatherings["meeting"].came) == len(others), DEADLINE, "it"
        )
        assert not any(one.done() for one in (first, *others))
        clock.ahead += 500.0
    said = "not all tasks came within start_timeout=1000 s; missing: rank 3; start them, look into their output for why"
    for one in (first, *others):
        assert str(one.exception(DEADLINE)).startswith(said)


def test_a_forked_process_has_a_loop_of_its_own(start, come) -> None:
    client = come(start(), 1)
    child = os.fork()
    if not child:
        with pytest.raises(ConnectionError):
            client.set("a", "1")
        with contextlib.suppress(BaseException):
            made = Server(sockets.bind_host("127.0.0.1", 0), SECRET, 2, hello(0, "rank 0"))
            Client(("127.0.0.1", made.port), SECRET, hello(1, ""), DEADLINE).set("a", "1")
            os._exit(made.get("a", 1.0) != "1")
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    client.set("a", "1")


# It connects, forks a helper that goes on, and is killed.
FORKS = """
import os, signal, sys, time
from tfdist.cluster import server
client = server.Client(("127.0.0.1", int(sys.argv[1])), b"of this job", server.hello(2, ""), 60.0)
if not (helper := os.fork()):
    time.sleep(600)
    os._exit(0)
print(helper, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_helper_that_a_dead_process_has_forked_keeps_no_connection(start, come) -> None:
    started = start()
    with subprocess.Popen([sys.executable, "-c", FORKS, str(started.port)], stdout=subprocess.PIPE) as process:
        helper = int(process.stdout.readline())
        try:
            with pytest.raises(ProcessGoneError):
                come(started, 1).get("a", DEADLINE, of=2)
        finally:
            os.kill(helper, signal.SIGKILL)


# It ends without leaving.
ENDS = """
from tfdist.cluster import server, sockets
started = server.Server(sockets.bind_host("127.0.0.1", 0), b"", 4, server.hello(0, ""))
clients = [server.Client(("127.0.0.1", started.port), b"", server.hello(rank, ""), 60.0) for rank in (1, 2, 3)]
"""


def test_a_program_that_ends_says_nothing_of_its_connections() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=DEADLINE)
    assert (done.returncode, done.stderr) == (0, "")


# --- Who does not know the secret, or is of another version -----------------------------------------------------------


def test_another_secret_is_refused_and_counted(start, come) -> None:
    started = start()
    with pytest.raises(UnreachedError, match=r"does not know the secret of this job \(it hung up\)"):
        come(started, 1, b"of another job")
    with pytest.raises(UnreachedError, match="this process has no TFDIST_TOKEN, and the other end has one; set it to"):
        come(started, 1, b"")
    with pytest.raises(UnreachedError, match="this process has TFDIST_TOKEN, and the other end has none; set it to"):
        come(start(secret=b""), 1)
    with pytest.raises(BarrierTimeoutError) as caught:
        collect(started, 0.1)
    said = "; turned away: a process from 127.0.0.1: it does not know the secret of this job"
    assert "missing: rank 1, rank 2; start them" in str(caught.value) and said in str(caught.value)


@contextlib.contextmanager
def _in_its_place(*lines: bytes) -> Iterator[int]:
    """A port where this is said."""

    def serve(one: socket.socket) -> None:
        with one, contextlib.suppress(OSError):
            for line in lines:
                one.sendall(line)
                time.sleep(0.02)
            one.settimeout(DEADLINE)
            one.recv(10_000)

    with socket.create_server(("127.0.0.1", 0)) as bound:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=(bound.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield bound.getsockname()[1]
        bound.shutdown(socket.SHUT_RDWR)


GREETING = {"tfdist": server.VERSION, "challenge": "0" * 64, "secret": True}
SETTINGS_FRAME = b"\x00\x00\x12\x04\x00\x00\n\n"  # of HTTP/2; it may look like the end of a line


@pytest.mark.parametrize(
    ("lines", "error", "said"),
    [
        ([json.dumps(GREETING).encode() + b"\n", b'{"proof": "1"}\n'], UnreachedError, r"\(it has another secret\)"),
        ([b'{"tfdist": 99, "challenge": "0"}\n'], UnreachedError, "received version 99 of the handshake, expected"),
        ([SETTINGS_FRAME], UnderWayError, "a TensorFlow server answers there instead of a waiting tfdist chief: a job"),
        ([SETTINGS_FRAME + bytes(100_000)], UnderWayError, "a TensorFlow server answers there"),
        ([SETTINGS_FRAME[:2], SETTINGS_FRAME[2:]], UnderWayError, "a TensorFlow server answers there"),
        ([b"\x00\x00\x12\x05\n"], UnreachedError, "something else than a waiting tfdist chief answers there"),
        ([b"SSH-2.0-OpenSSH_9.2\r\n"], UnreachedError, "something else than a waiting tfdist chief answers there"),
        ([b"x" * 2000], UnreachedError, r"answers there \(it sends a line of more than 1024 bytes\)"),
        ([], UnreachedError, r"something else than a waiting tfdist chief answers there \(it is silent\)"),
    ],
    ids=["proof", "version", "server", "much", "pieces", "frame", "ssh", "long", "silent"],
)
def test_who_is_in_the_place_of_the_server(lines: list[bytes], error: type, said: str) -> None:
    with _in_its_place(*lines) as port, pytest.raises(error, match=said):
        call(("127.0.0.1", port), SECRET, hello(1, ""), DEADLINE, DEADLINE if lines else 0.5)


def test_a_client_of_another_version_ends_nothing(start, come, pool, caplog: pytest.LogCaptureFixture) -> None:
    started = start(2)
    for _ in range(3):
        with _connect(started.port) as stranger:
            assert _line(stranger)["tfdist"] == server.VERSION
            stranger.sendall(b'{"tfdist": 99, "challenge": "0", "proof": "1"}\n')
            with pytest.raises(ConnectionError):
                _line(stranger)
    said = "tfdist: turned away a process from 127.0.0.1: it uses another version of tfdist (received version 99 of the"
    assert [record.getMessage().startswith(said) for record in caplog.records] == [True], "at once, and once"
    first = pool.submit(collect, started)
    assert gather(come(started, 1)) == {"met": ["own", None]} and first.result(DEADLINE)


# --- Silent, slow, many -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strangers", "secret"), [(80, SECRET), (500, b"")], ids=["secret", "open"])
def test_silent_connections_keep_nobody_out(
    monkeypatch, start, come, pool, kept: list, strangers: int, secret: bytes
) -> None:
    monkeypatch.setattr(server, "SECONDS", 10 * DEADLINE)  # their time ends none of them
    started = start(3, secret)
    first = pool.submit(collect, started)
    kept += [_connect(started.port) for _ in range(strangers)]
    others = [pool.submit(gather, come(started, rank, secret), rank) for rank in (1, 2)]
    assert [one.result(DEADLINE) for one in others] == [{"met": ["own", 1, 2]}] * 2
    assert first.result(DEADLINE)
    assert len(started.strangers) == 80 if strangers == 80 else len(started.strangers) <= 131


def test_a_byte_now_and_then_keeps_no_place(monkeypatch, start) -> None:
    monkeypatch.setattr(server, "SECONDS", 0.4)
    with _connect(start().port) as slow, pytest.raises(ConnectionError):
        for _ in range(server.FIRST_LINE):  # a longer line would end it, too
            slow.sendall(b" ")
            time.sleep(0.05)


@pytest.mark.parametrize("line", [b"x" * (server.FIRST_LINE + 2), b"x" * (1 << 20) + b"\n"], ids=["short", "whole"])
def test_a_line_that_is_too_long_ends_the_connection(start, line: bytes) -> None:
    with _connect(start().port) as stranger, pytest.raises(ConnectionError):
        _line(stranger)
        stranger.sendall(line)
        _line(stranger)


def test_without_a_secret_lines_are_short_until_all_have_met(start, come, pool) -> None:
    come(start(3), 1).set("a", "x" * 100_000)
    started = start(3, b"")
    for early in (lambda one: one.set("a", "1"), lambda one: one.get("a", 0.0), lambda one: gather(one, "x" * 100_000)):
        with pytest.raises((ConnectionError, UnreachedError)):
            early(come(started, 1, b""))
    first, others = pool.submit(collect, started), [come(started, rank, b"") for rank in (1, 2)]
    assert [pool.submit(gather, one, "x" * 60_000) for one in others] and first.result(DEADLINE)
    others[0].set("a", "x" * 100_000)
    assert others[1].get("a", DEADLINE) == "x" * 100_000


def test_who_takes_no_message_holds_nobody(monkeypatch, start, come, pool, kept: list) -> None:
    monkeypatch.setattr(server, "FAREWELL_SECONDS", 1.0)
    started = start(3)
    stalled, other = come(started, 1), come(started, 2)
    server.in_loop(stalled._wire.writer.transport.pause_reading)
    server.in_loop(lambda: [started._ranks[1].send([0, "waiting", [["x" * 1000] * 1000, 0, ""]]) for _ in range(20)])
    other.set("a", "x" * 1000)
    assert started.get("a", 1.0) == other.get("a", 1.0) == "x" * 1000
    second = pool.submit(gather, other)
    wait_until(lambda: started._ranks[2].coming, DEADLINE, "the other one")
    for missed in (lambda: started.collect("meeting", None, 0.8, names, lambda said: []), second.result):
        with pytest.raises(BarrierTimeoutError, match="missing: rank 1;"):
            missed()
    assert not started.guests or server.in_loop(lambda: all(one.writer.is_closing() for one in started.guests))


# Rank 0 alone, with few open files; it prints where it listens.
FEW_FILES = """
import resource, sys
from tfdist.cluster import server, sockets
soft, hard, size = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
own = server.hello(0, "rank 0")
started = server.Server(sockets.bind_host("127.0.0.1", 0), b"of this job", size, own)
print(started.port, flush=True)
came = started.collect("meeting", None, 60.0, lambda ranks: [f"rank {rank}" for rank in ranks], lambda said: [])
started.publish("meeting", {"met": len(came)})
print(len(came), resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)
"""


@contextlib.contextmanager
def _with_few_files(soft: int, hard: int, size: int) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-c", FEW_FILES, *map(str, (soft, hard, size))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE)


def test_silent_connections_take_all_open_files_and_rank_0_goes_on(come, pool, kept: list) -> None:
    with _with_few_files(64, 64, 3) as process:
        port = int(process.stdout.readline())
        kept += [_connect(port) for _ in range(300)]

        def meet(rank: int) -> dict:
            at = {"": lambda left: come(port, rank)}
            return gather(sockets.keep_trying(at, time.monotonic() + DEADLINE, {}))

        assert list(pool.map(meet, (1, 2))) == [{"met": 3}] * 2
        assert process.stdout.readline() == "3 64\n"


@pytest.mark.parametrize(("soft", "size"), daily([(64, 150), (1024, 2000)], "64"))
def test_the_soft_limit_is_raised_for_many_ranks(kept: list, soft: int, size: int) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 3000:
        pytest.skip("this machine allows too few open files")
    assert make_room(2500) >= 2500
    with _with_few_files(soft, 4096, size) as process, ThreadPoolExecutor(size) as pool:
        port = int(process.stdout.readline())

        def one(rank: int) -> int:
            client = Client(("127.0.0.1", port), SECRET, hello(rank, f"rank {rank}"), 60.0)
            kept.append(client)
            return gather(client, None, 100.0)["met"]

        assert list(pool.map(one, range(1, size))) == [size] * (size - 1)
        met, limit = map(int, process.stdout.readline().split())
    assert met == size < limit < 2 * size + 500


def test_too_low_a_hard_limit_is_told_in_words() -> None:
    with _with_few_files(1024, 1024, 2000) as process:
        told = process.communicate(timeout=DEADLINE)[1]
    assert "Received: a limit of 1024 open files for rank 0, which can open 9" in told
    assert "Expected: one for each of 2000 processes. Raise the hard limit of this process to 20" in told
    assert "/etc/security/limits.conf (nofile)" in told


# --- In between -------------------------------------------------------------------------------------------------------


class _Between:
    """Passes on what two ends say to each other, line by line, and may alter it. It knows no secret."""

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
                one, other = self._server.accept()[0], _connect(self._to)
                for ends in ((one, other), (other, one)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError), source.makefile("rb") as lines:
            for line in lines:
                self.passed.append(line)
                target.sendall(self._alter(line))
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


ALTERED = {
    "text": lambda line: line.replace(b"127.0.0.1", b"127.6.6.6"),
    "byte": lambda line: line[:-2] + bytes([line[-2] ^ 1]) + b"\n" if b'"set"' in line else line,
    "twice": lambda line: line * 2 if b'"set"' in line else line,
    "left out": lambda line: b"" if b'"delete"' in line else line,
}


@pytest.mark.parametrize("alter", ALTERED.values(), ids=ALTERED)
def test_who_sits_in_between_can_alter_nothing(start, come, pool, alter: Callable[[bytes], bytes]) -> None:
    started = start()
    between = _Between(started.port, alter)
    client = come(between.port, 1)
    assert client.decide("c", "1") == "1", "to pass on does no harm"
    with contextlib.suppress(ConnectionError):
        pool.submit(client.delete, "b")
        wait_until(lambda: any(b'"delete"' in line for line in between.passed), DEADLINE, "the first request")
        client.set("a", "127.0.0.1")
    wait_until(lambda: client.is_lost, DEADLINE, "the end of the connection")
    assert started.get("a", 0.0) in (None, "127.0.0.1")
    assert "was altered, repeated or left out on its way" in started.turned_away()
    assert any(b"proof" in line for line in between.passed) and not any(SECRET in line for line in between.passed)
    between.close()


# --- Any bytes --------------------------------------------------------------------------------------------------------

FEW = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
SAID = st.dictionaries(st.sampled_from(["tfdist", "challenge", "proof", "rank", "id", "who"]), JSON, max_size=4)
LINES = st.lists((SAID | JSON).map(json.dumps).map(str.encode).map(lambda one: one + b"\n"), max_size=4).map(b"".join)
OPERATIONS = st.sampled_from(["set", "get", "decide", "delete", "gather"])


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing fails in the loop's thread, or in another one."""
    failures: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    monkeypatch.setattr(asyncio.BaseEventLoop, "default_exception_handler", lambda loop, found: failures.append(found))
    yield
    assert not failures


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("secret", [SECRET, b""], ids=["secret", "open"])
def test_any_bytes_of_strangers(start, come, secret: bytes) -> None:
    started = start(3, secret)

    @FEW
    @given(st.binary(max_size=300) | LINES)
    def converse(data: bytes) -> None:
        with _connect(started.port) as stranger, contextlib.suppress(OSError):
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(65536):
                pass

    converse()
    assert not started._ranks and not started._texts
    if secret:
        come(started, 1).set("a", "1")


@pytest.mark.usefixtures("quiet")
def test_any_request_of_who_knows_the_secret(start, come) -> None:
    started = start()

    @FEW
    @given(JSON | SAID, st.lists(JSON | st.lists(OPERATIONS | JSON, max_size=5), max_size=4))
    def ask(introduction: Any, requests: list) -> None:
        with contextlib.suppress(UnreachedError, ClusterError):
            wire = call(("127.0.0.1", started.port), SECRET, introduction, DEADLINE)
            for request in requests:
                server.in_loop(wire.send, request)
            server.in_loop(wire.abort)
        with contextlib.suppress(ConnectionError, UnreachedError, ClusterError):
            client = Client(("127.0.0.1", started.port), SECRET, hello(1, ""), DEADLINE)
            for number, request in enumerate(requests):
                server.in_loop(client._wire.send, [number, *(request if isinstance(request, list) else [request])])
            client.leave()

    ask()
    client = come(started, 2)
    client.set("a", "b")
    assert client.get("a", 1.0) == "b"


@pytest.mark.usefixtures("quiet")
def test_any_answer_of_who_is_in_the_place_of_the_server() -> None:
    @FEW
    @given(st.binary(max_size=300) | LINES, st.booleans())
    def converse(data: bytes, greets: bool) -> None:
        greeting = (json.dumps({**GREETING, "secret": False}).encode() + b"\n") * greets
        with _in_its_place(greeting + data) as port, pytest.raises((UnreachedError, ClusterError)):
            call(("127.0.0.1", port), b"", hello(1, ""), DEADLINE, 0.1)

    converse()


def test_what_would_fill_the_memory_is_refused() -> None:
    text = server.pack({"a": "x" * 10_000_000})
    assert len(text) < 20_000
    with pytest.raises(UnreachedError, match="no compressed JSON object"):
        server.unpack(text, 1_000_000)
    for wrong in ("", "x", server.pack([1]), 7, None, "[" * 1000):
        with pytest.raises(UnreachedError, match="no compressed JSON object"):
            server.unpack(wrong, 1000)


# --- Lying ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def lie(monkeypatch: pytest.MonkeyPatch, kept: list) -> Callable[..., Client]:
    """Connects a process from a host that is none of the cluster's."""
    monkeypatch.setattr(sockets, "is_loopback", lambda host: host != ELSEWHERE)
    monkeypatch.setattr(sockets, "is_own", lambda host: False)

    def lying(started: Server, rank: int, who: str = "\x1b[2J") -> Client:
        with monkeypatch.context() as patch:
            patch.setattr(
                sockets, "connect", lambda place, seconds: socket.create_connection(place, seconds, (ELSEWHERE, 0))
            )
            client = Client(("127.0.0.1", started.port), started.secret, hello(rank, who), DEADLINE, DEADLINE)
        kept.append(client)
        return client

    return lying


def _different(said: Any) -> list[str]:
    return ["they differ"] if said == "wrong" else []


@pytest.mark.parametrize("rank", [1, 7])
def test_the_word_of_a_stranger_ends_no_job(start, come, lie, pool, caplog, rank: int) -> None:
    started = start(3, b"", hosts=["192.0.2.1"])
    first = pool.submit(collect, started, DEADLINE, _different)
    for _ in range(3):
        with pytest.raises(ClusterError, match=r"^they differ$"):
            gather(lie(started, rank), "wrong")
    others = [pool.submit(gather, come(started, one, b"")) for one in (1, 2)]
    assert [one.result(DEADLINE) for one in others] == [{"met": ["own", None, None]}] * 2 and first.result(DEADLINE)
    (said,) = [record.getMessage() for record in caplog.records if "turned away" in record.getMessage()]
    assert said == f"tfdist: turned away a process from {ELSEWHERE}, which is no host of this cluster (they differ)"


def test_a_process_of_the_job_ends_it_at_once(start, come, lie, pool) -> None:
    for hosts, secret in (([ELSEWHERE], b""), (["a-name"], b""), ([], SECRET)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sockets, "addresses_of", lambda host: {ELSEWHERE})
            started = start(3, secret, hosts=hosts)
            first, other = (
                pool.submit(collect, started, DEADLINE, _different),
                pool.submit(gather, come(started, 2, secret)),
            )
            found = [first, other, pool.submit(gather, lie(started, 1), "wrong")]
            assert [str(one.exception(DEADLINE)) for one in found] == ["they differ"] * 3


@pytest.mark.parametrize("comes_first", [True, False])
def test_a_stranger_with_the_rank_of_a_process(start, come, lie, pool, comes_first: bool) -> None:
    started = start(3, b"", hosts=["192.0.2.1"])
    first = pool.submit(collect, started)
    if comes_first:
        stranger = pool.submit(gather, lie(started, 1))
        second = pool.submit(gather, come(started, 1, b""), "ours")
    else:
        second = pool.submit(gather, come(started, 1, b""), "ours")
        stranger = pool.submit(lie, started, 1)
    assert "two processes claim the same rank 1: " in str(stranger.exception(DEADLINE))
    third = pool.submit(gather, come(started, 2, b""))
    assert second.result(DEADLINE) == third.result(DEADLINE) == {"met": ["own", "ours", None]} and first.result(
        DEADLINE
    )


def test_names_that_are_never_found_hold_nobody(monkeypatch, start, come, lie, pool) -> None:
    ended = threading.Event()
    monkeypatch.setattr(sockets, "addresses_of", lambda host: ended.wait(DEADLINE) and set())
    monkeypatch.setattr(server, "LOOKUP_SECONDS", 0.5)
    started = start(2, b"", hosts=[f"node-{number}" for number in range(100)])
    first = pool.submit(collect, started, DEADLINE, _different)
    with pytest.raises(ClusterError, match="they differ"):
        gather(lie(started, 1), "wrong")
    assert len(started._lookups) == 16 and all(thread.daemon for thread in started._lookups), "no end waits for them"
    other = pool.submit(gather, come(started, 1, b""))
    assert other.result(DEADLINE) and first.result(DEADLINE)
    ended.set()


def test_without_a_secret_nobody_comes_to_two_meetings(start, come) -> None:
    """What each brings is kept until they end."""
    started = start(3, b"")
    stranger = come(started, 7, b"")
    for name in ("one", "two"):
        stranger._begun("gather", name, "x" * 1000)
    with pytest.raises(ConnectionError):
        stranger.set("a", "b")
    assert not started._gatherings


def test_many_kinds_of_strangers_are_few_in_a_message(start, lie) -> None:
    started = start(2, b"", hosts=["192.0.2.1"])
    for number in range(30):
        server.in_loop(started.turn_away, f"kind {number}")
    with pytest.raises(BarrierTimeoutError) as caught:
        collect(started, 0.1)
    assert str(caught.value).endswith("".join(f"; turned away: kind {number}" for number in range(8)))


# --- Connections that are given to others -----------------------------------------------------------------------------


def test_a_listener_gives_away_no_connection_of_who_does_not_know_the_secret() -> None:
    def take(connected: socket.socket, said: Any) -> None:
        raise ValueError

    listener = Listener(sockets.bind_host("127.0.0.1", 0), SECRET, take)
    place = "127.0.0.1", listener.port
    with server.connected(place, SECRET, "wrong", DEADLINE) as refused, contextlib.suppress(ConnectionResetError):
        assert refused.recv(1) == b""
    with pytest.raises(UnreachedError, match="does not know the secret"):
        server.connected(place, b"another", {}, DEADLINE)
    listener.leave()
    sockets.bind_host("127.0.0.1", listener.port).close()


def test_who_gets_a_connection_gets_all_that_was_sent_to_it_and_nothing_before() -> None:
    taken: queue.Queue[socket.socket] = queue.Queue()

    def take(connected: socket.socket, said: Any) -> None:
        connected.sendall(said.encode())  # at once, in the thread of all connections
        taken.put(connected)

    listener = Listener(sockets.bind_host("127.0.0.1", 0), SECRET, take)
    wire = server.call(("127.0.0.1", listener.port), SECRET, "x" * 50_000, DEADLINE)
    # Until this end has let go of its reader, the other end must send nothing that is not a line.
    time.sleep(0.1)
    assert taken.empty()
    with server.in_loop(wire.detached) as own:
        own.settimeout(DEADLINE)
        # In one piece with the byte that says that it has: what follows must not end in a reader of lines.
        own.sendall(b"!" + b"y" * 50_000)
        with taken.get(timeout=DEADLINE) as other:
            other.settimeout(DEADLINE)
            for end, sent in (own, b"x"), (other, b"y"):
                assert end.recv(50_000, socket.MSG_WAITALL) == sent * 50_000
    listener.leave()


# --- Connecting -------------------------------------------------------------------------------------------------------


def test_a_socket_that_reached_itself_counts_as_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    itself = socket.socket()
    itself.bind(("127.0.0.1", 0))
    itself.connect(itself.getsockname())
    monkeypatch.setattr(socket, "create_connection", lambda *args, **options: itself)
    with pytest.raises(ConnectionRefusedError, match="connection refused"):
        sockets.connect(("127.0.0.1", 1), 1.0)
    assert itself.fileno() == -1
