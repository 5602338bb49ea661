"""The server of the rendezvous, in the process of rank 0: it waits until all ranks have come, then sends the addresses.

client                                server
(challenges, see connections/handshake.py; then all that follows has codes)
registration                     -->
                                 <--  {"waiting for": [2, 3]}         now and then; the first of them
                                 <--  {"met": "..."}                  when all have come: the addresses, compressed
                                 <--  {"error": "..."}                when they cannot meet
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError

from tfdist.cluster import connections, sockets
from tfdist.cluster.connections import Connection
from tfdist.cluster.connections.compressed import pack
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.foreign_text import cleaned
from tfdist.cluster.reception import Guest, Reception
from tfdist.cluster.rendezvous.registration import Registration, agreed

_log = logging.getLogger("tfdist")
_NEWS_SECONDS = 5.0
_FAREWELL_SECONDS = 5.0
_LARGEST = 16 * 1024
_REGISTRATION_SECONDS = 30.0
_SHOWN = 20


class MeetingServer(Reception[Registration]):
    """Waits for the other ranks; where one may come again, it answers until the process ends.

    Args:
        own: Rank 0.
        ports: It takes the first one that is free.
        secret: The secret of the job.
        rejoin: Whether a process that is started again, while this one goes on, can take its former place.

    Attributes:
        port: Where it listens, on every interface.

    Raises:
        ClusterError: If none of the ports is free.
    """

    def __init__(self, own: Registration, ports: Sequence[int], secret: bytes, rejoin: bool = False):
        self._own, self._secret, self._rejoin = own, secret, rejoin
        self._result: dict | None = None
        for port in ports:
            # With SO_REUSEADDR it would take a port that another process has reserved. A port that a person has given
            # is taken even if connections of a process that died have not quite ended.
            with contextlib.suppress(OSError):
                super().__init__(sockets.bind_everywhere(port, reuse=len(ports) == 1), own.size, "tfdist-rendezvous")
                return
        raise ClusterError(
            f"Received: no free port among {', '.join(map(str, ports))}, where the other processes look for rank 0. "
            "Expected: a free one (`ss -ltn` shows who has them); or set TFDIST_PORTS to another range on all processes"
        )

    def meet(self, timeout: float) -> dict:
        """Waits until all have come, at most `timeout` seconds; returns as `tfdist.cluster.rendezvous.meet`.

        Raises:
            ClusterError: If a rank does not come; names it.
        """
        deadline = time.monotonic() + timeout
        told: list[int] = []
        while True:
            with self.changed:
                left = deadline - time.monotonic()
                self.changed.wait_for(lambda: self.all_present, max(0.0, min(left, _NEWS_SECONDS)))
                missing = self.missing()
                if not missing:
                    self._result = self._decide()
                    self.tell(self.present.values(), {"met": pack(self._result)})
                    break
                if left <= 0:
                    error = self._who_is_missing(missing, timeout)
                    self.tell(self.present.values(), {"error": error})
                    break
                self.tell(self.present.values(), {"waiting for": missing[:_SHOWN]}, is_news=True)
            if missing != told:
                told = missing
                waiting = (_ranks(missing), self._own.size, self._own, left)
                _log.warning("waiting for %s of %d processes (%s), at most %.0f s", *waiting)
        if self._result is None or not self._rejoin:
            self.stop_listening()
        self.farewell(_FAREWELL_SECONDS)
        if self._result is None or not self._rejoin:
            self.end()
        if self._result is None:
            raise ClusterError(error)
        return self._result

    def introduction(self, connection: Connection) -> tuple[int, Registration] | None:
        """See `Reception`."""
        reached = sockets.plain(str(connection.socket.getsockname()[0]))
        try:
            connections.authenticate(connection, self._secret, first=True)
            deadline = time.monotonic() + _REGISTRATION_SECONDS
            registration = connection.recv_bytes(_LARGEST, deadline)
        except connections.OtherVersionError as error:
            self._warn_of(f"somebody from {connection.peer}: {error}")
            raise
        except AuthenticationError as error:
            with self.changed:
                self.turn_away(f"somebody from {connection.peer}, who does not know the secret of this job ({error})")
            raise
        try:
            said = Registration.from_json(registration)
        except ValueError as error:
            problem = (
                f"somebody from {connection.peer} knows the secret of this job, but sends something else than this "
                f"version of tfdist does ({cleaned(error, 200)})"
            )
            self._warn_of(problem)
            remedy = "Expected: the same version of tfdist on every machine; install it"
            connections.send(connection, {"error": f"Received: {problem}. {remedy}"}, deadline)
            connection.poll(max(0.0, deadline - time.monotonic()))  # until it has read that
            raise
        said = dataclasses.replace(said, reached=reached)
        return said.rank, said

    def admit(self, guest: Guest[Registration]) -> None:
        """Lets a process wait with the others, or tells it, or the former one with that rank, why it cannot."""
        who = guest.said
        if who.size != self._own.size or not 0 < who.rank < self._own.size:
            self._refuse(guest, f"{who} counts {who.size} processes, {self._own} counts {self._own.size}")
        elif self._result is not None:
            # It was started again while this process was not: it gets its former place.
            self.tell([guest], {"met": pack({**self._result, "over": True})})
        else:
            if who.rank in self.present:
                before = self.present[who.rank]
                self._refuse(before, f"{before.said} and {who} have come with the same rank")
            self.present[who.rank] = guest

    def _refuse(self, guest: Guest[Registration], problem: str) -> None:
        self._warn_of(problem)
        remedy = "Expected: each rank once, and the same number everywhere; correct how the processes are started"
        self.tell([guest], {"error": f"Received: {problem}. {remedy}"})

    def _warn_of(self, problem: str) -> None:
        with self.changed:
            is_new = self.turn_away(problem)
        if is_new:
            _log.warning("turned away: %s", problem)

    def _decide(self) -> dict:
        others = [self.present[rank].said for rank in range(1, self._own.size)]
        everyone = [self._own, *others]
        places = agreed(self._own.address, {one.rank: (one.address, one.reached) for one in others})
        named = [one for one in everyone if one.host is not None]
        with ThreadPoolExecutor(max_workers=16) as pool:
            for one, known in zip(named, pool.map(sockets.is_known, [one.host for one in named]), strict=True):
                if known:
                    places[one.rank] = str(one.host)
        hosts = [places[one.rank] for one in everyone]
        return {
            "addresses": [sockets.join_address(host, one.port) for host, one in zip(hosts, everyone, strict=True)],
            "hosts": [f"{one.name} {host}" for host, one in zip(hosts, everyone, strict=True)],
            "devices": [one.devices for one in everyone],
        }

    def _who_is_missing(self, missing: list[int], timeout: float) -> str:
        came = ", ".join(str(self.present[rank].said) for rank in sorted(self.present)[:_SHOWN])
        refused = self.turned_away()
        here = f"{self._own}{', ' if came else ''}{came}"
        came_of_all = f"{self._own.size - len(missing)} of {self._own.size}"
        return (
            f"Received: {came_of_all} processes in {timeout:.3g} s: {here}{refused}. "
            f"Expected: {_ranks(missing)} as well, at port {self.port} of {self._own.name}. See what those have "
            "printed, and whether their hosts reach this one (a firewall? another network: TFDIST_INTERFACE, "
            "TFDIST_MEETING); after a failure all processes have to be started again"
        )


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
