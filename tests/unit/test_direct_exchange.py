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

from tfdist.cluster import sockets
from tfdist.runtime import exchange as module
from tfdist.runtime.exchange import _HEADER, SEGMENT, Exchange, ExchangeError
from tfdist.supervision import anonymous_memory

SECONDS = 60.0


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

    def count(self, topic: str) -> int:
        return 1

    def decide(self, key: str, value: Any) -> Any:
        return self.room.gather(self.rank, value)[0]

    def waits_in_vain(self, rank: int) -> str:
        return ""


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch):
    """Starts exchanges: one for each process, given as the names of their machines."""
    made: list[Exchange] = []
    machine = threading.local()
    monkeypatch.setattr(module, "_machine", lambda: machine.name)

    def start(machines: str, timeout: float = SECONDS, host: str = "127.0.0.1") -> list[Exchange]:
        room = Room(len(machines))

        def connect(rank: int) -> Exchange:
            machine.name = machines[rank]
            return module.connect(StandIn(room, rank, timeout), host, SECONDS)

        with ThreadPoolExecutor(len(machines)) as pool:
            found = list(pool.map(connect, range(len(machines))))
        made.extend(found)
        return found

    yield start
    for exchange in made:
        exchange.close()


def on_all(exchanges: list[Exchange], call: Callable[[int, Exchange], Any]) -> list[Any]:
    """What each process returns, or the exception that it raises."""

    def one(rank: int) -> Any:
        try:
            return call(rank, exchanges[rank])
        except ExchangeError as error:
            return error

    with ThreadPoolExecutor(len(exchanges)) as pool:
        return list(pool.map(one, range(len(exchanges))))


