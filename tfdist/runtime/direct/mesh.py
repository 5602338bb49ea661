"""Connects the processes of a job for `Exchange`: who shares memory with whom, and who talks to whom."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tfdist.cluster import sockets
from tfdist.cluster.connections.attempts import UnreachedError, keep_trying
from tfdist.cluster.connections.connection import Connection, framed, receive, send
from tfdist.cluster.connections.handshake import ENDS, authenticate
from tfdist.cluster.connections.listener import Listener
from tfdist.cluster.variables import TOKEN, text
from tfdist.runtime.direct.exchange import Connections, Exchange
from tfdist.runtime.direct.host_memory import HostMemory
from tfdist.runtime.direct.links import ExchangeError, Link
from tfdist.runtime.peers import Peers

_LARGEST_HELLO = 200
_MEMBER, _HOST, _RING = "member", "host", "ring"
_PURPOSE = "connect to the others"
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
    try:
        connections, problem = meeting.connections(), None
    except ExchangeError as error:
        connections, problem = None, [isinstance(error, _NotCalledError), str(error)]
    problems = [found for found in peers.gather("exchange done", problem, _PURPOSE) if found]
    meeting.end(keep_links=not problems)
    if problems:
        # A process that waits in vain to be called is only the consequence of one that cannot call.
        raise ExchangeError(min(problems)[1])
    return _Connected(connections, meeting)


class _NotCalledError(ExchangeError):
    """Another process has not connected to this one."""


class _Connected(Exchange):
    def __init__(self, connections: Connections, meeting: _Meeting) -> None:
        super().__init__(connections)
        self._meeting = meeting

    def close(self) -> None:
        super().close()
        self._meeting.end()


class _Meeting:
    def __init__(self, peers: Peers, host: str, seconds: float, lost: Callable[[], str]) -> None:
        self._peers = peers
        self._names, self._lost = peers.names, lost
        self._links: dict[tuple[int, str], Link] = {}
        self._arrived = threading.Condition()
        self._over = threading.Event()
        self._memory: HostMemory | None = None
        # Before anybody can connect.
        drawn = secrets.token_hex(32) if peers.rank == 0 else None
        shared = peers.gather("exchange secret", drawn, _PURPOSE)[0]
        # Who has reached TensorFlow's servers knows what they were told, but not the job's own secret.
        self._secret = hmac.digest(text(os.environ, TOKEN).encode(), shared.encode(), "sha256")
        own = {"host": host, "machine": _machine()}
        self._listener: Listener | None = None
        try:
            # A host's own name may mean an address that the others cannot reach.
            alone = sockets.is_loopback(host)
            bound = sockets.bind_host(host, 0) if alone else sockets.bind_everywhere(0, reuse=False)
            self._listener = Listener(bound, self._serve, "tfdist-exchange", guests=len(self._names))
            own["port"] = self._listener.port
        except OSError as error:
            own["problem"] = f"{self._names[peers.rank]} cannot listen at any port: {sockets.reason_of(error)}"
        self._told = peers.gather("exchange", own, _PURPOSE)
        # All are here now.
        self._deadline = time.monotonic() + seconds

    def connections(self) -> Connections:
        for one in self._told:
            if "problem" in one:
                raise ExchangeError(one["problem"])
        hosts = self._share_memory(_grouped([one["machine"] for one in self._told]))
        rank = self._peers.rank
        number = next(i for i, ranks in enumerate(hosts) if rank in ranks)
        ranks = hosts[number]
        found = Connections(
            place=ranks.index(rank),
            size=len(ranks),
            memory=self._memory,
            host=number,
            is_shared=any(len(ranks) > 1 for ranks in hosts),
            number_of_hosts=len(hosts),
            ranks=hosts,
        )
        if rank != ranks[0]:
            found.first = self._call(ranks[0], _MEMBER)
            return found
        heads = [one[0] for one in hosts]
        if len(hosts) > 1:
            # Everybody calls before anybody waits to be called.
            found.next = self._call(heads[(number + 1) % len(heads)], _RING)
            if number:
                found.root = self._call(heads[0], _HOST)
        found.members = [self._wait_for(other, _MEMBER) for other in ranks[1:]]
        if len(hosts) > 1:
            found.previous = self._wait_for(heads[number - 1], _RING)
            if not number:
                found.hosts = [self._wait_for(head, _HOST) for head in heads[1:]]
        return found

    def end(self, keep_links: bool = False) -> None:
        """Listens no longer; without links, ends what has connected to this process."""
        if not keep_links:
            self._over.set()
        if self._listener is not None:
            self._listener.close()

    def _share_memory(self, hosts: list[list[int]]) -> list[list[int]]:
        """The processes of each host; those that cannot see each other's memory are as on hosts of their own."""
        rank = self._peers.rank
        ranks = next(ranks for ranks in hosts if rank in ranks)
        if len(ranks) > 1 and rank == ranks[0]:
            # There may be none: `ulimit -f` limits it as it does files.
            with contextlib.suppress(OSError):
                self._memory = HostMemory(len(ranks))
        places = self._peers.gather("exchange memory", self._memory.place if self._memory else None, _PURPOSE)
        place = places[ranks[0]]
        if rank != ranks[0] and place is not None:
            with contextlib.suppress(OSError, ValueError):
                self._memory = HostMemory(len(ranks), place)
        all_see = self._peers.gather("exchange memory seen", self._memory is not None, _PURPOSE)
        if self._memory is not None:
            self._memory.hide()
        if not all(all_see[one] for one in ranks):
            self._memory = None
        found: list[list[int]] = []
        for ranks in hosts:
            found += [ranks] if all(all_see[one] for one in ranks) else [[one] for one in ranks]
        return found

    def _call(self, rank: int, role: str) -> Link:
        """Connects to another process."""
        place = self._told[rank]
        address = sockets.join_address(place["host"], place["port"])
        problems: dict[str, str] = {}

        def attempt(seconds: float) -> Connection:
            connection = framed(sockets.connect((place["host"], place["port"]), seconds))
            try:
                authenticate(connection, self._secret, first=False, seal=False, deadline=self._deadline)
                send(connection, {"rank": self._peers.rank, "role": role}, self._deadline)
            except ENDS as error:
                connection.close()
                raise UnreachedError(sockets.reason_of(error)) from None
            return connection

        try:
            connection = keep_trying({address: attempt}, self._deadline, problems)
        except UnreachedError:
            raise ExchangeError(
                f"{self._names[self._peers.rank]} cannot connect to {self._names[rank]} at {address}: "
                f"{problems.get(address, 'timed out')}. Processes exchange gradients there, at a port that the system "
                "chooses: let it through between the hosts of the job, or use transport='tensorflow'"
            ) from None
        return self._link(connection.socket, rank)

    def _serve(self, connection: Connection) -> None:
        deadline = time.monotonic() + _SECONDS
        authenticate(connection, self._secret, first=True, seal=False, deadline=deadline)
        hello = receive(connection, _LARGEST_HELLO, deadline)
        rank, role = hello.get("rank"), hello.get("role")
        if not isinstance(rank, int) or not 0 <= rank < len(self._names) or role not in (_MEMBER, _HOST, _RING):
            raise ValueError(f"Received: {hello}. Expected: a rank and a role.")
        with self._arrived:
            self._links[rank, role] = self._link(connection.socket, rank)
            self._arrived.notify_all()
        # When this returns, the listener closes the connection.
        self._over.wait()

    def _wait_for(self, rank: int, role: str) -> Link:
        """Waits until another process has connected to this one."""
        with self._arrived:
            left = self._deadline - time.monotonic()
            if not self._arrived.wait_for(lambda: (rank, role) in self._links, max(0.0, left)):
                raise _NotCalledError(f"{self._names[rank]} has not connected to {self._names[self._peers.rank]}")
            return self._links[rank, role]

    def _link(self, connected: socket.socket, rank: int) -> Link:
        return Link(connected, self._names[rank], self._peers.timeout, self._lost)


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


def _machine() -> str:
    """The same for processes that can open each other's files below /proc: of one user, in one kernel and container.

    Those that have a network each are apart as on hosts of their own: who cuts the network means to part them.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net")]
    except OSError:
        return secrets.token_hex(16)
    return hashlib.sha256(f"{boot} {spaces} {os.getuid()}".encode()).hexdigest()
