"""Rank 0's side of a meeting: each of the others introduces itself once, then waits for what rank 0 tells."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

from tfdist.cluster import connections

Said = TypeVar("Said")
# A process that was stopped (SIGSTOP) takes nothing; the others need not wait for it.
_SEND_SECONDS = 5.0


@dataclass(eq=False)
class Guest(Generic[Said]):
    """A process that has introduced itself, and how."""

    connection: Connection
    rank: int
    said: Said


class Reception(Generic[Said]):
    """Receives the other processes on a bound socket, each in a thread; the barrier and the rendezvous are subclasses.

    Attributes:
        changed: Guards what follows, and is notified when somebody comes or leaves.
        guests: Everybody who is there.
        present: Those of them who are let in, by rank.
        left_at: When a rank has left that was let in.
        port: Where it listens.
    """

    def __init__(self, bound: socket.socket, size: int, name: str):
        self.changed = threading.Condition()
        self.guests: set[Guest[Said]] = set()
        self.present: dict[int, Guest[Said]] = {}
        self.left_at: dict[int, float] = {}
        self._size = size
        self._listener = connections.Listener(bound, self._receive, name)
        self.port: int = self._listener.port

    def introduction(self, connection: Connection) -> tuple[int, Said] | None:
        """Reads rank and introduction of a process; `None`, or one of `connections.ENDS`, if it is a stranger."""
        raise NotImplementedError

    def admit(self, guest: Guest[Said]) -> None:
        """Lets a process in, or not; called with the lock held."""
        raise NotImplementedError

    def missing(self) -> list[int]:
        """The ranks that are not there."""
        return [rank for rank in range(1, self._size) if rank not in self.present]

    def tell(self, guests: Iterable[Guest[Said]], message: dict) -> None:
        """Sends a message to each that is not gone. Called with the lock held.

        Who does not take it is sent away, because a part of it may be on its way.
        """
        data = json.dumps(message).encode()
        for guest in list(guests):
            try:
                guest.connection.send_bytes(data)
            except OSError:
                with contextlib.suppress(OSError), connections.socket_of(guest.connection) as same:
                    same.shutdown(socket.SHUT_RDWR)  # wakes its thread
                self._let_out(guest)

    def wait_until_left(self, seconds: float) -> None:
        """Waits until all have closed their connections, because the port stays taken at the end that closes first."""
        with self.changed:
            self.changed.wait_for(lambda: not self.guests, seconds)

    def stop_listening(self) -> None:
        """Lets nobody in any more."""
        self._listener.close()

    def end(self) -> None:
        """Stops listening, and ends all connections: the port is free on return."""
        self._listener.end()

    def _receive(self, connection: Connection) -> None:
        introduction = self.introduction(connection)
        if introduction is None:
            return
        connections.limit_sends(connection, _SEND_SECONDS)
        guest = Guest(connection, *introduction)
        with self.changed:
            if _has_left(guest):  # its introduction was read after its end, perhaps after that of its successor
                return
            before = self.present.get(guest.rank)
            if before is not None and _has_left(before):  # the thread that serves it has not noticed yet
                self._let_out(before)
            self.guests.add(guest)
            self.admit(guest)
            self.changed.notify_all()
        try:
            connection.recv_bytes()  # it says nothing more: this ends with the connection
        finally:
            with self.changed:
                self.guests.discard(guest)
                self._let_out(guest)
                self.changed.notify_all()

    def _let_out(self, guest: Guest[Said]) -> None:
        if self.present.get(guest.rank) is guest:
            del self.present[guest.rank]
            self.left_at[guest.rank] = time.monotonic()


def _has_left(guest: Guest) -> bool:
    # It says nothing more: what there is to read is the end.
    return guest.connection.poll()
