"""The barrier: all tasks meet before TensorFlow starts, so that none of them waits in vain inside TensorFlow.

Here is the part of every task but the chief: it tries until it reaches the chief, then waits for its permission to go.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping

import tfdist.cluster.barrier.messages as messages
from tfdist.cluster import connections, discovery, sockets
from tfdist.cluster.barrier.chief import Chief
from tfdist.cluster.barrier.messages import BarrierTimeoutError, JobUnderWayError, members
from tfdist.cluster.config import ClusterConfig, Task
from tfdist.cluster.connections import Connection, UnreachedError
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.foreign_text import cleaned
from tfdist.cluster.variables import TOKEN

_LOG = logging.getLogger("tfdist")
_UNDER_WAY = "a TensorFlow server answers there instead of a waiting tfdist chief: a job is under way already"
_CONNECT_SECONDS = 5.0
_LAST_CHANCE = 0.05  # for an attempt at the deadline to see what answers


def meet(
    config: ClusterConfig,
    timeout: float = 300.0,
    info: dict | None = None,
    servers: bool = False,
    rejoin: bool = False,
    env: Mapping[str, str] | None = None,
) -> dict[int, dict]:
    """Waits until every compute task is there, and exchanges a small dictionary among them.

    They meet at the chief's own address, before TensorFlow's server takes it; it is free again on return. With
    TFDIST_TOKEN, which is then the same on all tasks, or else the secret by which they have met at the rendezvous,
    nobody takes part who does not know it.

    Args:
        config: The cluster as this process sees it.
        timeout: How many seconds to wait for everybody.
        info: What to tell the others; JSON values. Keys that start with `same.` must be equal on all tasks.
        servers: Whether the parameter servers come as well; all tasks must agree on that.
        rejoin: Whether to raise `JobUnderWayError` if the chief has left its barrier and runs a TensorFlow server
            already; otherwise this waits for its next barrier.
        env: The environment variables; those of this process by default.

    Returns:
        The `info` of every task, by rank; those of parameter servers follow in their order.

    Raises:
        BarrierTimeoutError: If a task has not come in time; names it.
        ClusterError: If the tasks do not fit together: different clusters, the same task twice, different values of a
            `same.` key; or if this task takes no part (an evaluator, or a parameter server without `servers`).

    Example:
        >>> meet(ClusterConfig.single_process(), info={"same.keras": "3.15.0"})
        {0: {'same.keras': '3.15.0'}}
    """
    info = {} if info is None else info
    present = members(config, servers)
    own = (config.task_type, config.task_index)
    if own not in present:
        raise ClusterError(
            f"{config.task_type} {config.task_index} takes no part in the barrier; only chief"
            f"{', worker and ps' if servers else ' and worker'} tasks do"
        )
    if len(present) == 1:
        return {0: info}
    secret = messages.secret_of(os.environ if env is None else env, discovery.secret_of(config))
    if config.is_chief:
        return Chief(config, present, info, timeout, secret).run()
    return _Task(config, present, info, timeout, rejoin, secret).run()


class _Task:
    """One barrier; `run` it once."""

    def __init__(
        self,
        config: ClusterConfig,
        members: tuple[Task, ...],
        info: dict,
        timeout: float,
        rejoin: bool,
        secret: bytes | None,
    ) -> None:
        self._config = config
        self._size = len(members)
        self._secret = secret
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._rejoin = rejoin
        self._largest = messages.MAX_BYTES * len(members)
        self._own = messages.hello(config, info, members.index((config.task_type, config.task_index)))
        self._waiting_for: list[str] = []
        self._more = 0
        self._turned_away = ""
        self._warned = False
        self._note_at = time.monotonic() + messages.WAIT_NOTE_SECONDS

    def run(self) -> dict[int, dict]:
        """Tries until the chief answers, and waits; see `meet`."""
        chief = messages.named(self._config, self._config.compute_tasks[:1])[0]
        problems: dict[str, str] = {}
        try:
            return connections.keep_trying(
                {chief: self._attempt},
                self._deadline,
                problems,
                lambda: self._note([chief], why=f": {problems[chief]}"),
            )
        except UnreachedError:
            raise BarrierTimeoutError(self._why_late(chief, problems[chief])) from None

    def _why_late(self, chief: str, reason: str) -> str:
        if self._waiting_for:
            return messages.missing(self._waiting_for, self._timeout, self._more) + self._turned_away
        return (
            f"{self._own['task']} could not reach the chief, {chief}, within start_timeout={self._timeout:g} s: "
            f"{reason}; start it, look into its output for why it did not start, and check the address and that no "
            "firewall is in between"
        )

    def _note(self, names: list[str], more: int = 0, why: str = "") -> None:
        now = time.monotonic()
        if now >= self._note_at:
            _LOG.warning(messages.waiting(names, self._timeout, more) + why)
            self._note_at = now + messages.WAIT_AGAIN_SECONDS

    def _attempt(self, left: float) -> dict[int, dict]:
        connection = self._connect(min(_CONNECT_SECONDS, left))
        try:
            return self._talk(connection)
        except TimeoutError:
            raise UnreachedError("timed out") from None
        except connections.ENDS as error:
            self._waiting_for = []  # it is the chief that is missing now
            why = "the chief closed it" if isinstance(error, EOFError) else sockets.reason_of(error)
            raise UnreachedError(f"the connection broke: {why}") from error
        finally:
            connections.leave_without_trace(connection)

    def _connect(self, seconds: float) -> Connection:
        try:
            return connections.framed(sockets.connect(sockets.split_address(self._config.chief_address), seconds))
        except socket.gaierror as error:
            raise UnreachedError(f"its name cannot be resolved ({error.strerror})") from error
        except TimeoutError as error:
            raise UnreachedError("timed out") from error
        except (OSError, UnicodeError) as error:
            raise UnreachedError(sockets.reason_of(error).lower()) from error

    def _talk(self, connection: Connection) -> dict[int, dict]:
        version = self._check_greeting(connection)
        connections.send(connection, self._own, self._deadline)
        # Anybody can greet; where there is a secret, the chief of another version proves that it is one.
        if version != messages.VERSION and self._secret is None:
            connection.poll(min(_CONNECT_SECONDS, self._deadline - time.monotonic()))  # until it has read who this is
            raise ClusterError(messages.other_version(self._own["task"], "the chief", messages.VERSION, version))
        while True:
            said = self._next(connection)
            if "go" in said:
                return messages.infos_of(said["go"], self._size)
            if "error" in said:
                raise ClusterError(_texts(said["error"]))
            if "timeout" in said:
                raise BarrierTimeoutError(_texts(said["timeout"]))
            self._waiting_for = _texts(said.get("waiting"))
            more = said.get("more")
            self._more = more if isinstance(more, int) else 0
            self._turned_away = cleaned(said.get("turned away", ""))

    def _check_greeting(self, connection: Connection) -> int:
        """Makes sure that a chief which waits is at the other end, and that it is the right one; its version."""
        left = self._deadline - time.monotonic()
        until = time.monotonic() + max(min(left, messages.HELLO_SECONDS), _LAST_CHANCE)
        greeting = {}
        try:
            if messages.is_a_servers(connection.first(4, until)):
                problem = f"{self._own['task']}: {_UNDER_WAY}"
                raise JobUnderWayError(problem) if self._rejoin else UnreachedError(_UNDER_WAY)
            greeting = connections.receive(connection, messages.MAX_BYTES, until)
        except (OSError, EOFError) as error:
            if getattr(error, "errno", None) is not None:
                raise
        version = greeting.get("roll_call")
        if type(version) is not int:
            raise UnreachedError("something else than a waiting tfdist chief answers there")
        if bool(greeting.get("token")) != (self._secret is not None):
            here, there = ("has", "has none") if self._secret is not None else ("has no", "has one")
            raise UnreachedError(
                f"{self._own['task']} {here} {TOKEN}, and the chief {there}; set it to the same text on all tasks, or "
                "on none (where it is not set, a secret of the rendezvous takes its place)"
            )
        if self._secret is not None:
            try:
                connections.authenticate(connection, self._secret, first=False, deadline=self._deadline)
            except connections.OtherVersionError as error:
                if not self._warned:
                    self._warned = True
                    _LOG.warning("tfdist: %s cannot talk to the chief yet: %s", self._own["task"], error)
                raise UnreachedError(str(error)) from None
            except connections.ENDS as error:
                raise UnreachedError(
                    f"the chief there has another {TOKEN}, or secret of the rendezvous ({error or 'it hung up'}); set "
                    f"{TOKEN} to the same text on all tasks"
                ) from None
        return version

    def _next(self, connection: Connection) -> dict:
        """The chief's next message."""
        while True:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if connection.poll(min(left, 1.0)):
                until = time.monotonic() + messages.HELLO_SECONDS
                return connections.receive(connection, self._largest, until)
            if self._waiting_for:
                self._note(self._waiting_for, self._more, self._turned_away)


def _texts(found: object) -> list[str]:
    """What the chief tells, or somebody in its place, fit to be printed."""
    return [cleaned(text) for text in (found if isinstance(found, list) else [found] if found else [])]
