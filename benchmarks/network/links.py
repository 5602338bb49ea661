"""Two network namespaces, joined by a link with the rate and the delay of a network.

    namespace a   wan0 10.77.0.1 ==== rate: the kernel's token bucket on both ends ==== 10.77.0.2 wan0   namespace b
                                 with a delay: frames go through benchmarks.network.delay, which keeps each so long

It needs root, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.data_parallel.processes import ROOT

DEVICE = "wan0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
_READY = "ready"


@dataclass(frozen=True)
class Network:
    """A network between two hosts.

    Attributes:
        title: in the tables.
        megabits: a second, in each direction.
        delay: of each direction, in seconds.
    """

    title: str
    megabits: int
    delay: float = 0.0


NETWORKS = {
    "10g": Network("10 Gbit/s", 10_000),
    "1g": Network("1 Gbit/s", 1_000),
    "200m": Network("200 Mbit/s", 200),
    "far": Network("200 Mbit/s, 20 ms there and back", 200, delay=0.010),
}


@contextlib.contextmanager
def joined(network: Network) -> Iterator[tuple[str, str]]:
    """The names of two namespaces that are joined, as long as the block runs.

    Raises:
        subprocess.CalledProcessError: if this user may not make them, or the kernel lacks something.
    """
    names = f"tfdist-a-{os.getpid()}", f"tfdist-b-{os.getpid()}"
    with contextlib.ExitStack() as stack:
        for name in names:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
        if network.delay:
            words = [sys.executable, "-m", f"{__package__}.delay", str(network.delay), *names]
            process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
            if process.stdout.readline().strip() != _READY:
                raise RuntimeError("Received: no 'ready' from benchmarks.network.delay. Expected: a kernel with tun.")
        else:
            ends = ("type", "veth", "peer", "name", DEVICE, "netns", names[1])
            _ip("link", "add", DEVICE, "netns", names[0], *ends)
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "address", "add", f"{address}/24", "dev", DEVICE)
            _ip("-n", name, "link", "set", DEVICE, "up")
            rate = ("rate", f"{network.megabits}mbit", "burst", "256kb", "latency", "100ms")
            subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root", "tbf", *rate], check=True)
        yield names


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def sent_bytes(device: str = DEVICE) -> int:
    """What this process' namespace has sent over the link so far, with all headers."""
    with open(f"/sys/class/net/{device}/statistics/tx_bytes") as file:
        return int(file.read())
