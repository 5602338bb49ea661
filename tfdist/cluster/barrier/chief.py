"""The chief's part of the barrier: it listens at its own address, and lets everybody go when all are there.

Strangers can reach that address. With TFDIST_TOKEN, or a secret of the rendezvous, only those who know it are heard.
Without, nothing but its address tells a task from a stranger, so what somebody says can end the job only if it comes
from a host of the cluster. Anybody else is told what is wrong, counted and sent away, and the chief goes on waiting.
"""

from __future__ import annotations

import errno
import logging
import math
import socket
import time
from multiprocessing import AuthenticationError

import tfdist.cluster.barrier.messages as messages
from tfdist.cluster import connections, sockets
from tfdist.cluster.barrier.hosts import Hosts
from tfdist.cluster.barrier.messages import BarrierTimeoutError
from tfdist.cluster.config import ClusterConfig, Task
from tfdist.cluster.connections import Connection
from tfdist.cluster.connections.compressed import pack
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.reception import Guest, Reception

_LOG = logging.getLogger("tfdist")
_BIND_SECONDS = 5.0  # a process of an earlier run may need a moment to end
_FAREWELL_SECONDS = 5.0
_TICK = 0.5
_TOLD_EACH_SECOND = 200  # how many tasks are told, at most, who is missing
_SAME_TIMEOUT = 0.5  # tasks that were started together give up together, some of them before the chief
_LATECOMERS_SECONDS = 3.0  # tasks that were started together come one after the other; all are told what is wrong


