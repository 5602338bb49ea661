"""The meeting point, in the process of rank 0: it waits until all ranks have come, and tells all of them the addresses.

client                                server
(challenges, see authentication.py)
entry                            -->
                                 <--  {"waiting for": [2, 3]}         now and then
                                 <--  {"addresses": [...], ...}       when all have come
                                 <--  {"error": "..."}                or never will
                                 <--  {"under way": true}             when they have, and it comes again
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

from tfdist.cluster import sockets
from tfdist.cluster.authentication import ENDS, authenticate
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.listener import Listener
from tfdist.cluster.rendezvous.addresses import agreed, plain
from tfdist.cluster.rendezvous.entry import Entry

_log = logging.getLogger("tfdist")
_NEWS_SECONDS = 5.0
_FAREWELL_SECONDS = 2.0
_SHOWN = 20


@dataclasses.dataclass
class _Guest:
    """A process that has come, and waits."""

    entry: Entry
    connection: Connection
    reached: str  # the address at which it has reached this process


class MeetingServer:
    """Waits for the other ranks, and goes on to serve those that are started again, until the process ends.

    Args:
        own: rank 0.
        ports: one of which it takes.
        secret: what the processes know.
        rejoin: whether a process that is started again, while this one goes on, can take its former place.

    Attributes:
        port: where it listens, on every interface.

    Raises:
        ClusterError: if none of the ports is free.
    """

    def __init__(self, own: Entry, ports: Sequence[int], secret: bytes, rejoin: bool = False):
        self._own, self._secret, self._rejoin = own, secret, rejoin
        self._guests: dict[int, _Guest] = {}
        self._turned_away: list[str] = []
        self._result: dict | None = None
        self._changed = threading.Condition()
        self._listener = self._listen(ports)
        self.port: int = self._listener.port
        self._listener.start()

    def meet(self, timeout: float) -> dict:
        """Waits for all.

        Args:
            timeout: how long, in seconds.

        Returns:
            As `tfdist.cluster.rendezvous.meet`.

        Raises:
            ClusterError: if a rank does not come; names it.
        """
        deadline = time.monotonic() + timeout
        told: list[int] = []
        while True:
            with self._changed:
                left = deadline - time.monotonic()
                if self._changed.wait_for(lambda: not self._missing(), max(0.0, min(left, _NEWS_SECONDS))):
                    self._drop_gone()
                if not self._missing():
                    self._result = self._decide()
                    self._tell(self._result)
                    _see_off(list(self._guests.values()))
                    self._guests.clear()
                    return self._result
                self._drop_gone()
                missing = self._missing()
                if left <= 0:
                    error = self._who_is_missing(missing, timeout)
                    self._tell({"error": error})
                    self.close()
                    raise ClusterError(error)
                self._tell({"waiting for": missing})
            if missing != told:
                told = missing
                _log.warning(
                    "waiting for %s of %d processes (%s), at most %.0f s",
                    _ranks(missing),
                    self._own.size,
                    self._own,
                    left,
                )

    def close(self) -> None:
        """Stops listening."""
        self._listener.close()

    def _listen(self, ports: Sequence[int]) -> Listener:
        for port in ports:
            # With SO_REUSEADDR it would take a port that another process has reserved; one that a person has given is
            # taken even if connections of a process that died have not quite ended.
            with contextlib.suppress(OSError):
                bound = sockets.bind_everywhere(port, reuse=len(ports) == 1)
                return Listener(bound, self._receive, "tfdist-rendezvous")
        raise ClusterError(
            f"Received: no free port among {', '.join(map(str, ports))}, where the other processes look for rank 0. "
            "Expected: a free one (`ss -ltn` shows who has them); or set TFDIST_PORTS to another range on all processes"
        )

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self._own.size) if rank not in self._guests]

    def _receive(self, accepted: socket.socket) -> None:
        with contextlib.suppress(*ENDS, ValueError):
            reached, stranger = plain(accepted.getsockname()[0]), plain(accepted.getpeername()[0])
            try:
                connection = authenticate(accepted, self._secret, first=True)
            except AuthenticationError:
                self._turned_away.append(f"somebody from {stranger}, who does not know the secret of this job")
                return
            entry = Entry.from_json(connection.recv_bytes())
            with self._changed:
                dismissed = self._admit(_Guest(entry, connection, reached))
            if dismissed is not None:
                _see_off([dismissed])

    def _admit(self, guest: _Guest) -> _Guest | None:
        """Lets a process wait with the others; returns who is told to leave."""
        entry = guest.entry
        if entry.size != self._own.size or not 0 < entry.rank < self._own.size:
            self._refuse(guest, f"{entry} counts {entry.size} processes, {self._own} counts {self._own.size}")
            return guest
        if self._result is not None:
            # It was started again while this process was not: it may have the place that it had, or waits for the
            # end of this process, after which all meet anew.
            _send(guest, {**self._result, "over": True} if self._rejoin else {"under way": True})
            return guest
        before = self._guests.get(entry.rank)
        self._guests[entry.rank] = guest
        self._changed.notify_all()
        if before is not None and _is_there(before):
            self._refuse(before, f"{before.entry} and {entry} have come with the same rank")
        return before

    def _refuse(self, guest: _Guest, problem: str) -> None:
        self._turned_away.append(problem)
        _log.warning("turned away: %s", problem)
        remedy = "Expected: each rank once, and the same number everywhere; correct how the processes are started"
        _send(guest, {"error": f"Received: {problem}. {remedy}"})

    def _drop_gone(self) -> None:
        """Forgets those whose connection has ended: they come again, or not at all."""
        for rank, guest in list(self._guests.items()):
            if not _is_there(guest):
                del self._guests[rank]
                guest.connection.close()

    def _tell(self, message: dict) -> None:
        data = json.dumps(message).encode()
        for rank, guest in list(self._guests.items()):
            try:
                guest.connection.send_bytes(data)
            except OSError:
                del self._guests[rank]

    def _decide(self) -> dict:
        guests = [self._guests[rank] for rank in range(1, self._own.size)]
        entries = [self._own, *(guest.entry for guest in guests)]
        places = agreed(self._own.address, {guest.entry.rank: (guest.entry.address, guest.reached) for guest in guests})
        named = [entry for entry in entries if entry.host is not None]
        with ThreadPoolExecutor(max_workers=16) as pool:
            for entry, known in zip(named, pool.map(_is_known, [entry.host for entry in named]), strict=True):
                if known:
                    places[entry.rank] = str(entry.host)
        hosts = [places[entry.rank] for entry in entries]
        return {
            "addresses": [
                f"[{host}]:{entry.port}" if ":" in host else f"{host}:{entry.port}"
                for host, entry in zip(hosts, entries, strict=True)
            ],
            "hosts": [f"{entry.name} {host}" for host, entry in zip(hosts, entries, strict=True)],
            "devices": [entry.devices for entry in entries],
        }

    def _who_is_missing(self, missing: list[int], timeout: float) -> str:
        came = ", ".join(str(guest.entry) for _, guest in sorted(self._guests.items())[:_SHOWN])
        refused = "".join(f"; turned away: {problem}" for problem in dict.fromkeys(self._turned_away))
        here = f"{self._own}{', ' if came else ''}{came}"
        came_of_all = f"{self._own.size - len(missing)} of {self._own.size}"
        return (
            f"Received: {came_of_all} processes in {timeout:.3g} s: {here}{refused}. "
            f"Expected: {_ranks(missing)} as well, at port {self.port} of {self._own.name}. See what those have "
            "printed, and whether their hosts reach this one (a firewall? another network: TFDIST_INTERFACE, "
            "TFDIST_MEETING); after a failure all processes have to be started again"
        )


def _send(guest: _Guest, message: dict) -> None:
    with contextlib.suppress(OSError):
        guest.connection.send_bytes(json.dumps(message).encode())


def _see_off(guests: Sequence[_Guest]) -> None:
    """Closes connections, after the other end has, or after a while.

    Whoever closes first keeps the port for a minute: that of rank 0 may be needed again before.
    """
    deadline = time.monotonic() + _FAREWELL_SECONDS
    for guest in guests:
        with contextlib.suppress(OSError):
            guest.connection.poll(max(0.0, deadline - time.monotonic()))
        guest.connection.close()


def _is_there(guest: _Guest) -> bool:
    with contextlib.suppress(OSError):
        return not guest.connection.poll(0)
    return False


def _is_known(host: str | None) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return False
    return True


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
