"""Exchanges of workers that come and go: rank 0 knows who takes part, and adds up what they bring to each round.

    worker                                  rank 0
    hello {"rank": 2}               -->                a `Listener` (cluster/server.py): proofs of the job's secret
    ["follow", place]               -->                at the beginning, and wherever it is not one of the members
                                    <--   ["over"]     the others are further: it skips what they have done
                                    <--   ["state"] + rank 0's state: it is a member from here on
    ["bring", place, stop] + arrays -->                waits until all members have brought theirs
                                    <--   ["sum", how many, stop] + arrays, or ["over"]: it was left out
    ["share", name, value]          -->                what all members say, by rank; kept for those who come later
                                    <--   ["shared", values]
    any                             <--   ["error", text]

A place is where a training is: number of the fit, epoch, step of the epoch. A worker whose connection ends is left out
at once, and one that does not come in time after `patience`; the others go on without it. What it has learned since the
last round is lost. One that comes is taken in where the members complete a round.

Rank 0 ends with the job: it is a member like others, and its end ends all.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hmac
import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfdist.cluster import server, sockets
from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.foreign_text import listed
from tfdist.cluster.meeting import named
from tfdist.cluster.variables import TOKEN, text

_log = logging.getLogger("tfdist")
Place = tuple[int, int, int]
_TICK = 1.0
_LENGTH = struct.Struct(">I")
_MOST_TEXT = 1 << 26
_TOO_FEW = "Received: {} workers. Expected: at least min_workers={}."
# Weighted by rows, and the first member's as it is.
MEAN, FIRST = "mean", "first"


class RoundError(ClusterError):
    """A round cannot be completed."""


class Sum(NamedTuple):
    """What a round has made of all that was brought.

    Attributes:
        workers: how many have brought something.
        stops: whether one of them stops training here.
        arrays: sums, in the order of what was brought.
    """

    workers: int
    stops: bool
    arrays: list[np.ndarray]


class _Brought(NamedTuple):
    place: Place
    stops: bool
    rows: float
    kinds: list[str]
    arrays: list[np.ndarray]


class Rounds:
    """What rank 0 knows of the members of a job, and of their round. Called by a thread for each of them.

    Args:
        names: of all workers, by rank.
        least: how many members a round needs.
        patience: how long the others wait for a member that does not come, in seconds.
        start_timeout: how long rank 0 waits for all workers at the start.
        timeout: how long a round waits for enough members.
    """

    def __init__(self, names: Sequence[str], least: int, patience: float, start_timeout: float, timeout: float):
        self._names, self._least, self._patience = names, least, patience
        self._start_timeout, self._timeout = start_timeout, timeout
        self._changed = threading.Condition()
        self._members = {0}
        self._following: dict[int, Place] = {}
        self._given: dict[int, tuple[Place, list[np.ndarray]]] = {}
        self._awaited: set[int] = set()
        self._brought: dict[int, _Brought] = {}
        self._since = 0.0
        self._completed = 0
        self._last: Place | None = None
        self._sum: Sum | None = None
        self._shares: dict[str, dict[int, Any]] = {}
        self._shared: dict[str, dict[int, Any]] = {}
        self._problem = ""

    @property
    def awaits_state(self) -> bool:
        """Whether some have been taken in, and wait for rank 0's state."""
        with self._changed:
            return bool(self._awaited)

    def begin(self, place: Place) -> None:
        """Rank 0 begins a fit at a place: waits for the members, the first time for all, and takes in who follows."""
        with self._changed:
            is_first = self._last is None
            wanted = set(range(1, len(self._names))) if is_first else self._members - {0}
            deadline = time.monotonic() + (self._start_timeout if is_first else self._patience)
            while not wanted <= self._following.keys() and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left, _TICK))
                wanted = wanted if is_first else self._members - {0}
            missing = wanted - self._following.keys()
            if is_first and missing:
                absent = listed([self._names[rank] for rank in sorted(missing)])
                _log.warning("the others begin without %s, of which nothing was heard", absent)
            self._leave_out(missing & self._members, "has not come")
            self._last = place
            self._take_in(list(self._following), is_first)
            if is_first and len(self._members) < self._least:  # later on, the next round waits for more
                self._fail(_TOO_FEW.format(len(self._members), self._least))
                self._check()

    def give(self, place: Place, state: list[np.ndarray]) -> None:
        """Rank 0's state, for those that it awaits."""
        with self._changed:
            self._given |= dict.fromkeys(self._awaited, (place, state))
            self._awaited.clear()
            self._changed.notify_all()

    def follow(self, rank: int, place: Place) -> tuple[Place, list[np.ndarray]] | None:
        """Waits until a worker is a member; `None` if the others are further than its place."""
        with self._changed:
            self._following[rank] = place
            self._changed.notify_all()
            self._consider()
            while rank not in self._given:
                if rank not in self._awaited and self._last is not None and place <= self._last:
                    self._following.pop(rank, None)
                    return None
                self._check()
                self._changed.wait(_TICK)
            return self._given.pop(rank)

    def bring(self, rank: int, brought: _Brought) -> Sum | None:
        """Waits until all members have brought theirs; `None` for one that is none of them."""
        with self._changed:
            if rank not in self._members:
                return None
            if not self._brought:
                self._since = time.monotonic()
            number = self._completed
            self._brought[rank] = brought
            self._consider()
            while self._completed == number:
                if rank not in self._members:
                    return None
                self._check()
                self._changed.wait(_TICK)
                if self._completed == number:
                    self._lose_patience(self._brought)
                    self._consider()
            return self._sum if self._completed == number + 1 else None

    def share(self, rank: int, name: str, value: Any) -> dict[int, Any]:
        """What all members say under a name, by rank. One that is no member hears it, and says nothing."""
        with self._changed:
            if name not in self._shared and rank in self._members:
                if name not in self._shares:
                    self._shares[name], self._since = {}, time.monotonic()
                self._shares[name][rank] = value
            while name not in self._shared:
                said = self._shares.get(name, {})
                if said and self._members <= said.keys():
                    self._shared[name] = dict(sorted(self._shares.pop(name).items()))
                    self._changed.notify_all()
                    break
                self._check()
                self._changed.wait(_TICK)
                if rank in self._members and name not in self._shared:
                    self._lose_patience(said)
            return self._shared[name]

    def keep(self, name: str, value: Any) -> None:
        """Keeps what has been shared under a name before this job began."""
        with self._changed:
            self._shared.setdefault(name, {0: value})

    def left(self, rank: int, in_peace: bool = False) -> None:
        """The connection of a worker has ended; in peace, if its program has."""
        with self._changed:
            if in_peace:
                self._members.discard(rank)
            self._following.pop(rank, None)
            self._awaited.discard(rank)
            self._given.pop(rank, None)
            self._leave_out({rank} & self._members, "is gone")
            self._consider()

    def wait_until_alone(self, seconds: float) -> None:
        """Waits until all other members have left, for so long at most."""
        with self._changed:
            self._changed.wait_for(lambda: self._members <= {0}, seconds)

    def _consider(self) -> None:
        """Completes the round if all members have brought theirs."""
        if not self._brought or not self._members <= self._brought.keys():
            return
        parts = [self._brought[rank] for rank in sorted(self._members)]
        places = {one.place for one in parts}
        stops = any(one.stops for one in parts)
        if len(places) > 1 and not stops:
            self._fail(
                f"The workers are at different steps. Received: {sorted(places)} (fit, epoch, step). Expected: the "
                "same data and calls on every process."
            )
            return
        place = max(places)
        here = [rank for rank, where in self._following.items() if where == place]
        if len(self._members) + len(here) < self._least:
            return
        filled = [one for one in parts if one.kinds]  # one that ends its epoch there may have nothing to bring
        self._sum = Sum(len(parts), stops, _sum(filled) if filled else [])
        self._brought, self._last = {}, place
        self._completed += 1
        self._take_in(here)
        self._changed.notify_all()

    def _take_in(self, ranks: Iterable[int], is_first: bool = False) -> None:
        for rank in sorted(ranks):
            if not is_first and rank not in self._members:
                _log.warning("%s takes part from here on", self._names[rank])
            del self._following[rank]
            self._members.add(rank)
            self._awaited.add(rank)
        self._changed.notify_all()

    def _leave_out(self, ranks: Iterable[int], why: str) -> None:
        for rank in sorted(ranks):
            self._members.discard(rank)
            self._brought.pop(rank, None)
            left = f"the others ({len(self._members)} of {len(self._names)}) go on without it"
            lost = "what it has learned since the last exchange is lost"
            _log.warning("%s %s: %s, and %s", self._names[rank], why, left, lost)
        self._changed.notify_all()

    def _lose_patience(self, came: Iterable[int]) -> None:
        missing = self._members - set(came) - {0}
        waited = time.monotonic() - self._since
        if missing and waited > self._patience:
            self._leave_out(missing, f"has not come for {waited:.0f} s")
        elif not missing and waited > self._timeout:
            absent = f"{self._names[0]} has not come for {waited:.0f} s. Expected: the same calls on every process."
            self._fail(_TOO_FEW.format(len(self._members), self._least) if 0 in came else absent)

    def _fail(self, problem: str) -> None:
        self._problem = problem
        self._changed.notify_all()

    def _check(self) -> None:
        if self._problem:
            raise RoundError(self._problem)


