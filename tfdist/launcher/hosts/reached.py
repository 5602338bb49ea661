"""All hosts of an attempt: reached at the same time, made ready, kept awake, and left together."""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist.cluster.foreign_text import cleaned
from tfdist.cluster.sockets import is_loopback, join_address
from tfdist.launcher.hosts.agent import BEAT
from tfdist.launcher.hosts.connection import Connection, HostsError, Reach
from tfdist.launcher.hosts.frames import message
from tfdist.launcher.hosts.listing import ListedHost

# ssh itself gives up after its ConnectTimeout of ten seconds; the agent then has to be loaded, perhaps from NFS.
_CONNECT_SECONDS = 60.0
_READY_SECONDS = 30.0
_TICK = 0.02


@dataclass(frozen=True)
class RunFacts:
    """What each agent is told about the run.

    Attributes:
        run_id: name of the run.
        log_dir: absolute folder of the logs.
        variables: those of this machine that go to other hosts.
    """

    run_id: str
    log_dir: str
    variables: Mapping[str, str]


class Reached:
    """The hosts that were reached, in the order in which the user has named them.

    Attributes:
        connections: by the names of the hosts.
        problems: why others were not reached, by name.
    """

    def __init__(self) -> None:
        self.connections: dict[str, Connection] = {}
        self.problems: dict[str, str] = {}
        self._heart = threading.Thread(target=self._beat, daemon=True)
        self._is_over = threading.Event()

    @classmethod
    def reach(
        cls,
        listed: Sequence[ListedHost],
        reach: Reach,
        run: RunFacts,
        restart: int = 0,
        check: Callable[[], object] = lambda: None,
    ) -> Reached:
        """Connects to all hosts.

        Args:
            listed: the hosts.
            reach: how.
            run: what the agents are told.
            restart: how often the run has been started again.
            check: is called again and again meanwhile; what it raises ends the waiting.

        Raises:
            HostsError: ssh cannot be run.
        """
        self = cls()
        try:
            with _probe(run.log_dir) as probe:
                hello = {"kind": "hello", "run_id": run.run_id, "log_dir": run.log_dir}
                more = {"variables": dict(run.variables), "probe": probe, "restart": restart}
                # Names may take seconds to look up: those who are connected already wait for the others.
                self._heart.start()
                for host in listed:
                    self.connections[host.name] = Connection(host, reach, {**hello, **more})
                self._wait(lambda connection: connection.facts is not None, _CONNECT_SECONDS, check)
            for name in [name for name, connection in self.connections.items() if connection.lost]:
                connection = self.connections.pop(name)
                self.problems[name] = connection.lost
                connection.close()
        except BaseException:
            self.close()
            raise
        return self

    def prepare(self, counts: Mapping[str, int], check: Callable[[], object] = lambda: None) -> dict[str, list[str]]:
        """Reserves ports: the addresses `host:port` that the processes of each host get.

        Args:
            counts: how many ports each host is to reserve.
            check: as for `reach`.

        Raises:
            HostsError: a host is lost, has no ports, or no address that others could use.
        """
        places: dict[str, tuple[str, list[int]]] = {}
        order = sorted(counts, key=lambda name: self.connections[name].is_here)
        # This machine's own address is the one from which another host is reached.
        for is_here in (False, True):
            names = [name for name in order if self.connections[name].is_here == is_here]
            towards = next((address for address, _ in places.values() if not is_loopback(address)), "127.0.0.1")
            for name in names:
                self.connections[name].send(kind="prepare", count=counts[name], towards=towards)
            answers = self._answers(names, check)
            places.update({name: _place(self.connections[name], answers[name]) for name in names})
        self._check_addresses({name: address for name, (address, _) in places.items()})
        return {name: [join_address(address, port) for port in ports] for name, (address, ports) in places.items()}

    def close(self) -> None:
        """Ends all that runs there, and returns when the connections have ended."""
        self._is_over.set()
        if self._heart.is_alive():
            self._heart.join()
        for connection in self.connections.values():
            connection.stop()
        for connection in self.connections.values():
            connection.close()

    def __enter__(self) -> Reached:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _answers(self, names: Sequence[str], check: Callable[[], object]) -> dict[str, Any]:
        answers: dict[str, Any] = {}

        def has_answered(connection: Connection) -> bool:
            return connection.name not in names or connection.name in answers

        self._wait(has_answered, _READY_SECONDS, check, answers)
        lost = [self.connections[name].lost for name in names if self.connections[name].lost]
        if lost:
            raise HostsError("; ".join(lost))
        return answers

    def _wait(
        self,
        is_done: Callable[[Connection], bool],
        seconds: float,
        check: Callable[[], object],
        answers: dict[str, Any] | None = None,
    ) -> None:
        """Hears all until each is done, or lost."""
        deadline = time.monotonic() + seconds
        while waiting := [one for one in self.connections.values() if not one.lost and not is_done(one)]:
            check()
            _sleep(waiting)
            for connection in waiting:
                connection.send()
                for told in connection.hear():
                    if answers is not None and isinstance(told, dict) and told["kind"] in ("ready", "error"):
                        answers[connection.name] = told
                if time.monotonic() > deadline and not is_done(connection):
                    connection.is_late(seconds)

    def _check_addresses(self, addresses: Mapping[str, str]) -> None:
        others = {name: address for name, address in addresses.items() if is_loopback(address)}
        machines = {self.connections[name].facts.identity for name in addresses}  # type: ignore[union-attr]
        if others and len(machines) > 1:
            name = next(iter(others))
            raise HostsError(
                f"host {name} was reached at {others[name]}, a port that is passed on, perhaps: other hosts cannot "
                "connect to that address. Expected: ssh reaches each host at an address that all hosts can use; or "
                "name the network interface that they share by TFDIST_INTERFACE"
            )

    def _beat(self) -> None:
        """Also while the launcher waits for its terminal."""
        while not self._is_over.wait(BEAT):
            for connection in list(self.connections.values()):
                connection.channel.send(message(kind="beat"))


def _place(connection: Connection, told: Any) -> tuple[str, list[int]]:
    try:
        if told["kind"] == "ready":
            return cleaned(told["address"], 100), list(map(int, told["ports"]))
        problem = cleaned(told["text"])
    except (KeyError, TypeError, ValueError, OverflowError):
        problem = f"Received: {cleaned(told, 200)}. Expected: ports"
    raise HostsError(f"host {connection.name}: {problem}")


def _sleep(connections: Sequence[Connection]) -> None:
    """Until one of them says something, but not for long."""
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection.channel.reading, selectors.EVENT_READ)
        selector.select(_TICK)


@contextmanager
def _probe(log_dir: str) -> Iterator[str]:
    """A file by which an agent sees whether it has the launcher's folder of logs."""
    path = Path(log_dir, f".host-{secrets.token_hex(8)}")
    # Where it cannot be made, nobody shares it.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)  # the program may have deleted it
        path.touch()
    try:
        yield os.fspath(path)
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
