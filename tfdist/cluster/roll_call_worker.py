"""The side of a worker, or server, of the roll call: it tries until it reaches the chief, then waits for its word."""

from __future__ import annotations

import logging
import random
import socket
import time

from tfdist.cluster import address, sockets
from tfdist.cluster import roll_call_message as message
from tfdist.cluster.config import ClusterConfig, Task
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.roll_call_message import JobUnderWay, RollCallTimeout

_LOG = logging.getLogger("tfdist")
_FIRST_PAUSE = 0.02
_LAST_CHANCE = 0.05  # for an attempt at the deadline to see what answers
# How a TensorFlow server greets: an HTTP/2 frame, whose length (three bytes) is below 64 KiB, with settings.
_FRAME_LENGTH, _SETTINGS = b"\0", b"\4"


class _Unreached(Exception):
    """An attempt that failed; the text says how."""


class Worker:
    """One roll call; `run` it once."""

    def __init__(
        self,
        config: ClusterConfig,
        members: tuple[Task, ...],
        info: dict,
        timeout: float,
        deadline: float,
        poll: float,
        rejoin: bool,
    ) -> None:
        self._config = config
        self._timeout = timeout
        self._deadline = deadline
        self._poll = poll
        self._rejoin = rejoin
        self._longest_line = message.MAX_BYTES * len(members)
        self._own = message.hello(config, info, members.index((config.task_type, config.task_index)))
        self._waiting_for: list[str] = []
        self._note_at = time.monotonic() + message.WAIT_NOTE_SECONDS

    def run(self) -> dict[int, dict]:
        """Takes part; see `tfdist.cluster.roll_call.meet`."""
        pause = _FIRST_PAUSE
        chief = message.named(self._config, self._config.compute_tasks[:1])[0]
        while True:
            try:
                return self._attempt()
            except _Unreached as failure:
                reason = str(failure)
            now = time.monotonic()
            if now >= self._deadline:
                raise RollCallTimeout(self._why_late(chief, reason))
            self._note([chief])
            # Not by the generator of the program, whose numbers stay those of one process.
            time.sleep(min(pause * random.SystemRandom().uniform(0.5, 1.0), self._deadline - now))
            pause = min(2 * pause, self._poll)

    def _why_late(self, chief: str, reason: str) -> str:
        if self._waiting_for:
            return message.missing(self._waiting_for, self._timeout)
        return (
            f"{self._own['task']} could not reach the chief, {chief}, within start_timeout={self._timeout:g} s: "
            f"{reason}; start it, look into its output for why it did not start, and check the address and that no "
            "firewall is in between"
        )

    def _note(self, names: list[str]) -> None:
        now = time.monotonic()
        if now >= self._note_at:
            _LOG.warning(message.waiting(names, self._timeout))
            self._note_at = now + message.WAIT_AGAIN_SECONDS

    def _attempt(self) -> dict[int, dict]:
        connection = self._connect()
        try:
            return self._talk(connection)
        except TimeoutError:
            raise _Unreached("timed out") from None
        except OSError as error:
            self._waiting_for = []  # it is the chief that is missing now
            raise _Unreached(f"the connection broke: {error.strerror or error}") from error
        finally:
            sockets.close_without_trace(connection)

    def _connect(self) -> socket.socket:
        place = address.split(self._config.chief_address)
        seconds = min(message.HELLO_SECONDS, max(0.01, self._deadline - time.monotonic()))
        try:
            connection = socket.create_connection(place, timeout=seconds)
        except socket.gaierror as error:
            raise _Unreached(f"its name cannot be resolved ({error.strerror})") from error
        except TimeoutError as error:
            raise _Unreached("timed out") from error
        except (OSError, UnicodeError) as error:
            raise _Unreached((getattr(error, "strerror", None) or str(error)).lower()) from error
        if connection.getsockname() == connection.getpeername():
            # Connecting to a free local port can, by chance, be given that very port: the socket talks to itself.
            sockets.close_without_trace(connection)
            raise _Unreached("connection refused")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return connection

    def _talk(self, connection: socket.socket) -> dict[int, dict]:
        lines = _Lines(connection, self._longest_line)
        try:
            now = time.monotonic()
            until = max(min(self._deadline, now + message.HELLO_SECONDS), now + _LAST_CHANCE)
            greeting = self._next(lines, until)
        except TimeoutError:
            greeting = None
        if lines.are_a_servers:
            found = "a TensorFlow server answers there instead of a waiting tfdist chief: a job is under way already"
            raise JobUnderWay(f"{self._own['task']}: {found}") if self._rejoin else _Unreached(found)
        if greeting is None or "roll_call" not in greeting:
            raise _Unreached("something else than a waiting tfdist chief answers there")
        connection.sendall(message.encode(self._own))
        while True:
            said = self._next(lines, self._deadline)
            if said is None:
                raise ConnectionError("the chief closed it")
            if "go" in said:
                return {int(rank): info for rank, info in said["go"].items()}
            if "error" in said:
                raise ClusterError(said["error"])
            if "timeout" in said:
                raise RollCallTimeout(said["timeout"])
            self._waiting_for = said.get("waiting", [])

    def _next(self, lines: _Lines, until: float) -> dict | None:
        """The chief's next message; None if the connection ends or what comes is none."""
        while True:
            now = time.monotonic()
            if now >= until:
                raise TimeoutError
            line = lines.read(min(until - now, 1.0))
            if line is not None:
                return message.decode(line)
            if self._waiting_for:
                self._note(self._waiting_for)


class _Lines:
    """The lines that arrive on a connection."""

    def __init__(self, connection: socket.socket, limit: int) -> None:
        self._connection = connection
        self._limit = limit
        self._rest = b""

    @property
    def are_a_servers(self) -> bool:
        """Whether it is a TensorFlow server that speaks, and no lines at all."""
        return self._rest[:1] == _FRAME_LENGTH and self._rest[3:4] == _SETTINGS

    def read(self, seconds: float) -> bytes | None:
        """The next line, empty at the end of the connection, None if it has not come in time."""
        until = time.monotonic() + seconds
        while b"\n" not in self._rest:
            self._connection.settimeout(max(0.001, until - time.monotonic()))
            try:
                data = self._connection.recv(65536)
            except TimeoutError:
                return None
            self._rest += data
            if not data or len(self._rest) > self._limit or self.are_a_servers:
                return b""
        if self.are_a_servers:  # a frame may contain what looks like the end of a line
            return b""
        line, _, self._rest = self._rest.partition(b"\n")
        return line
