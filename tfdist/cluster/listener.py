"""A listening socket that gives each connection a thread."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable


class Listener:
    """Listens until it is closed.

    Args:
        bound: a bound TCP socket, which it takes over.
        serve: is called with each connection, in a thread of its own.
        name: of the threads.

    Attributes:
        port: where it listens.

    Example:
        >>> from tfdist.cluster import sockets
        >>> listener = Listener(sockets.bind_everywhere(0, reuse=False), lambda accepted: accepted.close(), "example")
        >>> listener.close()
    """

    def __init__(self, bound: socket.socket, serve: Callable[[socket.socket], None], name: str):
        self._bound, self._serve, self._name = bound, serve, name
        bound.listen(socket.SOMAXCONN)
        self.port: int = bound.getsockname()[1]

    def start(self) -> None:
        """Begins to accept connections, and returns at once."""
        threading.Thread(target=self._accept, name=self._name, daemon=True).start()

    def close(self) -> None:
        """Stops; who is connected is served until its connection ends."""
        with contextlib.suppress(OSError):
            self._bound.shutdown(socket.SHUT_RDWR)
        self._bound.close()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._bound.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(accepted,), name=f"{self._name}-client", daemon=True).start()
