"""Sums and gathers over the processes of a job, the same bits on all of them, without TensorFlow's servers.

connect            all listen, meet at the server of the job, and call each other
up to 32 KiB       to the first process of each host, from there to the first of all, and back
more    host A   process 0   a0 | a1 | a2    each copies into shared memory what the others need,
                 process 1   b0 | b1 | b2    adds up one part of all (a0+b0+c0, a1+b1+c1, a2+b2+c2),
                 process 2   c0 | c1 | c2    and copies the whole sum out again
                                  |
        host B   ...         ring over sockets between the first processes of the hosts: in H - 1 steps each of
                             H hosts gets the sum of one part, in H - 1 more the parts of the others

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009). The order of the
additions depends on nothing but the places of the processes. A gather has the second half only: nothing is added up.
A sum of which each process wants its own rows has the first half only. Several arrays travel as one: each goes straight
from where it is into the shared memory, and its result from there to where it belongs.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import mmap
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from tfdist.cluster import server, sockets
from tfdist.cluster.server import Listener
from tfdist.cluster.sockets import UnreachedError, keep_trying
from tfdist.cluster.variables import TOKEN, text
from tfdist.runtime.peers import Peers
from tfdist.supervision import anonymous_memory
from tfdist.supervision.identity import own_place

# Up to here a second meeting costs more than sending everything to one process.
_SMALL = 32 << 10
# So many bytes of each process are exchanged at a time. With less there are more meetings, with more less is in caches.
SEGMENT = 4 << 20
_ALIGNMENT = 64
# Numbers that are rounded at a time.
_CACHED = 1 << 15


class ExchangeError(ConnectionError):
    """An exchange cannot go on: a process is gone, does not come, or exchanges something else."""


class _NotCalledError(ExchangeError):
    """Another process has not connected to this one."""


# --- All listen, meet, and call each other ----------------------------------------------------------------------------

_PURPOSE = "connect to the others"
# The name of the thread.
_BACKGROUND = "tfdist-exchange"
# All listen before anybody connects: a port that is not let through is not waited for.
_SECONDS = 30.0


def connect(peers: Peers, host: str, seconds: float, lost: Callable[[], str] = str) -> Exchange:
    """Connects this process to the others of its job; all of them call it at the same point.

    Args:
        peers: the processes.
        host: the name or address by which the others reach this process' host.
        seconds: how long connecting may take.
        lost: says which process is known to be lost, if one is; asked every second while one is waited for.

    Raises:
        ExchangeError: on all processes, if one of them cannot be reached; the text says which.
    """
    meeting = _Meeting(peers, host, min(seconds, _SECONDS), lost)
    exchange, problem = None, None
    try:
        exchange = meeting.exchange()
    except ExchangeError as error:
        problem = [isinstance(error, _NotCalledError), str(error)]
    problems = [found for found in peers.gather("exchange done", problem, _PURPOSE) if found]
    meeting.end(keep_links=not problems)
    if problems:
        # A process that waits in vain to be called is only the consequence of one that cannot call.
        raise ExchangeError(min(problems)[1])
    return exchange


class _Meeting:
    """The processes of a job while they connect."""

    def __init__(self, peers: Peers, host: str, seconds: float, lost: Callable[[], str]) -> None:
        self._peers, self._names, self._rank, self._lost = peers, peers.names, peers.rank, lost
        self._links: dict[int, Link] = {}
        self._arrived = threading.Condition()
        # Before anybody can connect.
        shared = peers.decide(f"exchange secret/{peers.count('exchange secret')}", secrets.token_hex(32))
        # Without a secret of the job, a stranger may have taken the place of a process, and know what it was sent.
        self._secret = hmac.digest(text(os.environ, TOKEN).encode(), shared.encode(), "sha256")
        own = {"host": host, "machine": _machine()}
        self._listener: Listener | None = None
        try:
            # A host's own name may mean an address that the others cannot reach.
            alone = sockets.is_loopback(host)
            bound = sockets.bind_host(host, 0) if alone else sockets.bind_everywhere(0, reuse=False)
            self._listener = Listener(bound, self._secret, self._take, guests=len(self._names))
            own["port"] = self._listener.port
        except OSError as error:
            own["problem"] = f"{self._names[self._rank]} cannot listen at any port: {sockets.reason_of(error)}"
        self._places = peers.gather("exchange", own, _PURPOSE)
        # All are here now.
        self._deadline = time.monotonic() + seconds

    def exchange(self) -> Exchange:
        """Connects this process to those that it talks to."""
        for place in self._places:
            if "problem" in place:
                raise ExchangeError(place["problem"])
        hosts, memory = self._share_memory(_grouped([place["machine"] for place in self._places]))
        # Each calls before it waits to be called. One connection serves a pair for all that it exchanges.
        wanted = sorted({other for others in partners(self._rank, hosts) for other in others})
        links = {other: self._call(other) for other in wanted if other < self._rank}
        links |= {other: self._wait_for(other) for other in wanted if other > self._rank}
        return Exchange(self._rank, hosts, links, memory)

    def end(self, keep_links: bool) -> None:
        """Listens no longer; without links, ends what has connected to this process."""
        if not keep_links:
            with self._arrived:
                for link in self._links.values():
                    link.close()
        if self._listener is not None:
            self._listener.leave()

    def _share_memory(self, hosts: list[list[int]]) -> tuple[list[list[int]], HostMemory | None]:
        """The processes of each host; those that cannot see each other's memory are as on hosts of their own."""
        ranks = next(ranks for ranks in hosts if self._rank in ranks)
        memory = None
        if len(ranks) > 1 and self._rank == ranks[0]:
            # There may be none: `ulimit -f` limits it as it does files.
            with contextlib.suppress(OSError):
                memory = HostMemory(len(ranks))
        place = self._peers.gather("exchange memory", memory.place if memory else None, _PURPOSE)[ranks[0]]
        if place is not None and memory is None:
            with contextlib.suppress(OSError, ValueError):
                memory = HostMemory(len(ranks), place)
        sees = self._peers.gather("exchange memory seen", memory is not None, _PURPOSE)
        if memory is not None:
            memory.hide()
        parts = ([one] if all(sees[rank] for rank in one) else [[rank] for rank in one] for one in hosts)
        found = list(itertools.chain(*parts))
        return found, memory if ranks in found else None

    def _call(self, rank: int) -> Link:
        """Connects to another process."""
        host, port = self._places[rank]["host"], self._places[rank]["port"]
        address, problems = sockets.join_address(host, port), dict[str, str]()

        def attempt(seconds: float) -> socket.socket:
            return server.connected((host, port), self._secret, {"rank": self._rank}, seconds)

        try:
            return self._link(keep_trying({address: attempt}, self._deadline, problems), rank)
        except UnreachedError:
            raise ExchangeError(
                f"{self._names[self._rank]} cannot connect to {self._names[rank]} at {address}: "
                f"{problems.get(address, 'timed out')}. Processes exchange gradients there, at a port that the system "
                "chooses: let it through between the hosts of the job, or use transport='tensorflow'"
            ) from None

    def _take(self, connected: socket.socket, hello: Any) -> None:
        """In the thread of the server: another process has connected to this one."""
        rank = hello.get("rank") if isinstance(hello, dict) else None
        if not isinstance(rank, int) or not 0 <= rank < len(self._names):
            raise ValueError(f"Received: {hello}. Expected: a rank.")
        with self._arrived:
            self._links[rank] = self._link(connected, rank)
            self._arrived.notify_all()

    def _wait_for(self, rank: int) -> Link:
        """Waits until another process has connected to this one."""
        with self._arrived:
            left = self._deadline - time.monotonic()
            if not self._arrived.wait_for(lambda: rank in self._links, max(0.0, left)):
                raise _NotCalledError(f"{self._names[rank]} has not connected to {self._names[self._rank]}")
            return self._links[rank]

    def _link(self, connected: socket.socket, rank: int) -> Link:
        def lost_or_elsewhere() -> str:
            # Who exchanges in the background may be elsewhere, too.
            in_background = threading.current_thread().name == _BACKGROUND
            return self._lost() or ("" if in_background else self._peers.waits_in_vain(rank))

        return Link(connected, self._names[rank], self._peers.timeout, lost_or_elsewhere)


