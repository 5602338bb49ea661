"""A listener: gives each connection a thread, and goes on whatever strangers do and whatever runs out."""

from __future__ import annotations

import collections
import contextlib
import errno
import logging
import socket
import threading
import time
from collections.abc import Callable

from tfdist.cluster.connections.connection import Connection, framed, leave_without_trace
from tfdist.cluster.connections.handshake import ENDS
from tfdist.cluster.connections.open_files import make_room

_log = logging.getLogger("tfdist")
_CUT_SECONDS = 5.0
_SPARE_STRANGERS = 128
_LACKING = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_LACK_PAUSE = 0.05


class Listener:
    """A listening socket that gives each connection a thread, from now on until it is closed.

    Of the connections that are not `known` yet it keeps as many as there may be guests, and some more. Then it drops
    one: the oldest of the host that has most of them. Whoever belongs here introduces itself at once, so many who are
    silent are in nobody's way.

    Args:
        bound: A bound TCP socket, which it takes over.
        serve: Is called with each connection, in a thread of its own. When it returns, or raises one of `ENDS` or a
            ValueError, the connection is closed by a reset.
        name: The name of the threads.
        guests: How many connections may be made at the same time by those who belong here.

    Attributes:
        port: Where it listens.
        dropped: How many strangers it has dropped.

    Raises:
        OSError: If another process listens there.
    """

    def __init__(self, bound: socket.socket, serve: Callable[[Connection], None], name: str, guests: int = 0):
        self._bound, self._serve, self._name = bound, serve, name
        self._open: set[Connection] = set()
        self._strangers: dict[Connection, str] = {}  # those of whom it is not yet clear that they are known
        self.dropped = 0
        self._warned: set[str] = set()
        self._closing = False
        self._ended = threading.Condition()
        try:
            self._most = max(1, min(guests + _SPARE_STRANGERS, make_room(guests + _SPARE_STRANGERS)))
            bound.listen(socket.SOMAXCONN)
        except OSError:
            bound.close()
            raise
        bound.settimeout(None)
        self.port: int = bound.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening; whoever is connected is served until its connection ends. A second call does nothing."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._bound.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._bound.close()

    def end(self) -> None:
        """Stops listening, and ends all connections: the port is free on return."""
        self.close()
        with self._ended:
            for connection in self._open:
                connection.shutdown(socket.SHUT_RD)  # wakes the thread, which closes it, and sends nothing
            self._ended.wait_for(lambda: not self._open, _CUT_SECONDS)

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._bound.accept()
            except OSError as error:
                if self._closing:
                    return
                # Somebody who has hung up already, or something has run out: others can still connect.
                if error.errno in _LACKING:
                    self._run_out(error.strerror or str(error), "open files")
                time.sleep(_LACK_PAUSE)
                continue
            try:
                connection = framed(accepted)
            except OSError:  # it has ended already
                accepted.close()
                continue
            with self._ended:
                self._open.add(connection)
                self._strangers[connection] = connection.peer
                if len(self._strangers) > self._most:
                    self._make_room(self._most)
            try:
                threading.Thread(target=self._run, args=(connection,), name=f"{self._name}-client", daemon=True).start()
            except RuntimeError as error:  # there are too many threads: whoever it is may come again
                self._close(connection)
                self._run_out(str(error), "threads")
                time.sleep(_LACK_PAUSE)

    def _run_out(self, problem: str, what: str) -> None:
        with self._ended:
            self._make_room(0)
        if what not in self._warned:
            self._warned.add(what)
            _log.warning(
                "Received: %s, with %d connections at port %d. Expected: enough %s for all processes of the job; raise "
                "the limits of this process (`ulimit -n`, `ulimit -u`, the pids of its container). Going on",
                *(problem, len(self._open), self.port, what),
            )

    def _make_room(self, most: int) -> None:
        """Drops a stranger if there are more; called with the lock held."""
        self._strangers = {one: peer for one, peer in self._strangers.items() if not one.known}
        if len(self._strangers) > most:
            counts = collections.Counter(self._strangers.values())
            crowd = max(counts, key=counts.__getitem__)
            oldest = next(one for one, peer in self._strangers.items() if peer == crowd)
            del self._strangers[oldest]
            oldest.shutdown()  # wakes its thread, which closes it
            self.dropped += 1

    def _run(self, connection: Connection) -> None:
        try:
            with contextlib.suppress(*ENDS, ValueError):
                self._serve(connection)
        finally:
            self._close(connection)

    def _close(self, connection: Connection) -> None:
        with self._ended:
            self._open.discard(connection)
            self._strangers.pop(connection, None)
            leave_without_trace(connection)
            self._ended.notify_all()
