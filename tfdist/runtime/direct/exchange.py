"""Sums and gathers over the processes of a job, the same bits on all of them.

What is small goes to the first process of each host, from there to the first of all, and back. What is large:

host A   process 0   a0 | a1 | a2    each copies into shared memory what the others need,
         process 1   b0 | b1 | b2    adds up one part of all (a0+b0+c0, a1+b1+c1, a2+b2+c2),
         process 2   c0 | c1 | c2    and copies the whole sum out again
                          |
host B   ...         ring over sockets between the first process of each host: in H - 1 steps each of H hosts gets the
                     sum of one part, in H - 1 more the parts of the others

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009). The order of the
additions depends on nothing but the places of the processes.

`all_gather` has the second half of this only: nothing is added up.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tfdist.runtime.direct.host_memory import SEGMENT, HostMemory, bounds_of
from tfdist.runtime.direct.links import ExchangeError, Header, Link, transfer
from tfdist.runtime.direct.result_memory import ResultMemory

# Up to here a second meeting costs more than sending everything to one process.
_SMALL = 32 << 10


@dataclass
class Connections:
    """How a process is connected to the others.

    Attributes:
        place: of this process among those of its host.
        size: how many there are on its host.
        memory: which these share; `None` for a single one.
        first: to the first process of the host; `None` on that one itself.
        members: on it, to the others of its host, in their order.
        root: from the first process of a host to that of the first host; `None` on that one, and on all others.
        hosts: on it, to the first processes of the other hosts, in their order.
        host: the number of this host.
        is_shared: whether any host has several processes, so that large arrays go through memory, piece by piece.
        next: on first processes of several hosts: to that of the next host.
        previous: and from that of the host before.
        ranks: of the processes of each host.
    """

    place: int = 0
    size: int = 1
    memory: HostMemory | None = None
    first: Link | None = None
    members: list[Link] = field(default_factory=list)
    root: Link | None = None
    hosts: list[Link] = field(default_factory=list)
    host: int = 0
    is_shared: bool = True
    number_of_hosts: int = 1
    next: Link | None = None
    previous: Link | None = None
    ranks: Sequence[Sequence[int]] = ((0,),)

    def all(self) -> list[Link]:
        """All links of this process."""
        found = [self.first, *self.members, self.root, *self.hosts, self.next, self.previous]
        return [link for link in found if link is not None]


class Exchange:
    """Sums and gathers over the processes of a job; all of them make the same calls in the same order.

    Args:
        connections: how this process is connected to the others.

    Example:
        >>> Exchange(Connections()).all_reduce([np.array([1.0, 2.0])])
        array([1., 2.])
    """

    def __init__(self, connections: Connections) -> None:
        self._to = connections
        self._results = ResultMemory()
        self._lock = threading.Lock()
        self._number = 0
        self._failure = ""

    @property
    def number_of_hosts(self) -> int:
        """How many hosts its processes are on."""
        return self._to.number_of_hosts

    def all_reduce(self, parts: Sequence[np.ndarray], narrow: np.dtype | None = None) -> np.ndarray:
        """The sum over all parts of all processes.

        Args:
            parts: of this process' replicas, of one shape and dtype, which are the same on all processes.
            narrow: to which large arrays are rounded whenever they go to another host; `None` sends them as they are.

        Returns:
            An array of that shape and dtype, which belongs to the caller.

        Raises:
            ExchangeError: if a process is gone, does not come in time, or adds up something else; from then on always.
        """
        # Infinities are no news: a loss scale that is too large makes them.
        with self._alone(), np.errstate(all="ignore"):
            return self._sum(parts, narrow)

    def all_gather(self, values: np.ndarray) -> np.ndarray:
        """What each process has, by rank.

        Args:
            values: of this process; shape and dtype are the same on all processes.

        Returns:
            An array of the same dtype with one more dimension, the first: a row for each process. It belongs to the
            caller.

        Raises:
            ExchangeError: as in `all_reduce`.
        """
        with self._alone():
            return self._rows(values)

    def gather_rows(self, tables: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The rows that each process has, one below the other, by rank.

        Args:
            tables: of this process, with equally many rows; how many may differ between processes, and nothing else.

        Returns:
            For each table one with the rows of all processes.

        Raises:
            ExchangeError: as in `all_reduce`.
        """
        with self._alone():
            counts = self._rows(np.array(len(tables[0])))
            return [self._table(table, counts) for table in tables]

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One call after another, and none after one that failed."""
        with self._lock:
            if self._failure:
                raise ExchangeError(self._failure)
            try:
                yield
            except BaseException as error:
                # Whatever it is: the others would wait, or add up what does not belong together.
                self._fail(str(error) or type(error).__name__)
                raise

    def close(self) -> None:
        """Ends all connections."""
        for link in self._to.all():
            link.close()

    def _fail(self, text: str) -> None:
        self._failure = text
        # All others of this host, or of all hosts, are told the cause; they would only see that this process leaves.
        for link in (*self._to.members, *self._to.hosts):
            link.send_failure(text)
        self.close()

    def _sum(self, parts: Sequence[np.ndarray], narrow: np.dtype | None) -> np.ndarray:
        shape, dtype = parts[0].shape, parts[0].dtype
        if any(part.shape != shape or part.dtype != dtype for part in parts):
            found = ", ".join(f"{part.dtype} {part.shape}" for part in parts)
            raise ExchangeError(f"Received: values of this process' replicas, {found}. Expected: the same of each")
        own = [np.ascontiguousarray(part).reshape(-1) for part in parts]
        result = self._results.take(own[0].size, dtype)
        if len(own) > 1:
            np.add(own[0], own[1], out=result)
            for other in own[2:]:
                np.add(result, other, out=result)
            own = [result]
        kind = zlib.crc32(f"{dtype.str} {shape} {narrow}".encode())
        if result.nbytes <= _SMALL:
            self._through_the_first(own[0], result, kind)
        else:
            # Every piece costs the latencies of a ring.
            length = SEGMENT // dtype.itemsize if self._to.is_shared else result.size
            for begin in range(0, result.size, length):
                piece = slice(begin, begin + length)
                self._through_memory(own[0][piece], result[piece], kind, narrow)
        return result.reshape(shape)

    def _table(self, own: np.ndarray, counts: np.ndarray) -> np.ndarray:
        if len(set(counts.tolist())) == 1:
            rows = self._rows(own, np.empty)
            return rows.reshape(counts.sum(), *own.shape[1:])
        padded = np.zeros((counts.max(), *own.shape[1:]), own.dtype)
        padded[: len(own)] = own
        rows = self._rows(padded, np.empty)
        return np.concatenate([of_one[:count] for of_one, count in zip(rows, counts, strict=True)])

    def _rows(self, values: np.ndarray, new: Callable[[int, np.dtype], np.ndarray] | None = None) -> np.ndarray:
        """What each process has, by rank; in memory of `new`, where sizes change too often to be kept for."""
        new = new or self._results.take
        to, size = self._to, sum(map(len, self._to.ranks))
        own = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        result = new(size * own.size, own.dtype)
        rows = result.reshape(size, own.size)
        kind = zlib.crc32(f"rows {values.dtype.str} {values.shape}".encode())
        if result.nbytes <= _SMALL:
            mine = np.zeros_like(rows)
            mine[to.ranks[to.host][to.place]] = own
            self._through_the_first(mine.reshape(-1), result, kind)
        else:
            # The rows of all processes have to find room where the sum of a piece does.
            length = SEGMENT // size if to.is_shared else own.size
            order = [rank for ranks in to.ranks for rank in ranks]
            for begin in range(0, own.size, length):
                piece = slice(begin, begin + length)
                rows[order, piece] = self._rows_of_piece(own[piece], size, kind, new)
        return rows.view(values.dtype).reshape(size, *values.shape)

    def _rows_of_piece(self, own: np.ndarray, size: int, kind: int, new: Callable) -> np.ndarray:
        """Rows of bytes, host by host."""
        to, header = self._to, self._header(own.nbytes, kind)
        memory = to.memory.of(to.size, own.dtype) if to.memory else new(size * own.size, own.dtype)
        rows = memory[: size * own.size].reshape(size, own.size)
        ends = np.cumsum([len(ranks) for ranks in to.ranks])
        of_host = [slice(end - len(ranks), end) for end, ranks in zip(ends, to.ranks, strict=True)]

        def collect() -> None:
            # Nobody reads what is there any more: all have come to this piece.
            for place, row in enumerate(rows[of_host[to.host]]):
                np.copyto(row, to.memory.of(place, own.dtype)[: own.size] if to.memory else own)
            if to.next is not None:
                to.next.send_header(header)
                to.previous.expect_header(header)
                self._pass_on(
                    rows.reshape(-1), [slice(o.start * own.size, o.stop * own.size) for o in of_host], to.host
                )

        if to.memory is None:
            collect()
        else:
            np.copyto(to.memory.of(to.place, own.dtype)[: own.size], own)
            self._meet(header, collect)
        return rows

    def _header(self, size: int, kind: int) -> Header:
        self._number += 1
        return Header(self._number, size, kind)

    # What is small

    def _through_the_first(self, own: np.ndarray, result: np.ndarray, kind: int) -> None:
        to, header = self._to, self._header(result.nbytes, kind)
        np.copyto(result, own)
        if to.first is not None:
            _ask(to.first, result, header)
            return
        _collect(to.members, result, header)
        if to.root is not None:
            _ask(to.root, result, header)
        else:
            _collect(to.hosts, result, header)
            _give(to.hosts, result, header)
        _give(to.members, result, header)

    # What is large

    def _through_memory(self, own: np.ndarray, result: np.ndarray, kind: int, narrow: np.dtype | None) -> None:
        to, header = self._to, self._header(own.nbytes, kind)
        if to.memory is None:
            np.copyto(result, own)
            self._ring(result, header, narrow)
            return
        bounds = bounds_of(own.size, to.size, own.itemsize)
        mine = bounds[to.place]
        shared = [to.memory.of(place, own.dtype)[: own.size] for place in range(to.size + 1)]
        total = shared.pop()
        for place, part in enumerate(bounds):
            if place != to.place:
                np.copyto(shared[to.place][part], own[part])
        self._meet(header)
        addends = [own if place == to.place else one for place, one in enumerate(shared)]
        np.add(addends[0][mine], addends[1][mine], out=total[mine])
        for one in addends[2:]:
            np.add(total[mine], one[mine], out=total[mine])
        self._meet(header, lambda: self._ring(total, header, narrow))
        np.copyto(result, total)

    def _meet(self, header: Header, in_between: Callable[[], object] | None = None) -> None:
        """Waits for all processes of this host; meanwhile the first one does something when all have come."""
        to = self._to
        if to.first is not None:
            to.first.send_header(header)
            to.first.expect_header(header)
            return
        for link in to.members:
            link.expect_header(header)
        if in_between is not None:
            in_between()
        for link in to.members:
            link.send_header(header)

    def _ring(self, values: np.ndarray, header: Header, narrow: np.dtype | None) -> None:
        """Adds up what the first processes of all hosts have."""
        to = self._to
        if to.next is None:
            return
        to.next.send_header(header)
        to.previous.expect_header(header)
        hosts = to.number_of_hosts
        bounds = bounds_of(values.size, hosts, values.itemsize)
        longest = max(part.stop - part.start for part in bounds)
        received = self._results.take(longest, narrow or values.dtype)
        for step in range(hosts - 1):
            sent, part = bounds[(to.host - step) % hosts], bounds[(to.host - step - 1) % hosts]
            incoming = received[: part.stop - part.start]
            transfer(to.next, _bytes(_rounded(values[sent], narrow)), to.previous, _bytes(incoming))
            np.add(incoming, values[part], out=values[part], dtype=values.dtype)
        self._pass_on(values, bounds, (to.host + 1) % hosts, narrow)

    def _pass_on(self, values: np.ndarray, bounds: Sequence[slice], own: int, narrow: np.dtype | None = None) -> None:
        """Gives all hosts the part of each; this one has part `own`."""
        to = self._to
        # Its own part is rounded here as it is on all other hosts: all have the same bits.
        outgoing = _rounded(values[bounds[own]], narrow)
        if narrow:
            values[bounds[own]] = outgoing
        for step in range(1, to.number_of_hosts):
            part = bounds[(own - step) % to.number_of_hosts]
            incoming = np.empty(part.stop - part.start, narrow) if narrow else values[part]
            transfer(to.next, _bytes(outgoing), to.previous, _bytes(incoming))
            if narrow:
                values[part] = incoming
            outgoing = incoming


def _rounded(values: np.ndarray, narrow: np.dtype | None) -> np.ndarray:
    return values if narrow is None else values.astype(narrow)


def _ask(link: Link, values: np.ndarray, header: Header) -> None:
    """Sends values to the process that adds them up, and gets the sum."""
    link.send_header(header, values.tobytes())
    link.expect_header(header)
    link.receive(_bytes(values))


def _collect(links: Sequence[Link], values: np.ndarray, header: Header) -> None:
    """Adds to values what the others send."""
    other = np.empty_like(values)
    for link in links:
        link.expect_header(header)
        link.receive(_bytes(other))
        np.add(values, other, out=values)


def _give(links: Sequence[Link], values: np.ndarray, header: Header) -> None:
    for link in links:
        link.send_header(header, values.tobytes())


def _bytes(values: np.ndarray) -> memoryview:
    return memoryview(values.view(np.uint8)) if values.size else memoryview(b"")
