"""Three "hosts" on this machine: network namespaces with a name, an address and a hosts file of their own, on a bridge.

Each host is a process that holds its namespaces; the bridge is in a further one, so nothing of it is seen outside, two
runs at the same time cannot collide, and everything is gone as soon as these processes are.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

NAMES = ("n9", "n10", "n11")  # sorted as text, they come in another order
SWITCH = "ctl"
# Reserved for tests between networks (RFC 2544): no real one has them.
_FIRST, _SECOND = "198.18.77", "198.19.77"
_HOLD = 'mount --bind "$1" /etc/hosts && hostname "$2" && ip link set lo up && echo ready && exec sleep infinity'
_COMMAND_SECONDS = 60.0
# tbf drops what is longer than its burst: a segment that the kernel has not cut yet has 64 KiB.
_BURST = "256kb"


@dataclass
class Host:
    """A process that holds the namespaces of a host.

    Attributes:
        name: that `hostname` prints there.
        addresses: in the first network, and in the second one, if there is one.
        holder: the process.
    """

    name: str
    addresses: list[str] = field(default_factory=list)
    holder: subprocess.Popen | None = None

    @property
    def address(self) -> str:
        return self.addresses[0]

    def command(self, *words: str) -> list[str]:
        """The command that runs another one on this host."""
        return ["nsenter", f"--target={self.holder.pid}", "--net", "--uts", "--mount", f"--wd={os.getcwd()}", *words]

    def run(self, *words: str) -> str:
        """What a short command prints on this host.

        Raises:
            RuntimeError: if it fails.
        """
        result = subprocess.run(self.command(*words), capture_output=True, text=True, timeout=_COMMAND_SECONDS)
        if result.returncode != 0:
            raise RuntimeError(f"`{' '.join(words)}` on {self.name}: {result.stderr.strip()}")
        return result.stdout

    def processes(self) -> list[int]:
        """All that run on this host, but for its holder."""
        found, here = [], _network_of(self.holder.pid)
        # A host that could not be made has none but this machine's.
        for entry in Path("/proc").iterdir() if here not in (None, _network_of(os.getpid())) else ():
            if entry.name.isdigit() and int(entry.name) != self.holder.pid and _network_of(int(entry.name)) == here:
                found.append(int(entry.name))
        return found


class Hosts:
    """The hosts, as long as the `with` block lasts.

    Args:
        folder: an empty folder, for their hosts files.
        networks: how many networks they are in, one or two: eth0, eth1.

    Attributes:
        switch: the host that has the bridges, and an address in the first network.

    Example:
        >>> with Hosts(tmp_path) as hosts:  # doctest: +SKIP
        ...     hosts.cut("n11")
        ...     hosts["n9"].run("hostname")
        'n9\\n'
    """

    def __init__(self, folder: Path, networks: int = 1):
        self._folder, self._networks = folder, networks
        self.switch = Host(SWITCH, [f"{_FIRST}.1"])
        self._hosts = {
            name: Host(name, [f"{network}.{9 + number}" for network in (_FIRST, _SECOND)[:networks]])
            for number, name in enumerate(NAMES)
        }

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts.values())

    def __enter__(self) -> Hosts:
        try:
            for host in (self.switch, *self):
                self._start(host)
            for number in range(self._networks):
                self._connect_all(number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for host in (*self, self.switch):
            if host.holder is not None:
                _end(host)

    def cut(self, name: str, network: int = 0) -> None:
        """Pulls the cable of a host out of the switch: nobody is told, nothing arrives any more."""
        self.switch.run("ip", "link", "set", _port(name, network), "nomaster")

    def join(self, name: str, network: int = 0) -> None:
        """Puts it back."""
        self.switch.run("ip", "link", "set", _port(name, network), "master", _bridge(network))

    def separate(self, one: str, other: str) -> None:
        """Keeps two hosts from each other, in the first network; the third one still reaches both."""
        for name in (one, other):
            self.switch.run("ip", "link", "set", _port(name, 0), "type", "bridge_slave", "isolated", "on")

    def limit(self, megabits: int) -> None:
        """Limits what each host sends in the first network, in Mbit/s."""
        limit = ["tbf", "rate", f"{megabits}mbit", "burst", _BURST, "latency", "100ms"]
        for host in self:
            host.run("tc", "qdisc", "replace", "dev", "eth0", "root", *limit)

    def _start(self, host: Host) -> None:
        path = self._folder / f"hosts-{host.name}"
        lines = ["127.0.0.1 localhost", *(f"{other.address} {other.name}" for other in (self.switch, *self))]
        path.write_text("\n".join(lines) + "\n")
        # The kernel ends it when these tests are killed.
        words = ["setpriv", "--pdeathsig=KILL", "unshare", "--net", "--uts", "--mount", "sh", "-ec", _HOLD, "sh"]
        host.holder = subprocess.Popen([*words, str(path), host.name], stdout=subprocess.PIPE, start_new_session=True)
        if host.holder.stdout.readline() != b"ready\n":
            host.holder.wait(_COMMAND_SECONDS)
            raise RuntimeError(f"the host {host.name} does not start; what its command has printed is above")

    def _connect_all(self, network: int) -> None:
        bridge = _bridge(network)
        self.switch.run("ip", "link", "add", bridge, "type", "bridge")
        if network == 0:
            self.switch.run("ip", "address", "add", f"{self.switch.address}/24", "dev", bridge)
        self.switch.run("ip", "link", "set", bridge, "up")
        for host in self:
            port, device = _port(host.name, network), f"eth{network}"
            peer = ["peer", "name", device, "netns", str(host.holder.pid)]
            self.switch.run("ip", "link", "add", port, "type", "veth", *peer)
            self.switch.run("ip", "link", "set", port, "master", bridge, "up")
            host.run("ip", "address", "add", f"{host.addresses[network]}/24", "dev", device)
            host.run("ip", "link", "set", device, "up")


def _port(name: str, network: int) -> str:
    return f"{name}-{network}"


def _bridge(network: int) -> str:
    return f"bridge{network}"


def _end(host: Host) -> None:
    """Ends whatever runs on a host; the holder last, as without it nobody knows who else is there."""
    deadline = time.monotonic() + _COMMAND_SECONDS
    while (others := host.processes()) and time.monotonic() < deadline:
        for process in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.02)
    host.holder.kill()
    host.holder.wait()
    host.holder.stdout.close()
    if others:
        raise RuntimeError(f"processes {others} on {host.name} do not end")


def _network_of(process: int) -> int | None:
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/{process}/ns/net").st_ino
    return None
