"""Rank 0's side of a meeting: each of the others introduces itself once, then waits for what rank 0 tells."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from tfdist.cluster import connections
from tfdist.cluster.connections import Connection
from tfdist.cluster.connections.open_files import hard_limit, make_room
from tfdist.cluster.errors import ClusterError

Said = TypeVar("Said")
# How long whoever is told something at once, and then sent away, may take to read it.
_READ_SECONDS = 5.0
_FLUSH_SECONDS = 0.5
_KINDS = 8


@dataclass(eq=False)
class Guest(Generic[Said]):
    """A process that has introduced itself, and how."""

    connection: Connection
    rank: int
    said: Said


class Reception(Generic[Said]):
    """Receives the other processes on a bound socket, each in a thread; the barrier and the rendezvous are subclasses.

    Nothing that is done with the lock held waits for a guest: what one does not take at once is sent when it can be.

    Attributes:
        changed: Guards what follows, and is notified when somebody comes or leaves.
        guests: Everybody who is there.
        present: Those of them who are let in, by rank.
        left_at: When a rank has left that was let in.
        port: Where it listens.

    Raises:
        ClusterError: If this process may not open as many files as there are processes.
        OSError: If another process listens there.
    """

    def __init__(self, bound: socket.socket, size: int, name: str):
        self.changed = threading.Condition()
        self.guests: set[Guest[Said]] = set()
        self.present: dict[int, Guest[Said]] = {}
        self.left_at: dict[int, float] = {}
        self._size = size
        self._turned_away: dict[str, int] = {}
        self._unheard = 0
        room = make_room(size)
        if room < size:
            bound.close()
            raise ClusterError(
                f"Received: a limit of {hard_limit()} open files for rank 0, which can open {max(0, room)} more. "
                f"Expected: one for each of {size} processes. Raise the hard limit of this process to "
                f"{hard_limit() + size - room} or more: `ulimit -Hn` shows it; it is set in "
                "/etc/security/limits.conf (nofile), by LimitNOFILE= of a systemd service, by `docker run --ulimit "
                "nofile=`, for Slurm by PropagateResourceLimits"
            )
        self._listener = connections.Listener(bound, self._receive, name, guests=size)
        self.port: int = self._listener.port

    def introduction(self, connection: Connection) -> tuple[int, Said] | None:
        """Reads rank and introduction of a process.

        `None` for a stranger; or one of `connections.ENDS`, or a ValueError, is raised.
        """
        raise NotImplementedError

    def admit(self, guest: Guest[Said]) -> None:
        """Lets a process in, or not; called with the lock held."""
        raise NotImplementedError

    def consider(self, guest: Guest[Said]) -> None:
        """What takes longer, about a process that was not let in; called without the lock."""

    def missing(self) -> list[int]:
        """The ranks that are not there."""
        return [rank for rank in range(1, self._size) if rank not in self.present]

    @property
    def all_present(self) -> bool:
        """Whether no rank is missing."""
        return len(self.present) >= self._size - 1

    def tell(self, guests: Iterable[Guest[Said]], message: dict, is_news: bool = False) -> None:
        """Sends a message to each, without waiting for any; called with the lock held.

        Args:
            guests: To whom.
            message: What.
            is_news: Whether somebody who has not taken what came before can do without it.
        """
        data = json.dumps(message).encode()
        for guest in list(guests):
            if not (is_news and guest.connection.pending):
                with contextlib.suppress(OSError):  # it is gone, which its thread notices
                    guest.connection.post(data)

    def turn_away(self, problem: str) -> bool:
        """Counts somebody who does not belong here; whether it is the first with this problem. Needs the lock.

        However many come, and whatever they say, only a few problems are kept.
        """
        known = problem in self._turned_away
        if not known and len(self._turned_away) >= _KINDS:
            problem, known = "others", "others" in self._turned_away
        self._turned_away[problem] = self._turned_away.get(problem, 0) + 1
        return not known

    def turned_away(self) -> str:
        """Who was turned away, for a message: empty, or "; turned away: ..."."""
        with self.changed:
            problems = [f"{one} ({count} times)" if count > 1 else one for one, count in self._turned_away.items()]
        if self._unheard:
            dropped = f" ({self._listener.dropped} of them cut off to let others in)" if self._listener.dropped else ""
            problems.append(f"{self._unheard} connections that did not introduce themselves{dropped}")
        return "".join(f"; turned away: {problem}" for problem in problems)

    def farewell(self, seconds: float, to_all: bool = False) -> None:
        """Waits until those who are present have taken what they were told, and have left.

        The port stays taken at the end of a connection that closes first. Whoever has not left is sent away.

        Args:
            seconds: How long to wait.
            to_all: Whether to wait for those as well who were not let in.
        """
        deadline = time.monotonic() + seconds
        whom = self.guests if to_all else self.present
        while (left := deadline - time.monotonic()) > 0:
            with self.changed:
                pending = [guest.connection for guest in self.guests if guest.connection.pending]
                if not pending:
                    self.changed.wait_for(lambda: not whom, left)
                    break
            connections.drain(pending, time.monotonic() + min(left, _FLUSH_SECONDS))
        with self.changed:
            for guest in self.guests:
                guest.connection.shutdown()  # wakes its thread

    def stop_listening(self) -> None:
        """Lets nobody in any more."""
        self._listener.close()

    def end(self) -> None:
        """Stops listening, and ends all connections: the port is free on return."""
        self._listener.end()

    def _receive(self, connection: Connection) -> None:
        try:
            introduction = self.introduction(connection)
        except (OSError, EOFError):
            with self.changed:
                self._unheard += 1
            raise
        if introduction is None:
            with self.changed:
                self.turn_away(f"somebody from {connection.peer} who is no task of this job")
            return
        guest = Guest(connection, *introduction)
        with self.changed:
            if _has_left(guest):  # its introduction was read after its end, perhaps after that of its successor
                return
            before = self.present.get(guest.rank)
            if before is not None and _has_left(before):  # the thread that serves it has not noticed yet
                self.let_out(before)
            self.guests.add(guest)
            self.admit(guest)
            connection.known = self.present.get(guest.rank) is guest
            self.changed.notify_all()
        try:
            self.consider(guest)
            connections.drain([connection], time.monotonic() + _READ_SECONDS)
            # It says nothing more: this ends with the connection.
            connection.poll(None if connection.known else _READ_SECONDS)
        finally:
            with self.changed:
                self.guests.discard(guest)
                self.let_out(guest)
                self.changed.notify_all()

    def let_out(self, guest: Guest[Said]) -> None:
        """Notes that somebody has left; called with the lock held."""
        if self.present.get(guest.rank) is guest:
            del self.present[guest.rank]
            self.left_at[guest.rank] = time.monotonic()


def _has_left(guest: Guest) -> bool:
    # It says nothing more: what there is to read is the end.
    return guest.connection.poll()