def _sum(parts: Sequence[_Brought]) -> list[np.ndarray]:
    """Means over the rows, or the first one's: added up in the order of the ranks."""
    rows = sum(one.rows for one in parts)
    found = []
    for number, kind in enumerate(parts[0].kinds):
        first = parts[0].arrays[number]
        if kind == FIRST or not rows:
            found.append(first)
            continue
        wide = np.result_type(first.dtype, np.float32) if first.dtype.kind in "fc" else np.dtype("float32")
        total = np.zeros(first.shape, wide)
        for one in parts:
            if one.rows:  # what a worker makes of no rows may be NaN
                total += one.arrays[number].astype(wide) * wide.type(one.rows / rows)
        found.append(total)
    return found


# --- How a worker takes part ------------------------------------------------------------------------------------------


class Membership:
    """This process' part in the rounds; the same calls on rank 0, which keeps them, and on the others.

    Args:
        cluster: of several workers.
        names: of all workers, by rank.
        rounds: what rank 0 keeps; `None` elsewhere.
        patience: how long to try to reach rank 0, in seconds.
        start_timeout: how long to try so the first time.

    Attributes:
        cluster, names: as given.
        rank: of this process.
    """

    def __init__(
        self, cluster: ClusterConfig, names: Sequence[str], rounds: Rounds | None, patience: float, start_timeout: float
    ):
        self.cluster, self.rank, self.names = cluster, cluster.rank, names
        self._rounds, self._patience, self._counts = rounds, patience, dict[str, int]()
        self._place = sockets.split_address(cluster.chief_address)
        self._secret = hmac.digest(text(os.environ, TOKEN).encode(), b"workers that come and go", "sha256")
        self._socket: socket.socket | None = None
        if rounds is None:
            self._connect(start_timeout)
            return
        host, port = self._place
        alone = sockets.is_loopback(host)
        bound = sockets.bind_host(host, port) if alone else sockets.bind_everywhere(port, reuse=True)
        self._connections: dict[int, socket.socket] = {}
        self._listener = server.Listener(bound, self._secret, self._attend, guests=2 * len(names))

    @property
    def rounds(self) -> Rounds:
        """What rank 0 keeps."""
        assert self._rounds is not None
        return self._rounds

    def follow(self, place: Place) -> tuple[Place, list[np.ndarray]] | None:
        """Waits until this process is a member: where the training is, and rank 0's state; `None`: further on."""
        said, arrays = self._ask(["follow", list(place)], [])
        return (tuple(said[1]), arrays) if said[0] == "state" else None

    def bring(self, place: Place, stops: bool, rows: float, kinds: list[str], arrays: list[np.ndarray]) -> Sum | None:
        """Takes part in a round with so many rows; `None` if the others have left this process out."""
        if self._rounds is not None:
            return self._rounds.bring(self.rank, _Brought(place, stops, rows, kinds, arrays))
        said, found = self._ask(["bring", list(place), stops, rows, kinds], arrays)
        return Sum(said[1], said[2], found) if said[0] == "sum" else None

    def share(self, name: str, value: Any) -> dict[int, Any]:
        """Says something small, which JSON can hold, under a name: what all members have said, by rank."""
        if self._rounds is not None:
            return self._rounds.share(self.rank, name, value)
        said, _ = self._ask(["share", name, value], [])
        return {int(rank): one for rank, one in said[1].items()}

    def number(self, topic: str) -> int:
        """How often this process has come to a topic, this time included: the same on all that make equal calls."""
        self._counts[topic] = self._counts.get(topic, 0) + 1
        return self._counts[topic]

    def leave(self) -> None:
        """At the end of the program; rank 0 lets the others hear the last round."""
        if self._rounds is not None:
            self._rounds.wait_until_alone(self._patience)
            self._listener.leave()
        elif self._socket is not None:
            with contextlib.suppress(OSError):
                _send(self._socket, ["leave"], [])
            self._socket.close()

    # The end of another worker

    def _connect(self, seconds: float) -> None:
        address, problems = sockets.join_address(*self._place), dict[str, str]()

        def attempt(left: float) -> socket.socket:
            return server.connected(self._place, self._secret, {"rank": self.rank}, left)

        try:
            self._socket = sockets.keep_trying({address: attempt}, time.monotonic() + seconds, problems)
        except sockets.UnreachedError:
            raise RoundError(
                f"{self.names[self.rank]} cannot reach {self.names[0]}, which keeps the rounds: "
                f"{problems.get(address, 'timed out')}"
            ) from None
        sockets.notice_end(self._socket)
        sockets.keep_from_children(self._socket)

    def _ask(self, said: list, arrays: Sequence[np.ndarray]) -> tuple[list, list[np.ndarray]]:
        while True:
            try:
                _send(self._socket, said, arrays)
                found, given = _receive(self._socket)
            except OSError as error:
                _log.warning(
                    "%s has lost its connection to %s (%s), and tries for %.0f s to reach it again",
                    self.names[self.rank],
                    self.names[0],
                    sockets.reason_of(error),
                    self._patience,
                )
                self._socket.close()
                self._connect(self._patience)
                continue
            if found[0] == "error":
                raise RoundError(found[1])
            return found, given

    # Rank 0's end

    def _attend(self, connected: socket.socket, hello: Any) -> None:
        rank = hello.get("rank") if isinstance(hello, dict) else None
        if not isinstance(rank, int) or not 0 < rank < len(self.names):
            raise ValueError(f"Received: {hello}. Expected: a rank.")
        sockets.notice_end(connected)
        sockets.keep_from_children(connected)
        serve = functools.partial(self._serve, connected, rank)
        threading.Thread(target=serve, name=f"tfdist-rounds-{rank}", daemon=True).start()

    def _serve(self, connected: socket.socket, rank: int) -> None:
        before, self._connections[rank] = self._connections.get(rank), connected
        if before is not None:  # of a process that is gone, or was cut off
            with contextlib.suppress(OSError):
                before.shutdown(socket.SHUT_RDWR)
            self.rounds.left(rank)
        try:
            while True:
                said, arrays = _receive(connected)
                try:
                    _send(connected, *self._answer(rank, said, arrays))
                except RoundError as error:
                    _send(connected, ["error", str(error)], [])
        except (OSError, ValueError, LookupError, TypeError) as error:
            if not isinstance(error, OSError):
                _log.warning("Ended the connection of %s: %s", self.names[rank], error)
        finally:
            connected.close()
            if self._connections.get(rank) is connected:
                self.rounds.left(rank)

    def _answer(self, rank: int, said: list, arrays: list[np.ndarray]) -> tuple[list, list[np.ndarray]]:
        match said:
            case ["follow", [int(), int(), int()] as place]:
                found = self.rounds.follow(rank, tuple(place))
                return (["over"], []) if found is None else (["state", list(found[0])], found[1])
            case ["bring", [int(), int(), int()] as place, bool(stops), float(rows), list(kinds)]:
                total = self.rounds.bring(rank, _Brought(tuple(place), stops, rows, kinds, arrays))
                return (["over"], []) if total is None else (["sum", total.workers, total.stops], total.arrays)
            case ["share", str(name), value]:
                return ["shared", self.rounds.share(rank, name, value)], []
            case ["leave"]:
                self.rounds.left(rank, in_peace=True)
                raise ConnectionResetError("left")
        raise ValueError(f"Received: {str(said)[:80]}. Expected: follow, bring or share.")