def _machine() -> str:
    """The same for processes that can open each other's files below /proc: of one user, in one kernel and container.

    Those that have a network each are apart as on hosts of their own: who cuts the network means to part them.
    """
    try:
        place = f"{own_place()} {os.stat('/proc/self/ns/net').st_ino} {os.getuid()}"
    except OSError:
        return secrets.token_hex(16)
    return hashlib.sha256(place.encode()).hexdigest()


def _grouped(machines: Sequence[str]) -> list[list[int]]:
    """The ranks of each machine.

    Example:
        >>> _grouped(["a", "b", "a"])
        [[0, 2], [1]]
    """
    groups: dict[str, list[int]] = {}
    for rank, machine in enumerate(machines):
        groups.setdefault(machine, []).append(rank)
    return list(groups.values())


def partners(rank: int, hosts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The ranks that a process talks to.

    Args:
        rank: of this process.
        hosts: ranks of the processes of each host.

    Returns:
        The first process of its host; if it is that one: the others of its host; that of the first host; if it is
        this: those of the other hosts; and those of the next host and the one before. What it is itself is left out.

    Example:
        >>> partners(1, [[0, 1], [2, 3]]), partners(0, [[0, 1], [2, 3]]), partners(2, [[0, 1], [2, 3]])
        ([[0], [], [], [], []], [[], [1], [], [2], [2, 2]], [[], [3], [0], [], [0, 0]])
    """
    host = next(i for i, ranks in enumerate(hosts) if rank in ranks)
    first, *members = hosts[host]
    heads = [ranks[0] for ranks in hosts]
    if rank != first:
        return [[first], [], [], [], []]
    ring = [heads[(host + 1) % len(heads)], heads[host - 1]] if len(heads) > 1 else []
    return [[], members, heads[:1] if host else [], [] if host else heads[1:], ring]


# --- A connection between two processes that both know what comes next: bytes, into memory that is there --------------

# Whether it goes on, the three numbers of a `Header`, the beginning of its purpose.
_HEADER = struct.Struct("<?QQQ80s")
_LONGEST_TEXT = 500
_LAST_WORDS_SECONDS = 1.0
# So much of each direction at a time, so that neither waits for the other.
_PIECE = 1 << 20


class Purpose(NamedTuple):
    """What an exchange is for: with another one, values of the same shape do not belong together.

    Attributes:
        number: the same on all processes.
        text: for messages.
    """

    number: int = 0
    text: str = ""


class Header(NamedTuple):
    """What a process exchanges; the same on all of them.

    Attributes:
        number: how many exchanges there have been.
        size: bytes that a process has.
        kind: checksum of dtype, shape and purpose.
        purpose: what it is for; for messages, as names need not be the same on all.
    """

    number: int
    size: int
    kind: int
    purpose: str = ""

    def __str__(self) -> str:
        return f"for the {self.purpose}, {self.size}" if self.purpose else str(self.size)


class Link:
    """A connection to another process. All of its methods raise an ExchangeError if that is gone, or not in time.

    Args:
        connected: a connected TCP socket, which it takes over.
        name: of the other process, such as "worker 1 (host:port)".
        timeout: how long to wait for the other process, in seconds.
        lost: is asked now and then while it is waited for; says which process is known to be lost, if one is.
    """

    def __init__(self, connected: socket.socket, name: str, timeout: float, lost: Callable[[], str]) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setblocking(False)
        self.name, self._timeout, self._lost, self._socket = name, timeout, lost, connected
        sockets.keep_from_children(connected)

    def receive(self, into: bytearray | memoryview) -> None:
        """Fills memory."""
        transfer(None, memoryview(b""), self, memoryview(into))

    def send(self, header: Header, data: bytes = b"") -> None:
        """Says what this process exchanges, and sends some of it; `expect` is the other end."""
        said = _HEADER.pack(True, *header[:3], header.purpose.encode())
        transfer(self, memoryview(said + data), None, memoryview(b""))

    def expect(self, own: Header) -> None:
        """Hears what the other process exchanges, or why it has failed; it has to be what this one does."""
        said = bytearray(_HEADER.size)
        self.receive(said)
        goes_on, *numbers, purpose = _HEADER.unpack(said)
        if not goes_on:
            why = bytearray(min(numbers[0], _LONGEST_TEXT))
            self.receive(why)
            raise ExchangeError(why.decode(errors="replace"))
        theirs = Header(*numbers, purpose.rstrip(b"\0").decode(errors="ignore"))
        if theirs[:3] != own[:3]:
            raise ExchangeError(
                f"Received: exchange {theirs.number} of {self.name}, {theirs} bytes. Expected: what others "
                f"have, exchange {own.number}, {own} bytes, of the same dtype and shape. Every process has to "
                "make the same calls in the same order: look for code that only one rank runs"
            )

    def send_failure(self, why: str) -> None:
        """Tells the other process, which expects a header, why this one does not go on."""
        data = why.encode()[:_LONGEST_TEXT]
        with contextlib.suppress(OSError):
            self._socket.settimeout(_LAST_WORDS_SECONDS)
            self._socket.sendall(_HEADER.pack(False, len(data), 0, 0, b"") + data)

    def close(self) -> None:
        """Ends the connection: a process that waits at its other end notices."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def fileno(self) -> int:
        """Its file descriptor, for `select.poll`."""
        return self._socket.fileno()

    def move(self, sends: bool, data: memoryview) -> int:
        """Sends, or receives, what the system lets pass at once; the number of bytes."""
        try:
            count = self._socket.send(data[:_PIECE]) if sends else self._socket.recv_into(data[:_PIECE])
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ExchangeError(f"{self.name} is gone: {sockets.reason_of(error)}") from None
        if not count:
            raise ExchangeError(f"{self.name} is gone: it has ended its connection")
        return count

    def check(self, waited: float) -> None:
        """Is called now and then while nothing moves."""
        if lost := self._lost():
            raise ExchangeError(lost)
        if waited > self._timeout:
            raise ExchangeError(f"{self.name} has not come to this exchange within {self._timeout:g} s")


def transfer(to: Link | None, data: memoryview, source: Link | None, into: memoryview) -> None:
    """Sends to one process while another one, or the same, sends to this one.

    Args:
        to: who gets `data`; `None` if it is empty.
        data: bytes.
        source: who fills `into`; `None` if it is empty.
        into: memory for bytes.

    Raises:
        ExchangeError: if one of them is gone, or too slow.
    """
    moved_at = time.monotonic()
    while data or into:
        sent = to.move(True, data) if data else 0
        received = source.move(False, into) if into else 0
        data, into = data[sent:], into[received:]
        if sent or received:
            moved_at = time.monotonic()
            continue
        poller = select.poll()
        # One registration for both directions of one link: a second one would replace the first.
        events: dict[Link, int] = {}
        if data:
            events[to] = select.POLLOUT
        if into:
            events[source] = events.get(source, 0) | select.POLLIN
        for link, event in events.items():
            poller.register(link, event)
        if not poller.poll(1000.0):  # milliseconds
            for link in events:
                link.check(time.monotonic() - moved_at)


# --- Memory: what all processes of a host see, and what results are kept in -------------------------------------------


class HostMemory:
    """Two segments for each process of a host, and one for sums.

    The system provides memory as it is first written to, and takes it back when all processes have ended.

    Args:
        processes: how many there are.
        place: of the memory that the first process has made, for the others; `None` makes it.

    Attributes:
        place: by which the other processes of this host find it, until `hide`.

    Raises:
        OSError: if there can be none, or the other process is in another container, or has ended.
        ValueError: if something else is at that place.
    """

    def __init__(self, processes: int, place: str | None = None) -> None:
        self._processes = processes
        size = (2 * processes + 1) * SEGMENT
        if place is None:
            self._descriptor, self.place = anonymous_memory.make("exchange", size)
        else:
            self._descriptor, self.place = anonymous_memory.attach(place), place
        try:
            self._memory = mmap.mmap(self._descriptor, size)
        except BaseException:
            self.hide()
            raise

    def segments(self, which: int, dtype: np.dtype) -> np.ndarray:
        """The first segments of all processes, or the second ones: a row for each process."""
        offset = which * self._processes * SEGMENT
        count = self._processes * SEGMENT // dtype.itemsize
        return np.frombuffer(self._memory, dtype, count, offset).reshape(self._processes, -1)

    def total(self, dtype: np.dtype) -> np.ndarray:
        """The segment for sums."""
        return np.frombuffer(self._memory, dtype, SEGMENT // dtype.itemsize, 2 * self._processes * SEGMENT)

    def hide(self) -> None:
        """Lets no further process find it."""
        os.close(self._descriptor)


def bounds_of(length: int, parts: int, itemsize: int) -> list[slice]:
    """Cuts an array into parts of about one length that begin at multiples of 64 bytes.

    Example:
        >>> bounds_of(100, 2, 4)
        [slice(0, 64, None), slice(64, 100, None)]
    """
    step = -(-length // parts)
    unit = max(1, _ALIGNMENT // itemsize)
    step = -(-step // unit) * unit
    return [slice(min(i * step, length), min((i + 1) * step, length)) for i in range(parts)]


# All that is kept is at most so many times as large as the largest of it: TensorFlow gives an array back a little after
# it has used it.
_KEPT = 4
# An array takes over the work of up to so much smaller ones.
_WIDER = 4
# Smaller results come from memory that was freed a moment ago.
_SMALLEST = 1 << 16


class ResultMemory:
    """Arrays that nobody else writes to, at addresses that TensorFlow takes over without a copy.

    They are used again and again: new memory costs more than a sum, since the system clears each page.

    Example:
        >>> memory = ResultMemory()
        >>> first, second = (memory.take(1 << 20, np.dtype("float32")) for _ in range(2))
        >>> address = first.ctypes.data
        >>> address == second.ctypes.data
        False
        >>> del first
        >>> memory.take(1 << 20, np.dtype("float32")).ctypes.data == address
        True
    """

    def __init__(self) -> None:
        # The one that was taken last is the last.
        self._kept: list[np.ndarray] = []
        # How Python counts differs by its version.
        (self._references_of_nobody,) = _references([np.empty(1)])

    def take(self, length: int, dtype: np.dtype) -> np.ndarray:
        """An array of one dimension, with any content, that is not in use."""
        size = length * dtype.itemsize
        if size < _SMALLEST:
            memory = np.empty(size + _ALIGNMENT, np.uint8)
        else:
            fitting = [i for i in self._free() if size <= self._kept[i].size - _ALIGNMENT <= _WIDER * size]
            # The smallest one: the others may be needed for what is larger.
            taken = min(fitting, key=lambda i: self._kept[i].size, default=None)
            memory = np.empty(size + _ALIGNMENT, np.uint8) if taken is None else self._kept.pop(taken)
            while self._kept and sum(one.size for one in self._kept) + memory.size > _KEPT * self._largest(memory):
                del self._kept[next(iter(self._free()), 0)]
            self._kept.append(memory)
        first = -memory.ctypes.data % _ALIGNMENT
        return memory[first : first + size].view(dtype)

    def _free(self) -> list[int]:
        # All that use a part of one, TensorFlow among them, have a reference to the whole.
        return [i for i, references in enumerate(_references(self._kept)) if references <= self._references_of_nobody]

    def _largest(self, memory: np.ndarray) -> int:
        return max(one.size for one in (memory, *self._kept))


def _references(arrays: list[np.ndarray]) -> list[int]:
    return [sys.getrefcount(array) for array in arrays]


class _SideBySide:
    """Matrices with equally many rows, of one dtype, as if they were one: what a piece of it has of each of them.

    Example:
        >>> matrices = _SideBySide([np.zeros((2, 3)), np.ones((2, 5))])
        >>> [(part.shape, place) for part, place in matrices.within(slice(2, 5))]
        [((2, 1), slice(0, 1, None)), ((2, 2), slice(1, 3, None))]
    """

    def __init__(self, matrices: Sequence[np.ndarray]) -> None:
        self._matrices = matrices
        self._ends = list(itertools.accumulate((one.shape[1] for one in matrices), initial=0))
        self.width = self._ends[-1]
        self.dtype = matrices[0].dtype

    def within(self, piece: slice) -> Iterator[tuple[np.ndarray, slice]]:
        """Columns of a matrix that are in a piece of all columns, and their place in it."""
        for matrix, (begin, end) in zip(self._matrices, itertools.pairwise(self._ends), strict=True):
            low, high = max(begin, piece.start), min(end, piece.stop)
            if low < high:
                yield matrix[:, low - begin : high - begin], slice(low - piece.start, high - piece.start)

    def copy_to(self, target: np.ndarray, piece: slice) -> None:
        """Fills a matrix with a piece."""
        for part, place in self.within(piece):
            np.copyto(target[:, place], part)

    def copy_from(self, source: np.ndarray, piece: slice, rows: Any = slice(None)) -> None:
        """Fills a piece, or rows of it, from a matrix."""
        for part, place in self.within(piece):
            part[rows] = source[:, place]


# --- Sums and gathers -------------------------------------------------------------------------------------------------

_NO_PURPOSE = Purpose()


class Exchange:
    """Sums and gathers over the processes of a job; all of them make the same calls in the same order.

    Args:
        rank: of this process.
        hosts: ranks of the processes of each host.
        links: to its `partners`, by rank.
        memory: which the processes of its host share; `None` for a single one.

    Attributes:
        hosts: as given.
        seconds_waited: for how long it has exchanged values, in all; most of it waiting for others.

    Example:
        >>> Exchange().all_reduce([np.array([1.0, 2.0])])
        array([1., 2.])
    """

    def __init__(
        self,
        rank: int = 0,
        hosts: Sequence[Sequence[int]] = ((0,),),
        links: Mapping[int, Link] = MappingProxyType({}),
        memory: HostMemory | None = None,
    ) -> None:
        self.hosts, self._links, self._memory = hosts, links, memory
        self._host = next(i for i, ranks in enumerate(hosts) if rank in ranks)
        self._place = hosts[self._host].index(rank)
        found = ([links[other] for other in others] for others in partners(rank, hosts))
        self._first, self._members, self._root, self._heads, self._neighbours = found
        self._results = ResultMemory()
        self._lock = threading.Lock()
        self._in_background: threading.Thread | None = None
        self.seconds_waited = 0.0
        self._number = 0
        # Which segments other processes of this host may still read.
        self._last_read = 0
        self._purpose = _NO_PURPOSE
        self._failure = ""
        self._is_in_ring = False

    @property
    def number_of_hosts(self) -> int:
        """How many hosts its processes are on."""
        return len(self.hosts)

    def all_reduce(
        self, parts: Sequence[np.ndarray], narrow: np.dtype | None = None, purpose: Purpose = _NO_PURPOSE
    ) -> np.ndarray:
        """The sum over all parts of all processes.

        Args:
            parts: of this process' replicas, of one shape and dtype, which are the same on all processes.
            narrow: to which large arrays are rounded whenever they go to another host; `None` sends them as they are.
            purpose: what it is for.

        Returns:
            An array of that shape and dtype, which belongs to the caller.

        Raises:
            ExchangeError: if a process is gone, does not come in time, or adds up something else; from then on always.
        """
        return self.all_reduce_each([parts], narrow, purpose)[0]

    def all_reduce_each(
        self,
        tables: Sequence[np.ndarray | Sequence[np.ndarray]],
        narrow: np.dtype | None = None,
        purpose: Purpose = _NO_PURPOSE,
    ) -> list[np.ndarray]:
        """The sums of several arrays over all processes.

        Args:
            tables: of this process, of one dtype; dtype and shapes are the same on all processes. In place of an array
                may be those of this process' replicas.
            narrow: as in `all_reduce`.
            purpose: what it is for.

        Returns:
            The sum of each table, as in `all_reduce`.

        Raises:
            ExchangeError: as in `all_reduce`.
        """
        # Infinities are no news: a loss scale that is too large makes them.
        with self._alone(purpose), np.errstate(all="ignore"):
            own = [_added([table] if isinstance(table, np.ndarray) else table) for table in tables]
            kind = f"{own[0].dtype.str} {[table.shape for table in own]} {narrow}"
            sums = self._sums([table.reshape(-1) for table in own], narrow, kind)
            return [one.reshape(table.shape) for one, table in zip(sums, own, strict=True)]

    def reduce_scatter(
        self,
        tables: Sequence[np.ndarray],
        narrow: np.dtype | None = None,
        purpose: Purpose = _NO_PURPOSE,
        within_host: bool = False,
    ) -> list[np.ndarray]:
        """This process' rows of sums over all processes; half of what an all-reduce sends.

        Those of up to two hosts are the bits of `all_reduce`. With more, each host's rows begin their way around at
        another one; with `narrow` the sum itself is not rounded.

        Args:
            tables: of this process, of one dtype; dtype and shapes are the same on all processes, and each has equally
                many rows for each process, by rank.
            narrow: as in `all_reduce`.
            purpose: what it is for.
            within_host: whether tables have rows for the processes of a host only, of which each host has equally many.
                Then those at the same place of each host get the same rows, bit for bit, and between hosts goes as much
                as `all_reduce` sends.

        Returns:
            For each table this process' rows of the sum, which belong to the caller.

        Raises:
            ExchangeError: as in `all_reduce`.
        """
        with self._alone(purpose), np.errstate(all="ignore"):
            return self._own_rows(tables, narrow, within_host)

    def all_gather(
        self, tables: Sequence[np.ndarray], purpose: Purpose = _NO_PURPOSE, within_host: bool = False
    ) -> list[np.ndarray]:
        """What each process has, by rank.

        Args:
            tables: arrays of this process; shapes and dtypes are the same on all processes.
            purpose: what it is for.
            within_host: whether only the processes of this host are meant: nothing goes between hosts.

        Returns:
            For each array one with one more dimension, the first: a row for each process. They belong to the caller.

        Raises:
            ExchangeError: as in `all_reduce`.
        """
        with self._alone(purpose):
            return self._rows(tables, self._results.take, within_host)

    def gather_rows(self, tables: Sequence[np.ndarray], purpose: Purpose = _NO_PURPOSE) -> list[np.ndarray]:
        """The rows that each process has, one below the other, by rank.

        Args:
            tables: of this process, with equally many rows; how many may differ between processes, and nothing else.
            purpose: what it is for.

        Returns:
            For each table one with the rows of all processes.

        Raises:
            ExchangeError: as in `all_reduce`.
        """
        with self._alone(purpose):
            (counts,) = self._rows([np.array(len(tables[0]))], np.empty)
            is_even, padded = counts.min() == counts.max(), list(tables)
            if not is_even:
                padded = [np.zeros((counts.max(), *table.shape[1:]), table.dtype) for table in tables]
                for own, table in zip(padded, tables, strict=True):
                    own[: len(table)] = table
            found = []
            # Sizes change too often for memory to be kept for them.
            for rows in self._rows(padded, np.empty):
                parts = [row[:count] for row, count in zip(rows, counts, strict=True)]
                found.append(rows.reshape(counts.sum(), *rows.shape[2:]) if is_even else np.concatenate(parts))
            return found

    def in_background(self, exchange: Callable[[], Any]) -> Future:
        """Calls a function that makes calls of this object, while the program goes on; further calls come after it.

        All processes do so at the same point.

        Args:
            exchange: the function.

        Returns:
            What it will have returned, or raised.
        """
        found: Future = Future()

        def run() -> None:
            try:
                found.set_result(exchange())
            except BaseException as error:
                found.set_exception(error)

        self._wait_for_background()
        # A process that ends does not wait for it.
        self._in_background = threading.Thread(target=run, daemon=True, name=_BACKGROUND)
        self._in_background.start()
        return found

    def _wait_for_background(self) -> None:
        if self._in_background not in (None, threading.current_thread()):
            self._in_background.join()

    def close(self) -> None:
        """Ends all connections."""
        for link in self._links.values():
            link.close()

    @contextlib.contextmanager
    def _alone(self, purpose: Purpose) -> Iterator[None]:
        """One call after another, and none after one that failed."""
        came = time.monotonic()
        self._wait_for_background()
        with self._lock:
            if self._failure:
                raise ExchangeError(self._failure)
            self._purpose = purpose
            try:
                yield
            except BaseException as error:
                # Whatever it is: the others would wait, or add up what does not belong together.
                self._fail(str(error) or type(error).__name__)
                raise
            self.seconds_waited += time.monotonic() - came

    def _fail(self, why: str) -> None:
        self._failure = why
        # All others of this host, or of all hosts, hear the cause; they would only see that this process leaves.
        # Those that expect values of a ring would take the text for these.
        for link in (*self._members, *self._heads):
            if not (self._is_in_ring and link in self._neighbours):
                link.send_failure(why)
        self.close()

    def _header(self, size: int, kind: str) -> Header:
        self._number += 1
        number, what = self._purpose
        return Header(self._number, size, zlib.crc32(number.to_bytes(4, "little"), zlib.crc32(kind.encode())), what)

    def _pieces(self, size: int, length: int) -> Iterator[slice]:
        """What is exchanged at a time; whole, where no host has shared memory: every piece costs a ring's latencies."""
        length = length if any(len(ranks) > 1 for ranks in self.hosts) else size
        return (slice(begin, min(begin + length, size)) for begin in range(0, size, length))

    def _sums(self, tables: Sequence[np.ndarray], narrow: np.dtype | None, kind: str) -> list[np.ndarray]:
        """The sums of arrays of one dimension."""
        dtype = tables[0].dtype
        results = _carved(self._results.take, [table.size for table in tables], dtype)
        own, sums = (_SideBySide([one[np.newaxis] for one in arrays]) for arrays in (tables, results))
        if own.width * dtype.itemsize <= _SMALL:
            whole = self._through_the_first(np.concatenate(tables), kind)
            sums.copy_from(whole[np.newaxis], slice(0, own.width))
            return results
        for piece in self._pieces(own.width, SEGMENT // dtype.itemsize):
            length = piece.stop - piece.start
            whole = results[0][piece] if len(tables) == 1 else self._results.take(0 if self._memory else length, dtype)
            total = self._sum_of_piece(
                own, piece, 1, whole[np.newaxis], kind, lambda added: self._all_around(added, narrow)
            )
            if self._memory or len(tables) > 1:
                sums.copy_from(total, piece)
        return results

    def _own_rows(self, tables: Sequence[np.ndarray], narrow: np.dtype | None, within_host: bool) -> list[np.ndarray]:
        dtype, (order, rank) = tables[0].dtype, self._numbers(within_host)
        size = len(order)
        kind = f"own rows {dtype.str} {[table.shape for table in tables]} {narrow} {within_host}"
        # A row for each process.
        own = [np.ascontiguousarray(table).reshape(size, table.size // size) for table in tables]
        results = _carved(self._results.take, [rows.shape[1] for rows in own], dtype)
        mine = _SideBySide([result[np.newaxis] for result in results])
        if size * mine.width * dtype.itemsize <= _SMALL:
            whole = self._through_the_first(np.concatenate(own, 1).reshape(-1), kind)
            mine.copy_from(whole.reshape(size, -1)[rank : rank + 1], slice(0, mine.width))
        else:
            rows = _SideBySide(own if order == sorted(order) else [one[order] for one in own])

            def around(values: np.ndarray) -> None:
                if within_host:
                    self._all_around(values, narrow)
                else:
                    self._add_around(values, self._of_hosts(values.size // size), self._host, narrow)
                    self._is_in_ring = False

            for piece in self._pieces(mine.width, SEGMENT // dtype.itemsize // size):
                if self._memory and self.number_of_hosts == 1:
                    self._own_rows_of_piece(rows, piece, mine, kind)
                    continue
                length = piece.stop - piece.start
                whole = np.empty(0) if self._memory else self._results.take(size * length, dtype).reshape(size, length)
                total = self._sum_of_piece(rows, piece, size, whole, kind, around)
                mine.copy_from(total[order.index(rank)][np.newaxis], piece)
        shapes = [(len(table) // size, *table.shape[1:]) for table in tables]
        return [result.reshape(shape) for result, shape in zip(results, shapes, strict=True)]

    def _numbers(self, within_host: bool) -> tuple[list[int], int]:
        """Numbers of all processes, host by host, or of those of this host; and this process' own."""
        if within_host:
            return list(range(len(self.hosts[self._host]))), self._place
        return [rank for ranks in self.hosts for rank in ranks], self.hosts[self._host][self._place]

    def _of_hosts(self, length: int) -> list[slice]:
        """Where the rows of each host's processes are, so many values each, host by host."""
        ends = np.cumsum([0, *(len(ranks) * length for ranks in self.hosts)])
        return [slice(begin, end) for begin, end in itertools.pairwise(ends)]

    def _rows(
        self, tables: Sequence[np.ndarray], new: Callable[[int, np.dtype], np.ndarray], within_host: bool = False
    ) -> list[np.ndarray]:
        """What each process has, by rank, in memory of `new`."""
        order, rank = self._numbers(within_host)
        size = len(order)
        own = [np.ascontiguousarray(table).reshape(1, -1).view(np.uint8) for table in tables]
        found = [one.reshape(size, -1) for one in _carved(new, [size * one.size for one in own], own[0].dtype)]
        mine, rows = _SideBySide(own), _SideBySide(found)
        kind = f"rows {[(table.dtype.str, table.shape) for table in tables]} {within_host}"
        # Within a host, there is but one meeting in any case.
        if size * mine.width <= _SMALL and not within_host:
            whole = np.zeros((size, mine.width), np.uint8)
            mine.copy_to(whole[rank][np.newaxis], slice(0, mine.width))
            self._through_the_first(whole.reshape(-1), kind)
            rows.copy_from(whole, slice(0, mine.width))
        else:
            # The rows of all processes have to find room where the sum of a piece does.
            places = slice(None) if order == sorted(order) else order
            for piece in self._pieces(mine.width, SEGMENT // size):
                rows.copy_from(self._rows_of_piece(mine, piece, size, kind, new, within_host), piece, places)
        pairs = zip(found, tables, strict=True)
        return [one.reshape(-1).view(table.dtype).reshape(size, *table.shape) for one, table in pairs]

    # What is small

    def _through_the_first(self, values: np.ndarray, kind: str) -> np.ndarray:
        """Adds up what all have, in place."""
        header = self._header(values.nbytes, kind)
        other = np.empty_like(values)
        for link in (*self._members, *self._heads):
            link.expect(header)
            link.receive(_bytes(other))
            np.add(values, other, out=values)
        for link in (*self._first, *self._root):  # one at most
            link.send(header, values.tobytes())
            link.expect(header)
            link.receive(_bytes(values))
        for link in (*self._heads, *self._members):
            link.send(header, values.tobytes())
        return values

    # What is large

    def _sum_of_piece(
        self, own: _SideBySide, piece: slice, rows: int, whole: np.ndarray, kind: str, around: Callable
    ) -> np.ndarray:
        """The sum of rows; in `whole`, or else in the memory of this host until all have come to the next piece."""
        dtype, length = own.dtype, piece.stop - piece.start
        header = self._header(rows * length * dtype.itemsize, kind)

        def between_hosts(values: np.ndarray) -> None:
            if self._neighbours:
                self._begin_ring(header)
                around(values.reshape(-1))

        if self._memory is None:
            own.copy_to(whole, piece)
            between_hosts(whole)
            return whole
        bounds = bounds_of(length, len(self.hosts[self._host]), dtype.itemsize)
        shared = self._memory.segments(1 - self._last_read, dtype)[:, : rows * length].reshape(-1, rows, length)
        total = self._memory.total(dtype)[: rows * length].reshape(rows, length)
        for place, part in enumerate(bounds):
            if place != self._place:
                own.copy_to(shared[self._place][:, part], _within(piece, part))
        self._meet(header)
        mine = bounds[self._place]
        for part, place in own.within(_within(piece, mine)):
            self._add(part, shared[:, :, mine][:, :, place], total[:, mine][:, place])
        self._meet(header, lambda: between_hosts(total))
        return total

    def _own_rows_of_piece(self, rows: _SideBySide, piece: slice, mine: _SideBySide, kind: str) -> None:
        """Adds up this process' rows of a piece, where all processes are on this host."""
        size, length = len(self.hosts[self._host]), piece.stop - piece.start
        shared = self._segments_to_read(rows.dtype)[:, : size * length].reshape(size, size, length)
        for part, place in rows.within(piece):
            for other in range(size):
                if other != self._place:
                    np.copyto(shared[self._place, other, place], part[other])
        self._meet(self._header(size * length * rows.dtype.itemsize, kind))
        for (part, place), (result, _) in zip(rows.within(piece), mine.within(piece), strict=True):
            self._add(part[self._place], shared[:, self._place, place], result[0])

    def _add(self, own: np.ndarray, shared: np.ndarray, out: np.ndarray) -> None:
        """Adds up what the processes of this host have, in their order; own values are not in the shared memory."""
        first, second, *others = (own if place == self._place else one for place, one in enumerate(shared))
        np.add(first, second, out=out)
        for one in others:
            np.add(out, one, out=out)

    def _segments_to_read(self, dtype: np.dtype) -> np.ndarray:
        """A segment for each process of this host, which the others may read until all have come to the next piece.

        Those of the piece before may still be read.
        """
        self._last_read = 1 - self._last_read
        return self._memory.segments(self._last_read, dtype)

    def _rows_of_piece(
        self, own: _SideBySide, piece: slice, size: int, kind: str, new: Callable, within_host: bool
    ) -> np.ndarray:
        """Rows of bytes, host by host."""
        length = piece.stop - piece.start
        header, memory, byte = self._header(length, kind), self._memory, np.dtype(np.uint8)
        if memory is None:
            rows = new(size * length, byte).reshape(size, length)
            own.copy_to(rows[self._of_hosts(1)[self._host]], piece)
            self._rows_around(header, rows)
            return rows
        shared = self._segments_to_read(byte)[:, :length]
        own.copy_to(shared[self._place][np.newaxis], piece)
        if within_host or self.number_of_hosts == 1:
            self._meet(header)
            return shared
        rows = memory.total(byte)[: size * length].reshape(size, length)

        def collect() -> None:
            np.copyto(rows[self._of_hosts(1)[self._host]], shared)
            self._rows_around(header, rows)

        self._meet(header, collect)
        return rows

    def _rows_around(self, header: Header, rows: np.ndarray) -> None:
        if self._neighbours:
            self._begin_ring(header)
            self._pass_on(rows.reshape(-1), self._of_hosts(rows.shape[1]), self._host)

    def _meet(self, header: Header, in_between: Callable[[], object] = lambda: None) -> None:
        """Waits for all processes of this host; meanwhile the first one does something when all have come."""
        for link in self._first:
            link.send(header)
            link.expect(header)
        for link in self._members:
            link.expect(header)
        if not self._first:
            in_between()
        for link in self._members:
            link.send(header)

    # Around the first processes of all hosts

    def _begin_ring(self, header: Header) -> None:
        self._is_in_ring = True
        following, before = self._neighbours
        following.send(header)
        before.expect(header)

    def _all_around(self, values: np.ndarray, narrow: np.dtype | None) -> None:
        """Adds up what the hosts have; all get the whole sum."""
        hosts = self.number_of_hosts
        bounds, last = bounds_of(values.size, hosts, values.dtype.itemsize), (self._host + 1) % hosts
        self._add_around(values, bounds, last, narrow)
        self._pass_on(values, bounds, last, narrow)

    def _add_around(self, values: np.ndarray, bounds: Sequence[slice], own: int, narrow: np.dtype | None) -> None:
        """Adds up what the hosts have; afterwards this one has the sum of part `own`."""
        hosts, (following, before) = self.number_of_hosts, self._neighbours
        received = self._results.take(max(part.stop - part.start for part in bounds), narrow or values.dtype)
        for step in range(1, hosts):
            sent, part = bounds[(own - step) % hosts], bounds[(own - step - 1) % hosts]
            incoming = received[: part.stop - part.start]
            transfer(following, _bytes(_rounded(values[sent], narrow)), before, _bytes(incoming))
            _take_over(incoming, values[part], adds=True)

    def _pass_on(self, values: np.ndarray, bounds: Sequence[slice], own: int, narrow: np.dtype | None = None) -> None:
        """Gives all hosts the part of each; this one has part `own`."""
        following, before = self._neighbours
        # Its own part is rounded here as it is on all other hosts: all have the same bits.
        outgoing = _rounded(values[bounds[own]], narrow)
        if narrow:
            _take_over(outgoing, values[bounds[own]])
        for step in range(1, self.number_of_hosts):
            part = bounds[(own - step) % self.number_of_hosts]
            incoming = np.empty(part.stop - part.start, narrow) if narrow else values[part]
            transfer(following, _bytes(outgoing), before, _bytes(incoming))
            if narrow:
                _take_over(incoming, values[part])
            outgoing = incoming
        self._is_in_ring = False


def _carved(new: Callable[[int, np.dtype], np.ndarray], lengths: Sequence[int], dtype: np.dtype) -> list[np.ndarray]:
    """Arrays of these lengths in one memory, each where TensorFlow takes it over."""
    unit = _ALIGNMENT // dtype.itemsize
    ends = list(itertools.accumulate((-(-length // unit) * unit for length in lengths), initial=0))
    memory = new(ends[-1], dtype)
    return [memory[begin : begin + length] for begin, length in zip(ends, lengths, strict=False)]


def _within(piece: slice, part: slice) -> slice:
    """A part of a piece, counted as the piece is."""
    return slice(piece.start + part.start, piece.start + part.stop)


def _rounded(values: np.ndarray, narrow: np.dtype | None) -> np.ndarray:
    if narrow is None:
        return values
    return rounded_to_bfloat16(values, narrow) if _by_bits(narrow, values.dtype) else values.astype(narrow)


def _by_bits(narrow: np.dtype, wide: np.dtype) -> bool:
    """Whether the bits of one are the upper ones of the other; NumPy's own casts take twice the time."""
    return narrow.name == "bfloat16" and wide == np.float32


def rounded_to_bfloat16(values: np.ndarray, narrow: np.dtype) -> np.ndarray:
    """The nearest bfloat16 of each float32 of a vector, the even one of two, as `values.astype(narrow)` has it."""
    bits, found = values.view(np.uint32), np.empty(values.shape, np.uint16)
    for piece in _in_cache(values.size):
        # Just below half a unit of the last bit that stays, and one more where that bit is set.
        sums = bits[piece] >> 16
        sums &= 1
        sums += 0x7FFF
        sums += bits[piece]
        sums >>= 16
        found[piece] = sums
        if (are_none := np.isnan(values[piece])).any():  # the sum may be infinity, or 0
            found[piece][are_none] = (bits[piece][are_none] >> 31 << 15) + 0x7FC0
    return found.view(narrow)


def _take_over(values: np.ndarray, into: np.ndarray, adds: bool = False) -> None:
    """Assigns, or adds, values to others, which may be wider."""
    if not _by_bits(values.dtype, into.dtype):
        if adds:
            np.add(values, into, out=into, dtype=into.dtype)
        else:
            into[...] = values
        return
    bits = values.view(np.uint16)
    for piece in _in_cache(values.size):
        wide = bits[piece].astype(np.uint32)
        wide <<= 16
        if adds:
            into[piece] += wide.view(np.float32)
        else:
            into[piece] = wide.view(np.float32)


def _in_cache(size: int) -> Iterator[slice]:
    return (slice(begin, begin + _CACHED) for begin in range(0, size, _CACHED))


def _bytes(values: np.ndarray) -> memoryview:
    return memoryview(values.view(np.uint8)) if values.size else memoryview(b"")


def _added(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The sum of the values of this process' replicas."""
    if len({(part.shape, part.dtype) for part in parts}) > 1:
        found = ", ".join(f"{part.dtype} {part.shape}" for part in parts)
        raise ExchangeError(f"Received: values of this process' replicas, {found}. Expected: the same of each")
    total, *others = (np.ascontiguousarray(part).reshape(-1) for part in parts)
    for i, other in enumerate(others):
        total = np.add(total, other, out=total if i else None)
    return total.reshape(parts[0].shape)
