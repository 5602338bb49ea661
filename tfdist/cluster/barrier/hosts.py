"""Whether a connection comes from a host of the cluster."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

from tfdist.cluster import sockets
from tfdist.cluster.config import ClusterConfig

_THREADS = 16


class Hosts:
    """The hosts of a cluster; their names are looked up when they are first needed.

    Args:
        config: The cluster.

    Example:
        >>> hosts = Hosts(ClusterConfig({"worker": ["192.0.2.1:1", "localhost:1"]}))
        >>> hosts.include("192.0.2.1"), hosts.include("127.0.0.1"), hosts.include("198.51.100.9")
        (True, True, False)
    """

    def __init__(self, config: ClusterConfig):
        self._hosts = sorted({sockets.split_address(place)[0] for _, _, place in config.tasks()})
        self._found: frozenset[str] | None = None
        self._lock = threading.Lock()

    def include(self, address: str) -> bool:
        """Whether an address is that of one of the hosts; a connection from this machine comes from one."""
        if address in self._hosts or sockets.is_loopback(address):
            return True
        with self._lock:
            if self._found is None:
                with ThreadPoolExecutor(max_workers=_THREADS) as pool:
                    self._found = frozenset().union(*pool.map(_addresses, self._hosts))
        # This host's own name may stand for a loopback address here.
        return address in self._found or sockets.is_own(address)


def _addresses(host: str) -> set[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return set()
    return {sockets.plain(str(entry[4][0])) for entry in found}