MACHINES = ["aa", "ab", "abbacb"]
# Of values: dtypes and shapes.
KINDS = [
    *[("float32", (length,)) for length in (0, 1, 17, 8193, SEGMENT // 4 + 5)],
    *[(dtype, (30_000,)) for dtype in ("float16", "float64", "int32", "int64")],
    *[("float64", shape) for shape in [(), (0, 3), (4, 5, 6)]],
]
LARGEST = "float32", (3 * SEGMENT // 4,)


def values(size: int, dtype: str, shape: tuple[int, ...]) -> list[np.ndarray]:
    """Of each process; floats of 32 bits are rounded when they are added up, and others are not."""
    random = [np.random.default_rng(rank) for rank in range(size)]
    if dtype == "float32":
        return [one.standard_normal(shape, dtype) for one in random]
    return [one.integers(0, 2 if dtype == "bool" else 9, shape).astype(dtype) for one in random]


@pytest.mark.parametrize("machines", MACHINES)
def test_sums(job, machines: str) -> None:
    exchanges = job(machines)
    for dtype, shape in [*KINDS, LARGEST]:
        given = values(len(machines), dtype, shape)
        found = on_all(exchanges, lambda rank, exchange, given=given: exchange.all_reduce([given[rank]]))
        assert (found[0].dtype, found[0].shape) == (dtype, shape)
        np.testing.assert_allclose(found[0], np.sum(given, 0, dtype="d"), rtol=1e-5, atol=1e-5)
        for other in found[1:]:
            np.testing.assert_array_equal(found[0], other)  # bit by bit


@pytest.mark.parametrize("machines", MACHINES[:2])
def test_who_waits_knows_for_how_long(job, machines: str) -> None:
    first, second = job(machines)
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(first.all_reduce, [np.ones(3)])
        while not first._lock.locked():
            time.sleep(0.001)
        time.sleep(0.2)
        second.all_reduce([np.ones(3)])
        waits.result()
    assert 0.2 <= first.seconds_waited <= time.monotonic() - began


@pytest.mark.parametrize("machines", ["a", "aaa", "aab", "abab", *MACHINES])
def test_own_rows_of_sums(job, machines: str) -> None:
    """As an all-reduce has them: bit by bit where all add up in the same order, which is on up to two hosts."""
    exchanges, size = job(machines), len(machines)
    shapes = [("float32", (3 * rows, 7)) for rows in (0, 1, 900, SEGMENT // 84 + 1)]
    for dtype, (rows, *shape) in [*shapes, ("float64", (5000,)), ("int32", (300, 4, 5)), ("int64", (2000, 3))]:
        given = values(size, dtype, (size * rows, *shape))
        sums = on_all(exchanges, lambda rank, exchange, given=given: exchange.all_reduce([given[rank]]))
        found = on_all(exchanges, lambda rank, exchange, given=given: exchange.reduce_scatter([given[rank]])[0])
        assert [(one.dtype, one.shape) for one in found] == [(dtype, (rows, *shape))] * size
        tolerance = 0 if len(set(machines)) < 3 else 1e-5
        np.testing.assert_allclose(np.concatenate(found), sums[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("machines", ["ab", "abc", "aabb"])
def test_own_rows_are_half_of_a_sum_between_hosts(job, monkeypatch: pytest.MonkeyPatch, machines: str) -> None:
    sent: list[int] = []
    original = module.transfer

    def transfer(to: Any, data: memoryview, source: Any, into: memoryview) -> None:
        if to is not None and source is not None:  # what goes around
            sent.append(len(data))
        original(to, data, source, into)

    monkeypatch.setattr(module, "transfer", transfer)
    exchanges, hosts, size = job(machines), len(set(machines)), len(machines)
    given = np.ones((size * 6000, 16), "f")
    for call, passes in [(Exchange.reduce_scatter, 1), (Exchange.all_reduce, 2)]:
        sent.clear()
        on_all(exchanges, lambda rank, exchange, call=call: call(exchange, [given]))
        assert sum(sent) == passes * (hosts - 1) * given.nbytes


@pytest.mark.parametrize("machines", ["a", "aaa", "aba", "abc"])
@pytest.mark.parametrize("most", [1, SEGMENT // 24])
def test_several_tables_at_once(job, machines: str, most: int) -> None:
    """As one by one. Pieces of what travels end within tables."""
    exchanges, size = job(machines), len(machines)
    lengths = [most, 0, 1, most // 3, 2 * most]
    given = [values(size, "int32", (size * length, 2)) for length in lengths]

    def call(rank: int, exchange: Exchange) -> list[list[np.ndarray]]:
        tables = [one[rank] for one in given]
        mixed = [tables[0].astype("int8"), *tables[1:]]
        sums, own = exchange.all_reduce_each(tables), exchange.reduce_scatter(tables)
        rows = exchange.all_gather(mixed)
        alone = [exchange.all_reduce([one]) for one in tables]
        alone += [exchange.reduce_scatter([one])[0] for one in tables]
        alone += [exchange.all_gather([one])[0] for one in mixed]
        for one, other in zip([*sums, *own, *rows], alone, strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            np.testing.assert_array_equal(one, other)
        return [sums, own, rows]

    for rank, found in enumerate(on_all(exchanges, call)):
        for one, added, own, gathered in zip(given, *found, strict=True):
            np.testing.assert_array_equal(added, sum(one))
            np.testing.assert_array_equal(own, np.split(sum(one), size)[rank])
            np.testing.assert_array_equal(gathered, one)


@pytest.mark.parametrize("machines", ["aabb", "abab", "babaab", "aabbcc"])
@pytest.mark.parametrize("narrow", [None, np.dtype(np.float16)])
def test_rows_within_hosts(job, monkeypatch: pytest.MonkeyPatch, machines: str, narrow: np.dtype | None) -> None:
    """A process of each host gets the same rows of the sum over all; a gather sends nothing between hosts."""
    sent: list[int] = []
    original = module.Link.move

    def move(self: Any, sends: bool, data: memoryview) -> int:
        count = original(self, sends, data)
        if sends and self in between:
            sent.append(count)
        return count

    exchanges, hosts = job(machines), len(set(machines))
    between = [link for one in exchanges for link in (*one._root, *one._heads, *one._neighbours)]
    monkeypatch.setattr(module.Link, "move", move)
    # An all-reduce cuts its pieces elsewhere: of more than two hosts it adds in another order, and rounds other sums.
    size, tolerance = len(machines) // hosts, 2e-2 if narrow else 0 if hosts == 2 else 1e-5
    for rows in (0, 1, 300, 9000, SEGMENT // 84 + 1):
        given = values(len(machines), "float32", (size * rows, 21))
        sums = on_all(exchanges, lambda rank, one, given=given: one.all_reduce([given[rank]], narrow))
        sent.clear()
        own = on_all(
            exchanges, lambda rank, one, given=given: one.reduce_scatter([given[rank]], narrow, within_host=True)[0]
        )
        if rows > 1000:
            item = narrow.itemsize if narrow else 4
            assert sum(sent) == pytest.approx(2 * (hosts - 1) * item * given[0].size, rel=0.01)
        sent.clear()
        gathered = on_all(exchanges, lambda rank, one, own=own: one.all_gather([own[rank]], within_host=True)[0])
        assert not sent
        for rank, machine in enumerate(machines):
            place = machines[:rank].count(machine)
            np.testing.assert_allclose(own[rank], np.split(sums[0], size)[place], rtol=tolerance, atol=tolerance)
            assert gathered[rank].shape == (size, rows, 21)
            np.testing.assert_array_equal(gathered[rank][place], own[rank])
            np.testing.assert_array_equal(gathered[rank], gathered[0])  # bit by bit


def test_own_rows_rounded_between_hosts(job) -> None:
    given = np.random.default_rng(3).standard_normal((3, 3000, 8)).astype("f")
    found = on_all(job("aab"), lambda rank, one: one.reduce_scatter([given[rank]], np.dtype(np.float16))[0])
    expected, most = given.sum(0, dtype="d"), 2.0**-11 * np.abs(given).sum(0)
    gap = np.abs(np.concatenate(found) - expected)
    assert np.all(gap <= most + 1e-5) and gap.max() > 1e-5


@pytest.mark.parametrize("machines", [*MACHINES, "a"])
def test_rows(job, machines: str) -> None:
    exchanges = job(machines)
    for dtype, shape in [*KINDS, ("bool", (3, 2)), ("int8", (300, 70)), ("complex128", (9000,))]:
        given = values(len(machines), dtype, shape)
        for found in on_all(exchanges, lambda rank, exchange, given=given: exchange.all_gather([given[rank]])[0]):
            assert (found.dtype, found.shape) == (dtype, (len(machines), *shape))
            np.testing.assert_array_equal(found, given)  # bit by bit


@pytest.mark.parametrize("machines", ["aa", "aba"])
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


@pytest.mark.parametrize("who", ["first", "other"])
def test_without_shared_memory(job, monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    def fail(*args: Any) -> None:
        raise OSError(27, "File too large")

    monkeypatch.setattr(anonymous_memory, "make" if who == "first" else "attach", fail)
    exchanges = job("aab")
    assert [exchange.number_of_hosts for exchange in exchanges] == [3, 3, 3]
    for one in on_all(exchanges, lambda rank, exchange: exchange.all_reduce([np.full(50_000, rank + 1.0)])):
        np.testing.assert_array_equal(one, 6.0)


@pytest.mark.parametrize("machines", ["aa", "aabbc"])
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


def test_bfloat16_has_the_bits_of_numpys() -> None:
    """Of all that is near the middle of two, and of what is no number."""
    kind = np.dtype(tf.bfloat16.as_numpy_dtype)
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    bits = np.concatenate([upper + lower for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    values = bits.view(np.float32)
    with np.errstate(all="ignore"):
        expected = values.astype(kind)
    np.testing.assert_array_equal(module.rounded_to_bfloat16(values, kind).view(np.uint16), expected.view(np.uint16))


def test_shapes_and_several_replicas(job) -> None:
    exchanges = job("ab")
    for shape in [(), (100, 700)]:
        values = np.arange(float(np.prod(shape))).reshape(shape[::-1]).T  # not contiguous
        given = [[values + (10.0 * rank + replica) for replica in range(3)] for rank in range(2)]
        for found in on_all(exchanges, lambda rank, one, given=given: one.all_reduce(given[rank])):
            np.testing.assert_array_equal(found, 6 * values + 36.0)


def test_what_was_given_and_got_is_not_written_to_later(job) -> None:
    exchanges = job("aab")
    given = [np.full(50_000, rank + 1.0) for rank in range(3)]
    # A part of it, as NumPy makes it, holds its memory, too.
    first = [one[5:100] for one in on_all(exchanges, lambda rank, exchange: exchange.all_reduce([given[rank]]))]
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


@pytest.mark.parametrize("machines", ["aaa", "aabb", "abc"])
def test_sums_and_rows_in_turns(job, machines: str) -> None:
    """Nobody waits in between: who is fast must not write where another one still reads."""
    exchanges = job(machines)
    sizes = np.random.default_rng(4).choice([1, 3000, 9000, 40_000, 300_000], 30)

    def call(rank: int, exchange: Exchange) -> list[Any]:
        found = []
        for i, size in enumerate(sizes):
            values = np.full(size, 100 * i + rank)
            if i % 4 == 0:
                found.append(np.unique(exchange.all_reduce([values])).tolist())
            elif i % 4 == 1:
                found.append([np.unique(row).tolist() for row in exchange.all_gather([values])[0]])
            elif i % 4 == 2:
                found.append(np.unique(exchange.reduce_scatter([np.tile(values, len(machines))])[0]).tolist())
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
                [sum(100 * i + rank for rank in ranks)],
                [sum(n * (100 * i + rank) for n, rank in zip(counts, ranks, strict=True)), sum(counts)],
            ][i % 4]
        )
    assert on_all(exchanges, call) == [expected] * len(machines)


CALLS = {
    "sum": lambda one, x: one.all_reduce([x]),
    "rows": lambda one, x: one.all_gather([x])[0],
    "own rows": lambda one, x: one.reduce_scatter([np.stack([x] * 6)])[0],
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(("machines", "who"), [("aa", 0), ("aab", 1), ("aab", 2), ("abc", 2)])
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


@pytest.mark.parametrize("length", [4, 40_000])
def test_who_waits_elsewhere_is_not_waited_for(job, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    why = "worker 1 waits for worker 0 to save"
    monkeypatch.setattr(StandIn, "waits_in_vain", lambda _, rank: why if rank == 1 else "")
    exchanges = job("aab")
    found = on_all(exchanges, lambda rank, one: None if rank == 1 else one.all_reduce([np.ones(length)]))
    assert str(found[0]) == why and isinstance(found[2], ExchangeError)


def test_a_failure_is_not_taken_for_values(job) -> None:
    """The connection of a pair of hosts carries the values of a ring, which have no headers, and words."""
    exchanges = job("ab", timeout=0.2)
    with pytest.raises(ExchangeError, match="worker 1 has not come"):
        exchanges[0].all_reduce([np.ones(40_000)])
    received = exchanges[1]._neighbours[1]._socket
    received.settimeout(SECONDS)
    assert len(b"".join(iter(lambda: received.recv(1 << 16), b""))) == _HEADER.size


@pytest.mark.parametrize("machines", ["ab", "aab"])
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


@pytest.mark.parametrize("length", [4, 40_000])
def test_a_sum_and_own_rows_of_it_are_told_apart(job, length: int) -> None:
    calls = [Exchange.all_reduce, Exchange.reduce_scatter]
    found = on_all(job("ab"), lambda rank, one: calls[rank](one, [np.ones(length)]))
    assert all(isinstance(error, ExchangeError) for error in found), found
    assert any("Every process has to make the same calls in the same order" in str(error) for error in found)


def test_strangers_do_not_disturb(job, monkeypatch: pytest.MonkeyPatch) -> None:
    original = module.Listener

    def listener(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        strangers.append(socket.create_connection(("127.0.0.1", made.port)))
        strangers[-1].sendall(b"GET / HTTP/1.1\r\n\r\n")
        return made

    strangers: list[socket.socket] = []
    monkeypatch.setattr(module, "Listener", listener)
    found = on_all(job("aab"), lambda rank, exchange: exchange.all_reduce([np.ones(3)]))
    assert len(strangers) == 3
    for one in found:
        np.testing.assert_array_equal(one, 3 * np.ones(3))
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize("hello", [None, "1", {}, {"rank": "1"}, {"rank": 3}, {"rank": -1}])
def test_a_hello_without_a_rank_is_refused(hello) -> None:
    """With a ValueError, which `Listener` answers by closing the connection."""
    meeting = module._Meeting.__new__(module._Meeting)
    meeting._names = ("worker 0", "worker 1", "worker 2")
    with socket.socket() as connected, pytest.raises(ValueError, match="Expected: a rank"):
        meeting._take(connected, hello)


def test_who_cannot_be_reached_is_named_on_all(job, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(place: tuple[str, int], seconds: float) -> socket.socket:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(sockets, "connect", refuse)
    machines = iter("ab")
    monkeypatch.setattr(module, "_machine", lambda: next(machines))
    room = Room(2)

    def connect(rank: int) -> Any:
        try:
            return module.connect(StandIn(room, rank, 5.0), "127.0.0.1", 1.0)
        except ExchangeError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(connect, range(2)))
    assert found[0] == found[1]
    assert re.match(
        r"worker (0|1) cannot connect to worker (1|0) at 127\.0\.0\.1:\d+: .*connection refused\. ", found[0]
    )
    assert found[0].endswith("or use transport='tensorflow'")


def test_memory_of_results_serves_smaller_ones_and_is_bounded() -> None:
    memory, byte = module.ResultMemory(), np.dtype(np.uint8)
    large = memory.take(1 << 20, byte)
    address = large.ctypes.data
    assert memory.take(1 << 19, byte).ctypes.data != address  # in use
    del large
    small = memory.take(1 << 18, byte)
    assert small.ctypes.data != address  # the other one fits, too, and is smaller
    assert memory.take((1 << 20) - 64, byte).ctypes.data == address
    assert memory.take(1 << 18, byte).ctypes.data == address
    assert memory.take((1 << 18) - 64, byte).ctypes.data != address  # less than a quarter
    del small
    in_use = [memory.take(1 << 20, byte) for _ in range(9)]
    assert len({one.ctypes.data for one in in_use}) == 9
    assert sum(one.size for one in memory._kept) <= 4 * ((1 << 20) + 64)
