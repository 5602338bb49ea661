"""Horovod's elastic driver in threads of this process: it says which processes are to run, and somebody else runs them.

Horovod decides who takes part, gives the ranks, and lets the processes find each other. To be imported once Horovod is
known to be there.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from horovod.runner.common.util import secret, timeout
from horovod.runner.common.util.hosts import INVALID_SLOT_INFO
from horovod.runner.driver import driver_service
from horovod.runner.elastic.discovery import HostDiscovery
from horovod.runner.elastic.driver import ElasticDriver
from horovod.runner.elastic.rendezvous import GET_RANK_AND_SIZE, create_rendezvous_handler
from horovod.runner.elastic.settings import ElasticSettings
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
from horovod.runner.http.http_server import RendezvousServer
from horovod.runner.util import network

from tfdist.launcher.horovod.options import DiscoveryError, discover_hosts

_PROBE_SECONDS = 30
_LOG_NAME = "horovod-driver.log"


@dataclass(eq=False)
class Order:
    """A process that Horovod wants to run.

    Attributes:
        host: where.
        slot: its number among those of its host.
        rank: its rank at first.
        env: what it has to find in its environment.
        is_dismissed: set when the process is not to take part any more.
        is_over: set when all processes are to end.
    """

    host: str
    slot: int
    rank: int
    env: Mapping[str, str]
    is_dismissed: threading.Event
    is_over: threading.Event
    _ended: threading.Event = field(default_factory=threading.Event)
    _code: int = 0

    def end(self, code: int) -> None:
        """Says that the process has ended."""
        self._code = code
        self._ended.set()

    def wait(self) -> tuple[int, float]:
        """Waits for that; returns the exit code and the time, as Horovod wants to have it."""
        self._ended.wait()
        return self._code, time.time()


class Driver:
    """Horovod's driver, from its start until nothing can go on, or all is done.

    Args:
        fewest: how many processes go on at least.
        most: how many there are at most.
        program: that names the hosts.
        interface: the network interface that the hosts share; `None` lets Horovod find it.

    Attributes:
        orders: processes to start.
        news: what the user should know, as texts.
        dismissed: hosts and slots of processes that have asked for a rank, and have none any more.
        generation: how often the ranks were given.
        size: how many there are.
        error: why Horovod has given up, if it says so.
    """

    def __init__(self, fewest: int, most: int, program: str, interface: str | None):
        self.orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self.news: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.dismissed: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self.generation = self.size = 0
        self.error: Exception | None = None
        self._fewest, self._interface = fewest, interface
        self._meeting = _Meeting(self._count)
        self._driver = ElasticDriver(self._meeting, _Program(program, self.news), fewest, most)
        self._thread = threading.Thread(target=self._drive, daemon=True)
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begins, and returns at once."""
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be ordered."""
        return not self._thread.is_alive()

    def rank_of(self, order: Order) -> int:
        """The rank of a process now; -1 if it has none any more."""
        return self._driver.get_slot_info(order.host, order.slot).rank

    def stop(self) -> None:
        """Lets everything end."""
        self._stopped.set()
        if not self._driver.finished():
            self._driver.stop()

    def _drive(self) -> None:
        try:
            port = self._meeting.start(self._handler())
            hosts = self._driver.wait_for_available_slots(self._fewest).host_assignment_order
            interfaces = [self._interface] if self._interface else _shared_interfaces(hosts)
            meeting = create_run_env_vars(network.get_driver_ip(interfaces), interfaces, str(port), elastic=True)

            def run(slot: Any, events: Sequence[threading.Event]) -> tuple[int, float]:
                over, dismissed = events
                env = {**meeting, **create_slot_env_vars(slot)}
                order = Order(slot.hostname, slot.local_rank, slot.rank, env, dismissed, over)
                self.orders.put(order)
                return order.wait()

            self._driver.start(self._fewest, run)
            self._driver.get_results()
        except Exception as error:
            self.error = error
        self.stop()

    def _handler(self) -> type:
        """Answers the processes as Horovod does, but for those that have no rank any more.

        Horovod's answer lets them abort as if they had crashed; they wait instead, until they are ended.
        """
        horovods, dismissed, stopped = create_rendezvous_handler(self._driver), self.dismissed, self._stopped
        none = INVALID_SLOT_INFO.to_response_string().encode()

        class Handler(horovods):
            def _get_value(self, scope: str, key: str) -> Any:
                value = super()._get_value(scope, key)
                if scope == GET_RANK_AND_SIZE and value == none:
                    host, _, slot = key.rpartition(":")
                    dismissed.put((host, int(slot)))
                    stopped.wait()
                return value

        return Handler

    def _count(self, size: int) -> None:
        self.size = size
        self.generation += 1


class _Meeting(RendezvousServer):
    """Where the processes ask for their ranks; tells when these are given anew."""

    def __init__(self, told: Any):
        super().__init__()
        self._told = told

    def start(self, handler_cls: type) -> int:
        port = super().start(handler_cls)
        # A process that is killed while it asks is no news.
        self._httpd.handle_error = _log_error
        # Nor does the launcher wait for one that waits for others.
        self._httpd.daemon_threads = True
        return port

    def init(self, host_alloc_plan: Sequence[Any]) -> None:
        super().init(host_alloc_plan)
        self._told(len(host_alloc_plan))


class _Program(HostDiscovery):
    """The user's program; while it fails, the hosts are those that it has named before."""

    def __init__(self, program: str, news: queue.SimpleQueue[str]):
        self._program, self._news = program, news
        self._hosts: dict[str, int] = {}
        self._fails = False

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        try:
            self._hosts = discover_hosts(self._program)
            self._fails = False
        except (DiscoveryError, OSError) as error:
            if not self._fails:
                self._news.put(f"{error} Until it does, the hosts are {', '.join(self._hosts) or 'none'}")
            self._fails = True
        return dict(self._hosts)


class QuietHorovod:
    """Keeps what Horovod logs, and tracebacks of its threads, in a file; the launcher says the same in one line.

    Args:
        folder: of the logs.

    Example:
        >>> import tempfile
        >>> with QuietHorovod(Path(tempfile.mkdtemp())):
        ...     logging.error("failure count == 2 -> stop running")
    """

    def __init__(self, folder: Path):
        self._path = folder / _LOG_NAME

    def __enter__(self) -> None:
        self._handler = logging.FileHandler(self._path, delay=True)
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logging.getLogger().addHandler(self._handler)
        self._excepthook, threading.excepthook = threading.excepthook, _log_thread_error

    def __exit__(self, *error: object) -> None:
        threading.excepthook = self._excepthook
        logging.getLogger().removeHandler(self._handler)
        self._handler.close()


def _log_error(request: Any, client_address: Any) -> None:
    """In the place of `socketserver.BaseServer.handle_error`."""
    logging.warning("a request of %s has failed", client_address, exc_info=True)


def _log_thread_error(args: threading.ExceptHookArgs) -> None:
    logging.error("a thread has failed", exc_info=args.exc_value)


def _shared_interfaces(hosts: Sequence[str]) -> list[str]:
    """Asks all hosts for the network interfaces over which they reach each other."""
    patience = timeout.Timeout(_PROBE_SECONDS, message="timed out waiting for {activity}; name one by --interface")
    settings = ElasticSettings(None, 1, None, None, None, key=secret.make_secret_key(), start_timeout=patience)
    return sorted(driver_service.get_common_interfaces(settings, hosts))
