"""The chief's part of the barrier: it listens at its own address, and lets everybody go when all are there."""

from __future__ import annotations

import errno
import logging
import math
import socket
import time
from multiprocessing.connection import Connection

import tfdist.cluster.barrier.messages as messages
from tfdist.cluster import connections, sockets
from tfdist.cluster.barrier.messages import BarrierTimeoutError
from tfdist.cluster.config import ClusterConfig, Task
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.reception import Guest, Reception

_LOG = logging.getLogger("tfdist")
_BIND_SECONDS = 5.0  # a process of an earlier run may need a moment to end
_FAREWELL_SECONDS = 5.0
_TICK = 0.5
_SAME_TIMEOUT = 0.5  # tasks that were started together give up together, some of them before the chief
_LATECOMERS_SECONDS = 3.0  # tasks that were started together come one after the other; all are told what is wrong


class Chief(Reception[dict]):
    """One barrier; it listens from now on. `run` it once."""

    def __init__(self, config: ClusterConfig, members: tuple[Task, ...], info: dict, timeout: float) -> None:
        self._config = config
        self._members = members
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._own = messages.hello(config, info, rank=0)
        self._problems: list[str] = []
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
        connections.send(connection, messages.banner())
        with connections.patience(connection, messages.HELLO_SECONDS):
            said = connections.receive(connection, messages.MAX_BYTES)
        if not messages.is_hello(said):
            return None
        fits = 0 <= said["rank"] < len(self._members)
        return (said["rank"], said) if fits or messages.disagreements(self._own, said) else None

    def admit(self, guest: Guest[dict]) -> None:
        """Lets a task wait with the others, or notes why they cannot train together."""
        said = guest.said
        found = messages.disagreements(self._own, said)
        self._problems += [problem for problem in found if problem not in self._problems]
        if self._problems:
            return
        rank = guest.rank
        before = self._own if rank == 0 else self.present[rank].said if rank in self.present else None
        if before is not None and before["token"] != said["token"]:
            self._problems.append(
                f"two processes claim the same task {said['task']}: {before['process']} and {said['process']}; "
                "give each process its own task index"
            )
        elif rank > 0:
            self.present[rank] = guest
            self.tell([guest], {"waiting": self._absent()})

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
                said = {"go": infos}
            self.stop_listening()  # whoever comes now is too late, and sees it at once
            self.tell(self.guests, said)
        self.wait_until_left(_FAREWELL_SECONDS)
        if error:
            raise error
        return infos

    def _wait(self) -> str:
        """Waits until all are present, or some do not fit together; returns the error if some are late."""
        announced = time.monotonic()
        note_at = announced + messages.WAIT_NOTE_SECONDS
        known: list[str] = []
        while self.missing() and not self._problems:
            now = time.monotonic()
            absent = self._absent()
            if now >= self._deadline:
                return messages.missing(self._absent(since=now - _SAME_TIMEOUT) or absent, self._timeout)
            if now >= note_at:
                _LOG.warning(messages.waiting(absent, self._timeout))
                note_at = now + messages.WAIT_AGAIN_SECONDS
            if absent != known and now - announced >= _TICK:  # so that each task can name the missing ones itself
                self.tell(self.present.values(), {"waiting": absent})
                known, announced = absent, now
            self.changed.wait(min(_TICK, self._deadline - now))
        return ""

    def _absent(self, since: float = math.inf) -> list[str]:
        absent = [self._members[rank] for rank in self.missing() if self.left_at.get(rank, 0.0) <= since]
        return messages.named(self._config, absent)