class Chief(Reception[dict]):
    """One barrier; it listens from now on. `run` it once."""

    def __init__(
        self,
        config: ClusterConfig,
        members: tuple[Task, ...],
        info: dict,
        timeout: float,
        secret: bytes | None = None,
    ) -> None:
        self._config = config
        self._members = members
        self._timeout = timeout
        self._secret = secret
        self._deadline = time.monotonic() + timeout
        self._own = messages.hello(config, info, rank=0)
        self._problems: list[str] = []
        self._hosts = Hosts(config, self._deadline)
        self._doubts: dict[Guest[dict], list[str]] = {}
        until = min(self._deadline, time.monotonic() + _BIND_SECONDS)
        while True:
            try:
                super().__init__(self._bind(), len(members), "tfdist-barrier")
                return
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                    raise ClusterError(
                        f"{self._own['task']} cannot listen on its address {config.chief_address}: "
                        f"{error.strerror}; another process listens there or claims the same task: stop it, or choose "
                        "another port"
                    ) from error
                time.sleep(0.1)

    def run(self) -> dict[int, dict]:
        """Waits for everybody; see `tfdist.cluster.barrier.meet`."""
        try:
            return self._gather()
        finally:
            self.end()

    def introduction(self, connection: Connection) -> tuple[int, dict] | None:
        """See `Reception`."""
        deadline = time.monotonic() + messages.HELLO_SECONDS
        connections.send(connection, messages.banner(self._secret is not None), deadline)
        if self._secret is not None:
            try:
                connections.authenticate(connection, self._secret, first=True)
            except connections.OtherVersionError as error:
                self._warn_of(f"somebody from {connection.peer}: {error}")
                raise
            except AuthenticationError:
                unknown = "who does not know this job's TFDIST_TOKEN, or the secret of its rendezvous"
                self._warn_of(f"somebody from {connection.peer} {unknown}", ": it has to be the same on all tasks")
                raise
        said = messages.read_hello(connections.receive(connection, messages.MAX_BYTES, deadline))
        if said is None:
            return None
        fits = 0 <= said["rank"] < len(self._members)
        return (said["rank"], said) if fits or messages.disagreements(self._own, said) else None

    def admit(self, guest: Guest[dict]) -> None:
        """Lets a task wait with the others, or notes why they cannot train together."""
        if self._problems:
            return
        said, rank = guest.said, guest.rank
        found = messages.disagreements(self._own, said)
        before = self._own if rank == 0 else self.present[rank].said if rank in self.present else None
        if not found and before is not None and before["token"] != said["token"]:
            found = [
                f"two processes claim the same task {said['task']}: {before['process']} and {said['process']}; "
                "give each process its own task index"
            ]
        if found:
            self._doubts[guest] = found
        elif rank > 0:
            self.present[rank] = guest
            self.tell([guest], self._news(self._absent()), is_news=True)

    def consider(self, guest: Guest[dict]) -> None:
        """Decides about a task that does not fit: it ends the job, unless it may be a stranger."""
        with self.changed:
            problems = self._doubts.get(guest)
            rival = self.present.get(guest.rank)
        if problems is None:
            return
        try:
            self._decide(guest, problems, rival)
        finally:
            with self.changed:
                del self._doubts[guest]  # only now: until then nobody goes
                self.changed.notify_all()

    def _decide(self, guest: Guest[dict], problems: list[str], rival: Guest[dict] | None) -> None:
        clashes = not messages.disagreements(self._own, guest.said)
        is_ours = self._belongs(guest)
        rival_is_ours = rival is not None and clashes and self._belongs(rival)
        with self.changed:
            found = self.present.get(guest.rank)
            if clashes and guest.rank > 0 and (found is None or (is_ours and found is rival and not rival_is_ours)):
                self.present[guest.rank] = guest  # who had its place is a stranger, or gone
                guest.connection.known = True
                if found is not None:
                    self._send_away(found, problems)
            elif is_ours and (not clashes or guest.rank == 0 or rival_is_ours):
                self._problems += [problem for problem in problems if problem not in self._problems]
            else:
                self._send_away(guest, problems)

    def _warn_of(self, stranger: str, remedy: str = "") -> None:
        with self.changed:
            is_new = self.turn_away(stranger)
        if is_new:
            _LOG.warning("tfdist: turned away %s%s", stranger, remedy)

    def _send_away(self, stranger: Guest[dict], problems: list[str]) -> None:
        peer = stranger.connection.peer
        if self.turn_away(f"somebody from {peer}, which is no host of this cluster ({problems[0]})"):
            _LOG.warning("tfdist: turned away somebody from %s, no host of this cluster: %s", peer, problems[0])
        self.tell([stranger], {"error": problems})

    def _belongs(self, guest: Guest[dict]) -> bool:
        return self._secret is not None or self._hosts.include(guest.connection.peer)

    def _bind(self) -> socket.socket:
        host, port = sockets.split_address(self._config.chief_address)
        # A cluster on one machine needs no port that is open to the network. Otherwise the host name may stand for
        # another address here than elsewhere, so listen on all addresses, as TensorFlow does.
        if sockets.is_loopback(host):
            return sockets.bind_host(host, port)
        return sockets.bind_everywhere(port, reuse=True)

    def _gather(self) -> dict[int, dict]:
        error: ClusterError | None = None
        with self.changed:
            late = self._wait()
            infos = {0: self._own["info"], **{rank: self.present[rank].said["info"] for rank in sorted(self.present)}}
            if self._problems:
                # Those who come later would find no chief.
                left = max(0.0, min(self._deadline - time.monotonic(), _LATECOMERS_SECONDS))
                self.changed.wait_for(lambda: len(self.guests) >= len(self._members) - 1, left)
                said, error = {"error": self._problems}, ClusterError(self._problems)
            elif late:
                said, error = {"timeout": [late]}, BarrierTimeoutError(late)
            else:
                said = {"go": pack(infos)}
            self.stop_listening()  # whoever comes now is too late, and sees it at once
            self.tell(self.present.values() if "go" in said else self.guests, said)
        self.farewell(_FAREWELL_SECONDS, to_all=bool(self._problems))
        if error:
            raise error
        return infos

    def _wait(self) -> str:
        """Waits until all are present, or some do not fit together; returns the error if some are late."""
        announced = time.monotonic()
        note_at = announced + messages.WAIT_NOTE_SECONDS
        news_seconds = max(_TICK, len(self._members) / _TOLD_EACH_SECOND)
        known: tuple[list[Task], int] = [], 0
        while not self._problems and not (self.all_present and not self._doubts):
            now = time.monotonic()
            if now >= self._deadline:
                if self.all_present:
                    break
                late = self._named(self._absent(since=now - _SAME_TIMEOUT) or self._absent())
                return messages.missing(late, self._timeout) + self.turned_away()
            if now >= note_at:
                _LOG.warning(messages.waiting(self._named(self._absent()), self._timeout) + self.turned_away())
                note_at = now + messages.WAIT_AGAIN_SECONDS
            seen = self._absent(), len(self._turned_away)  # not how many there were: that may change all the time
            if now - announced >= news_seconds and seen != known:
                # So that each task can name the missing ones itself.
                self.tell(self.present.values(), self._news(self._absent()), is_news=True)
                known, announced = seen, now
            self.changed.wait(min(_TICK, self._deadline - now))
        return ""

    def _absent(self, since: float = math.inf) -> list[Task]:
        return [self._members[rank] for rank in self.missing() if self.left_at.get(rank, 0.0) <= since]

    def _named(self, tasks: list[Task]) -> list[str]:
        return messages.named(self._config, tasks)

    def _news(self, absent: list[Task]) -> dict:
        shown = self._named(absent[: messages.NAMES])
        return {"waiting": shown, "more": len(absent) - len(shown), "turned away": self.turned_away()}
