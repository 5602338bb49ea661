"""Sums over processes without TensorFlow: threads stand in for processes, and machines are made up."""

from __future__ import annotations

import re
import socket
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfdist.runtime.direct import mesh
from tfdist.runtime.direct.exchange import Exchange
from tfdist.runtime.direct.host_memory import SEGMENT, bounds_of
from tfdist.runtime.direct.links import ExchangeError
from tfdist.runtime.direct.result_memory import ResultMemory
from tfdist.supervision import anonymous_memory

SECONDS = 20.0


class Room:
    """Where stand-ins for `Peers` gather."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=SECONDS)

    def gather(self, rank: int, value: Any) -> list:
        self.values[rank] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found


class StandIn:
    """In place of `Peers`."""

    def __init__(self, room: Room, rank: int, timeout: float) -> None:
        self.room, self.rank, self.timeout = room, rank, timeout
        self.names = [f"worker {one}" for one in range(len(room.values))]

    def gather(self, topic: str, value: Any, purpose: str) -> list:
        return self.room.gather(self.rank, value)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch):
    """Starts exchanges: one for each process, given as the names of their machines."""
    made: list[Exchange] = []
    machine = threading.local()
    monkeypatch.setattr(mesh, "_machine", lambda: machine.name)

    def start(machines: str, timeout: float = SECONDS, host: str = "127.0.0.1") -> list[Exchange]:
        room = Room(len(machines))

        def connect(rank: int) -> Exchange:
            machine.name = machines[rank]
            return mesh.connect(StandIn(room, rank, timeout), host, SECONDS)

        with ThreadPoolExecutor(len(machines)) as pool:
            found = list(pool.map(connect, range(len(machines))))
        made.extend(found)
        return found

    yield start
    for exchange in made:
        exchange.close()
    deadline = time.monotonic() + SECONDS
    while any(thread.name.startswith("tfdist-exchange") for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "threads are left"
        time.sleep(0.01)


def on_all(exchanges: list[Exchange], call: Callable[[int, Exchange], Any]) -> list[Any]:
    """What each process returns, or the exception that it raises."""

    def one(rank: int) -> Any:
        try:
            return call(rank, exchanges[rank])
        except ExchangeError as error:
            return error

    with ThreadPoolExecutor(len(exchanges)) as pool:
        return list(pool.map(one, range(len(exchanges))))


MACHINES = ["ab", "aa", "aaa", "aab", "aabb", "abc", "abab", "aaaa", "abcde", "aabbbc"]
LENGTHS = [0, 1, 3, 17, 8192, 8193, 40_001, SEGMENT // 4 + 5, 3 * SEGMENT // 4]


@pytest.mark.parametrize("machines", MACHINES)
def test_sums(job, machines: str) -> None:
    exchanges = job(machines)
    for length in LENGTHS:
        given = [
            np.random.default_rng([rank, length]).standard_normal(length).astype("f") for rank in range(len(machines))
        ]
        found = on_all(exchanges, lambda rank, exchange, given=given: exchange.all_reduce([given[rank]]))
        np.testing.assert_allclose(found[0], np.sum(given, 0, dtype="d"), rtol=1e-5, atol=1e-5)
        for other in found[1:]:
            np.testing.assert_array_equal(found[0], other)  # bit by bit


@pytest.mark.parametrize("machines", [*MACHINES, "a", "abcab"])
def test_rows(job, machines: str) -> None:
    exchanges = job(machines)
    for length in [0, 1, 17, 8192, 40_001, SEGMENT // 4 + 5]:
        given = [np.random.default_rng([rank, length]).standard_normal(length) for rank in range(len(machines))]
        for found in on_all(exchanges, lambda rank, exchange, given=given: exchange.all_gather(given[rank])):
            np.testing.assert_array_equal(found, given)  # bit by bit


@pytest.mark.parametrize("dtype", ["bool", "int8", "int64", "float16", "float32", "complex128"])
def test_rows_of_any_dtype(job, dtype: str) -> None:
    exchanges = job("aab")
    for shape in [(), (3, 2), (300, 70)]:
        for found in on_all(exchanges, lambda rank, one, shape=shape: one.all_gather(np.full(shape, rank, dtype))):
            assert (found.dtype, found.shape) == (dtype, (3, *shape))
            for rank, row in enumerate(found):
                np.testing.assert_array_equal(row, np.full(shape, rank, dtype))


@pytest.mark.parametrize("machines", ["aa", "ab", "aba"])
@pytest.mark.parametrize("counts", [(0, 0, 0), (3, 0, 7), (5, 5, 5), (40_000, 2, 1)])
def test_rows_of_other_numbers(job, machines: str, counts: tuple[int, ...]) -> None:
    random = np.random.default_rng(1)
    given = [(random.standard_normal((n, 3)).astype("f"), random.integers(0, 9, n)) for n in counts[: len(machines)]]
    for found in on_all(job(machines), lambda rank, exchange: exchange.gather_rows(given[rank])):
        for received, parts in zip(found, zip(*given, strict=True), strict=True):
            assert received.dtype == parts[0].dtype
            np.testing.assert_array_equal(received, np.concatenate(parts))


def test_replicas_of_other_shapes_are_refused_on_all(job) -> None:
    def call(rank: int, exchange: Exchange) -> np.ndarray:
        return exchange.all_reduce([np.ones(3), np.ones(1 if rank else 3)])

    found = on_all(job("aa"), call)
    assert all(isinstance(error, ExchangeError) for error in found), found
    assert "Expected: the same of each" in str(found[1])


@pytest.mark.parametrize("length", [4, 40_000])
def test_what_else_goes_wrong_is_told_to_the_others(job, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    exchanges = job("aab")

    def fail(*args: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(exchanges[0], "_header", fail)

    def call(rank: int, exchange: Exchange) -> Any:
        try:
            return exchange.all_reduce([np.ones(length)])
        except MemoryError as error:
            return error

    first, *others = on_all(exchanges, call)
    assert isinstance(first, MemoryError)
    assert [str(error) for error in others] == ["MemoryError", "MemoryError"] or length > 4
    assert all(isinstance(error, ExchangeError) for error in others)
    again = on_all(exchanges[:1], call)
    assert str(again) == "[ExchangeError('MemoryError')]"


def test_infinities_are_no_warnings(job) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = on_all(job("ab"), lambda rank, one: one.all_reduce([np.full(9000, 1e5, "f")], np.dtype("float16")))
    assert all(np.all(np.isinf(one)) for one in found)


def test_nobody_can_join_later(job) -> None:
    exchanges = job("aab")
    for exchange in exchanges:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", exchange._meeting._listener.port), 1.0)
    on_all(exchanges, lambda rank, exchange: exchange.all_reduce([np.ones(3)]))


@pytest.mark.parametrize("who", ["first", "other"])
def test_without_shared_memory(job, monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    def fail(*args: Any) -> None:
        raise OSError(27, "File too large")

    monkeypatch.setattr(anonymous_memory, "make" if who == "first" else "attach", fail)
    exchanges = job("aab")
    assert [exchange._to.number_of_hosts for exchange in exchanges] == [3, 3, 3]
    for one in on_all(exchanges, lambda rank, exchange: exchange.all_reduce([np.full(50_000, rank + 1.0)])):
        np.testing.assert_array_equal(one, 6.0)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "int64"])
def test_dtypes(job, dtype: str) -> None:
    for length in (5, 30_000):
        found = on_all(job("aab"), lambda rank, one, n=length: one.all_reduce([np.full(n, rank + 1, dtype)]))
        for one in found:
            assert one.dtype == dtype
            np.testing.assert_array_equal(one, np.full(length, 6, dtype))


@pytest.mark.parametrize("machines", ["aa", "ab", "aab", "abc", "aabbc"])
@pytest.mark.parametrize("narrow", [tf.bfloat16.as_numpy_dtype, np.float16])
def test_rounding_between_hosts(job, machines: str, narrow: type) -> None:
    size, precision = len(machines), {np.float16: 2.0**-11}.get(narrow, 2.0**-8)
    given = [np.random.default_rng(rank).standard_normal(70_001).astype("f") for rank in range(size)]
    found = on_all(job(machines), lambda rank, one: one.all_reduce([given[rank]], np.dtype(narrow)))
    expected = np.sum(given, 0, dtype="d")
    most = precision * np.sum(np.abs(given), 0) * size
    assert np.all(np.abs(found[0] - expected) <= most)
    is_exact = np.max(np.abs(found[0] - expected)) < 1e-5
    assert is_exact == (len(set(machines)) == 1)
    for one in found:
        assert one.dtype == "float32"
        np.testing.assert_array_equal(one, found[0])


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (4, 5, 6), (100, 700)])
def test_shapes_and_several_replicas(job, shape: tuple[int, ...]) -> None:
    def call(rank: int, exchange: Exchange) -> np.ndarray:
        return exchange.all_reduce([np.full(shape, 10.0 * rank + replica) for replica in range(3)])

    for found in on_all(job("ab"), call):
        np.testing.assert_array_equal(found, np.full(shape, 36.0))


def test_what_is_not_contiguous(job) -> None:
    values = np.arange(20_000.0).reshape(100, 200)
    for found in on_all(job("aa"), lambda rank, exchange: exchange.all_reduce([values.T])):
        np.testing.assert_array_equal(found, 2 * values.T)


def test_what_was_given_and_got_is_not_written_to_later(job) -> None:
    exchanges = job("aab")
    given = [np.full(50_000, rank + 1.0) for rank in range(3)]
    first = on_all(exchanges, lambda rank, exchange: exchange.all_reduce([given[rank]]))
    copies = [one.copy() for one in first]
    for _ in range(5):
        on_all(exchanges, lambda rank, exchange: exchange.all_reduce([np.ones(50_000)]))
    for one, copy in zip(first, copies, strict=True):
        np.testing.assert_array_equal(one, copy)
    for rank, one in enumerate(given):
        np.testing.assert_array_equal(one, rank + 1.0)
    # Nor is what one process does with its sum seen by another.
    first[0][:] = -1
    np.testing.assert_array_equal(first[1], copies[1])


def test_many_in_a_row(job) -> None:
    exchanges = job("aabb")
    lengths = np.random.default_rng(3).integers(0, 20_000, 200)

    def call(rank: int, exchange: Exchange) -> list[float]:
        return [float(exchange.all_reduce([np.full(n, rank + i, "d")]).sum()) for i, n in enumerate(lengths)]

    expected = [float(n * (6 + 4 * i)) for i, n in enumerate(lengths)]
    assert on_all(exchanges, call) == [expected] * 4


@pytest.mark.parametrize("machines", ["aab", "aabb", "abc"])
def test_sums_and_rows_in_turns(job, machines: str) -> None:
    """Nobody waits in between: who is fast must not write where another one still reads."""
    exchanges = job(machines)
    sizes = np.random.default_rng(4).choice([1, 3000, 9000, 40_000, 300_000], 60)

    def call(rank: int, exchange: Exchange) -> list[Any]:
        found = []
        for i, size in enumerate(sizes):
            values = np.full(size, 100 * i + rank)
            if i % 3 == 0:
                found.append(np.unique(exchange.all_reduce([values])).tolist())
            elif i % 3 == 1:
                found.append([np.unique(row).tolist() for row in exchange.all_gather(values)])
            else:
                (rows,) = exchange.gather_rows([values[: size if rank else size // 2, None]])
                found.append([int(rows.sum()), len(rows)])
        return found

    ranks = range(len(machines))
    expected: list[Any] = []
    for i, size in enumerate(sizes):
        counts = [size if rank else size // 2 for rank in ranks]
        expected.append(
            [
                [sum(100 * i + rank for rank in ranks)],
                [[100 * i + rank] for rank in ranks],
                [sum(n * (100 * i + rank) for n, rank in zip(counts, ranks, strict=True)), sum(counts)],
            ][i % 3]
        )
    assert on_all(exchanges, call) == [expected] * len(machines)


@pytest.mark.parametrize("call", [lambda one, x: one.all_reduce([x]), Exchange.all_gather], ids=["sum", "rows"])
@pytest.mark.parametrize(("machines", "who"), [("aa", 0), ("aa", 1), ("aab", 1), ("aab", 2), ("abc", 2), ("aabb", 3)])
@pytest.mark.parametrize("length", [4, 40_000])
def test_who_has_gone_is_missed(job, call: Callable, machines: str, who: int, length: int) -> None:
    exchanges = job(machines)
    exchanges[who].close()
    left = [rank for rank in range(len(machines)) if rank != who]
    found = on_all([exchanges[rank] for rank in left], lambda _, exchange: call(exchange, np.ones(length)))
    assert all(isinstance(error, ExchangeError) and " is gone: " in str(error) for error in found), found
    # At least one knows who it is, and nobody waits again.
    assert any(f"worker {who} is gone" in str(error) for error in found)
    again = on_all([exchanges[rank] for rank in left], lambda _, exchange: exchange.all_reduce([np.ones(length)]))
    assert list(map(str, again)) == list(map(str, found))


@pytest.mark.parametrize("length", [4, 40_000])
def test_who_does_not_come_is_named(job, length: int) -> None:
    exchanges = job("aab", timeout=0.5)
    found = on_all(exchanges, lambda rank, one: None if rank == 1 else one.all_reduce([np.ones(length)]))
    assert str(found[0]) == "worker 1 has not come to this exchange within 0.5 s"
    assert isinstance(found[2], ExchangeError)


@pytest.mark.parametrize("machines", ["aa", "ab", "aab"])
@pytest.mark.parametrize(
    ("first", "other"),
    [
        (np.ones(4), np.ones(5)),
        (np.ones(4), np.ones(4, int)),
        (np.ones(40_000), np.ones(50_000)),
        (np.ones((2, 3)), np.ones((3, 2))),
    ],
)
def test_different_sums_are_told_apart(job, machines: str, first: np.ndarray, other: np.ndarray) -> None:
    last = len(machines) - 1
    found = on_all(job(machines), lambda rank, one: one.all_reduce([other if rank == last else first]))
    assert all(isinstance(error, ExchangeError) for error in found), found
    assert any("Every process has to make the same calls in the same order" in str(error) for error in found)


def test_strangers_do_not_disturb(job, monkeypatch: pytest.MonkeyPatch) -> None:
    ports: list[int] = []
    original = mesh.Listener

    def listener(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        ports.append(made.port)
        strangers.append(socket.create_connection(("127.0.0.1", made.port)))
        strangers[-1].sendall(b"GET / HTTP/1.1\r\n\r\n")
        return made

    strangers: list[socket.socket] = []
    monkeypatch.setattr(mesh, "Listener", listener)
    found = on_all(job("aab"), lambda rank, exchange: exchange.all_reduce([np.ones(3)]))
    assert len(ports) == 3
    for one in found:
        np.testing.assert_array_equal(one, 3 * np.ones(3))
    for stranger in strangers:
        stranger.close()


def test_who_cannot_be_reached_is_named_on_all(job, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(place: tuple[str, int], seconds: float) -> socket.socket:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(mesh.sockets, "connect", refuse)
    machines = iter("ab")
    monkeypatch.setattr(mesh, "_machine", lambda: next(machines))
    room = Room(2)

    def connect(rank: int) -> Any:
        try:
            return mesh.connect(StandIn(room, rank, 5.0), "127.0.0.1", 1.0)
        except ExchangeError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(connect, range(2)))
    assert found[0] == found[1]
    assert re.match(
        r"worker (0|1) cannot connect to worker (1|0) at 127\.0\.0\.1:\d+: .*Connection refused\. ", found[0]
    )
    assert found[0].endswith("or use transport='tensorflow'")


def test_parts_begin_where_memory_is_aligned() -> None:
    for length in (0, 1, 15, 16, 17, 1000):
        for parts in (1, 2, 3, 7):
            bounds = bounds_of(length, parts, 4)
            assert len(bounds) == parts
            assert [i for part in bounds for i in range(part.start, part.stop)] == list(range(length))
            assert all(part.start % 16 == 0 or part.start == length for part in bounds)


def test_result_memory_is_taken_again_only_when_it_is_free() -> None:
    memory, dtype = ResultMemory(), np.dtype("float32")
    held = [memory.take(100_000, dtype) for _ in range(6)]
    assert len({one.ctypes.data for one in held}) == 6
    assert all(one.ctypes.data % 64 == 0 for one in held)
    part = held[0][5:10]
    address = held[0].ctypes.data
    held.clear()
    assert memory.take(100_000, dtype).ctypes.data != address  # a part of it is still used
    del part
    assert memory.take(100_000, dtype).ctypes.data == address
