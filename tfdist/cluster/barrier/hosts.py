"""Whether a connection comes from a host of the cluster."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time

from tfdist.cluster import sockets
from tfdist.cluster.config import ClusterConfig

_THREADS = 16
# For all names together: one lookup can take half a minute while no name server answers, and the tasks wait for it.
_SECONDS = 10.0


class Hosts:
    """The hosts of a cluster; their names are looked up when they are first needed, in threads that nobody waits for.

    Args:
        config: The cluster.
        deadline: Until when to wait for the names, on `time.monotonic`'s clock; never longer than 10 s.

    Example:
        >>> hosts = Hosts(ClusterConfig({"worker": ["192.0.2.1:1", "localhost:1"]}))
        >>> hosts.include("192.0.2.1"), hosts.include("127.0.0.1"), hosts.include("198.51.100.9")
        (True, True, False)
    """

    def __init__(self, config: ClusterConfig, deadline: float = math.inf):
        self._hosts = sorted({sockets.split_address(place)[0] for _, _, place in config.tasks()})
        self._deadline = deadline
        self._found: set[str] = set()
        self._unknown: list[str] | None = None
        self._running = 0
        self._changed = threading.Condition()

    def include(self, address: str) -> bool:
        """Whether an address is that of one of the hosts, as far as their names are known in time.

        A connection from this machine comes from one: its own name may stand for a loopback address here.
        """
        if address in self._hosts or sockets.is_loopback(address) or sockets.is_own(address):
            return True
        with self._changed:
            if self._unknown is None:
                self._start()
            self._changed.wait_for(
                lambda: address in self._found or not self._running, max(0.0, self._deadline - time.monotonic())
            )
            return address in self._found

    def _start(self) -> None:
        self._deadline = min(self._deadline, time.monotonic() + _SECONDS)
        self._unknown = list(self._hosts)
        for _ in range(min(_THREADS, len(self._unknown))):
            with contextlib.suppress(RuntimeError):  # there are too many threads
                threading.Thread(target=self._look_up, name="tfdist-hosts", daemon=True).start()
                self._running += 1

    def _look_up(self) -> None:
        found: set[str] = set()
        while True:
            with self._changed:
                self._found |= found
                goes_on = bool(self._unknown) and time.monotonic() < self._deadline
                self._running -= not goes_on
                self._changed.notify_all()
                if not goes_on:
                    return
                host = self._unknown.pop()
            found = _addresses(host)


def _addresses(host: str) -> set[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return set()
    return {sockets.plain(str(entry[4][0])) for entry in found}
