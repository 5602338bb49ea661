"""The chief's side of the roll call: it listens, and lets everybody go when all are there."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import selectors
import socket
import time

from tfdist.cluster import address, sockets
from tfdist.cluster import roll_call_message as message
from tfdist.cluster.config import ClusterConfig, Task
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.roll_call_message import RollCallTimeout

_LOG = logging.getLogger("tfdist")
_BIND_SECONDS = 5.0  # a process of an earlier run may need a moment to end
_FAREWELL_SECONDS = 5.0
_TICK = 0.5
_SAME_TIMEOUT = 0.5  # tasks that are started together give up together, some of them before the chief
_LATECOMERS_SECONDS = 3.0  # tasks that are started together come one after the other, and all are to hear what is wrong


class _Guest:
    """A connection, from a worker or from a stranger; `hello` tells."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.deadline = time.monotonic() + message.HELLO_SECONDS
        self.received = b""
        self.to_send = b""
        self.hello: dict | None = None


class Chief:
    """One roll call; `run` it once."""

    def __init__(
        self, config: ClusterConfig, members: tuple[Task, ...], info: dict, timeout: float, deadline: float
    ) -> None:
        self._config = config
        self._members = members
        self._timeout = timeout
        self._deadline = deadline
        self._own = message.hello(config, info, rank=0)
        self._guests: dict[socket.socket, _Guest] = {}
        self._present: dict[int, _Guest] = {}
        self._left_at: dict[int, float] = {}
        self._selector = selectors.DefaultSelector()
        self._problems: list[str] = []

    def run(self) -> dict[int, dict]:
        """Waits for everybody; see `tfdist.cluster.roll_call.meet`."""
        with self._selector, self._listen() as self._listener:
            self._selector.register(self._listener, selectors.EVENT_READ)
            try:
                return self._gather()
            finally:
                for guest in list(self._guests.values()):
                    self._drop(guest)

    def _listen(self) -> socket.socket:
        host, port = address.split(self._config.chief_address)
        until = min(self._deadline, time.monotonic() + _BIND_SECONDS)
        while True:
            try:
                # A cluster on one machine shows no port to the network; otherwise the name may stand for another
                # address here than it does elsewhere, so listen on all, as TensorFlow does.
                if address.is_loopback(host):
                    return _listening(sockets.bind_host(host, port, reuse=True))
                return _listening(sockets.bind_everywhere(port, reuse=True))
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                    raise ClusterError(
                        f"{self._own['task']} cannot listen on its address {self._config.chief_address}: "
                        f"{error.strerror}; another process listens there or claims the same task: stop it, or choose "
                        "another port"
                    ) from error
                time.sleep(0.1)

    def _gather(self) -> dict[int, dict]:
        count = len(self._members)
        announced = time.monotonic()
        note_at = announced + message.WAIT_NOTE_SECONDS
        known: list[str] = []
        while len(self._present) < count - 1 and not self._problems:
            now = time.monotonic()
            absent = self._absent()
            if now >= self._deadline:
                absent_for_long = self._absent(since=now - _SAME_TIMEOUT) or absent
                problem = message.missing(absent_for_long, self._timeout)
                self._say_farewell({"timeout": [problem]})
                raise RollCallTimeout(problem)
            if now >= note_at:
                _LOG.warning(message.waiting(absent, self._timeout))
                note_at = now + message.WAIT_AGAIN_SECONDS
            if absent != known and now - announced >= _TICK:  # so that each of them can name the missing ones by itself
                for guest in list(self._present.values()):
                    self._send(guest, {"waiting": absent})
                known, announced = absent, now
            self._step(min(_TICK, self._deadline - now))
        if self._problems:
            self._await_latecomers()
            self._say_farewell({"error": self._problems})
            raise ClusterError(self._problems)
        infos = {0: self._own["info"], **{rank: self._present[rank].hello["info"] for rank in range(1, count)}}
        self._say_farewell({"go": {str(rank): info for rank, info in infos.items()}})
        return infos

    def _await_latecomers(self) -> None:
        """Waits a moment for those who have not come yet; else they would look for a chief that has left."""
        until = min(self._deadline, time.monotonic() + _LATECOMERS_SECONDS)
        while (now := time.monotonic()) < until and self._heard() < len(self._members) - 1:
            self._step(until - now)

    def _heard(self) -> int:
        return sum(guest.hello is not None for guest in self._guests.values())

    def _absent(self, since: float = math.inf) -> list[str]:
        ranks = [rank for rank in range(1, len(self._members)) if rank not in self._present]
        absent = [self._members[rank] for rank in ranks if self._left_at.get(rank, 0.0) <= since]
        return message.named(self._config, absent)

    def _step(self, seconds: float) -> None:
        """Handles what has arrived, waiting for it no longer than given."""
        for key, events in self._selector.select(max(0.0, seconds)):
            if key.fileobj is self._listener:
                self._accept()
                continue
            guest = self._guests.get(key.fileobj)
            if guest is not None and events & selectors.EVENT_WRITE:
                self._flush(guest)
            if guest is not None and events & selectors.EVENT_READ:
                self._receive(guest)
        now = time.monotonic()
        for guest in [guest for guest in self._guests.values() if guest.hello is None and now > guest.deadline]:
            self._drop(guest)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # gone already, or too many files open: neither may end the meeting
            time.sleep(0.01)
            return
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        guest = self._guests[connection] = _Guest(connection)
        self._selector.register(connection, selectors.EVENT_READ)
        self._send(guest, message.banner())

    def _receive(self, guest: _Guest) -> None:
        try:
            data = guest.connection.recv(message.MAX_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or guest.hello is not None:  # a worker says nothing after its hello
            self._drop(guest)
            return
        guest.received += data
        line, newline, _ = guest.received.partition(b"\n")
        if newline:
            said = message.decode(line) if len(line) <= message.MAX_BYTES else None
            if said is not None and message.is_hello(said):
                self._welcome(guest, said)
            else:
                self._drop(guest)
        elif len(guest.received) > message.MAX_BYTES:
            self._drop(guest)

    def _welcome(self, guest: _Guest, said: dict) -> None:
        guest.hello, guest.received = said, b""
        found = message.disagreements(self._own, said)
        self._problems += [problem for problem in found if problem not in self._problems]
        if self._problems:
            return
        rank = said["rank"]
        before = self._own if rank == 0 else self._present[rank].hello if rank in self._present else None
        if before is not None and before["token"] != said["token"]:
            self._problems.append(
                f"two processes claim the same task {said['task']}: {before['process']} and {said['process']}; "
                "give each process its own task index"
            )
        elif 0 < rank < len(self._members):
            self._present[rank] = guest
            self._send(guest, {"waiting": self._absent()})
        else:
            self._drop(guest)

    def _send(self, guest: _Guest, said: dict) -> None:
        guest.to_send += message.encode(said)
        self._flush(guest)

    def _flush(self, guest: _Guest) -> None:
        if guest.connection not in self._guests:
            return
        try:
            guest.to_send = guest.to_send[guest.connection.send(guest.to_send) :]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(guest)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if guest.to_send else 0)
        self._selector.modify(guest.connection, wanted)

    def _drop(self, guest: _Guest) -> None:
        if self._guests.pop(guest.connection, None) is None:
            return
        with contextlib.suppress(KeyError):
            self._selector.unregister(guest.connection)
        sockets.close_without_trace(guest.connection)
        if guest.hello is not None and self._present.get(guest.hello["rank"]) is guest:
            del self._present[guest.hello["rank"]]
            self._left_at[guest.hello["rank"]] = time.monotonic()

    def _say_farewell(self, said: dict) -> None:
        """Tells everybody, and waits until they have closed: who closes last leaves no TIME_WAIT on the port."""
        self._selector.unregister(self._listener)
        self._listener.close()  # whoever comes now is too late, and is to see it at once
        for guest in [guest for guest in self._guests.values() if guest.hello is not None]:
            self._send(guest, said)
        until = time.monotonic() + _FAREWELL_SECONDS
        while time.monotonic() < until and self._heard():
            self._step(0.1)


def _listening(bound: socket.socket) -> socket.socket:
    try:
        bound.listen(128)
        bound.setblocking(False)
    except OSError:  # somebody else who had bound the port as well was the first to listen
        bound.close()
        raise
    return bound