_joined: Membership | None = None


def join_rounds(
    cluster: ClusterConfig, least: int, patience: float, start_timeout: float, timeout: float
) -> Membership:
    """Lets this process take part in the rounds of a job, once; see `Rounds` and `Membership` for the arguments.

    Raises:
        ClusterError: if rank 0 cannot be reached, or this process takes part in another job already.
    """
    global _joined
    if _joined is None:
        names = named(cluster, cluster.compute_tasks)
        rounds = Rounds(names, least, patience, start_timeout, timeout) if cluster.rank == 0 else None
        _joined = Membership(cluster, names, rounds, patience, start_timeout)
        atexit.register(_joined.leave)
    elif _joined.cluster != cluster:
        raise ClusterError(f"Received: {cluster}. Expected: {_joined.cluster}, of which this process is already.")
    return _joined


def _send(connected: socket.socket, said: list, arrays: Sequence[np.ndarray]) -> None:
    arrays = [np.asarray(one, order="C") for one in arrays]
    head = json.dumps([said, [[one.dtype.name, one.shape] for one in arrays]]).encode()
    connected.sendall(_LENGTH.pack(len(head)) + head)
    for one in arrays:
        connected.sendall(memoryview(one.reshape(-1).view(np.uint8)))


def _receive(connected: socket.socket) -> tuple[list, list[np.ndarray]]:
    (size,) = _LENGTH.unpack(_bytes(connected, _LENGTH.size))
    if size > _MOST_TEXT:
        raise ValueError(f"a text of {size} bytes")
    said, specifications = json.loads(_bytes(connected, size))
    arrays = []
    for name, shape in specifications:
        one = np.empty(shape, np.dtype(name))
        _fill(connected, memoryview(one.reshape(-1).view(np.uint8)))
        arrays.append(one)
    return said, arrays


def _bytes(connected: socket.socket, size: int) -> bytes:
    found = bytearray(size)
    _fill(connected, memoryview(found))
    return bytes(found)


def _fill(connected: socket.socket, into: memoryview) -> None:
    while into:
        if not (count := connected.recv_into(into)):
            raise ConnectionResetError("closed")
        into = into[count:]
