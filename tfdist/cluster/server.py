"""The one server of a job: in rank 0, in a thread with an event loop, from the meeting until the process ends.

All else that processes tell each other outside of TensorFlow goes through it: the rendezvous (rendezvous/), the
barrier (meeting.py), the texts that they keep for each other while they train (runtime/peers.py), addresses and secret
of the direct transport (runtime/exchange.py), `tfdist check`. A process connects once, and keeps its connection.

    client                                   server
                                       <--   {"tfdist": 3, "challenge": S, "secret": true}
    {"tfdist": 3, "challenge": C,
     "proof": HMAC(secret, "client" S C)} -->
    hello                              -->
                                       <--   {"proof": HMAC(secret, "server" S C)}
                                       <--   [0, "welcome", null]
    [1, "set", name, text]             -->
                                       <--   [1, "ok", null]
    [2, "get", name, seconds, of]      -->          waits for the text, or until rank `of` is gone
                                       <--   [2, "ok", text], [2, "ok", null] after so long, or [2, "gone", of]
    [3, "decide", name, text]          -->          keeps the text, unless there is one of that name
                                       <--   [3, "ok", the one that is kept]
    [4, "delete", name]                -->
                                       <--   [4, "ok", null]
    [5, "gather", name, value]         -->          waits until all have come, and rank 0 has published the result
                                       <--   [0, "waiting", [[names], how many more, who was turned away]]   at times
                                       <--   [5, "all", result], or [5, "over", result] for one who comes afterwards
                                       <--   [0, "error", [problems]]   the processes do not fit together
                                       <--   [0, "late", [problems]]    one has not come in time

A message is a line of JSON. After the proofs each line begins with a code (of HMAC-SHA-256) of a key of its direction,
its number and its content: nobody in between can alter, repeat, reorder or leave out any. The secret is never sent,
nothing is unpickled, and what is sent can be read. Where a job has no secret, the empty one takes its place: then any
process that speaks this protocol can take the place of one that has not come, and only hosts of the cluster can end
the job.

Limits: 1 KiB a line until the proof, 64 KiB until all have met (64 MiB with a secret), 30 seconds for proof and hello.
Without a secret nothing is kept before all have met.
Beside those who belong here, 128 strangers may be connected: then the oldest of the host that has most of them is
dropped. Nothing here waits for anybody: who takes no messages has them kept, and gets no news meanwhile. The server
stops listening when all have met: TensorFlow's server takes the same port, and the connections stay. A process that is
forked has no part in them: they end with the process that has made them.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import collections
import contextlib
import functools
import hmac
import json
import logging
import math
import os
import resource
import secrets
import socket
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent import futures
from typing import Any, NamedTuple, TypeVar

from tfdist.cluster import sockets
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.foreign_text import cleaned, listed
from tfdist.cluster.sockets import UnreachedError, keep_trying

VERSION = 3
# For proof and hello: a byte now and then keeps no place. Thousands that come at once need their time.
SECONDS = 30.0
FIRST_LINE, LINE, LONG_LINE = 1 << 10, (1 << 16) + (1 << 12), 1 << 26
SPARE_STRANGERS = 128
_ACCEPTED_AT_ONCE = 4
_SPARE = 32  # files that are opened at the same time: logs, libraries; TensorFlow's own connections come later
# How long an answer may take, apart from the wait that was asked for: a chief may be busy with TensorFlow.
ANSWER_SECONDS = 60.0
_SOON = 1.0
NOTE_SECONDS, NOTE_AGAIN_SECONDS = 10.0, 60.0
FAREWELL_SECONDS = 5.0
# Processes that were started together come one after the other; all of them hear what is wrong.
LATECOMERS_SECONDS = 3.0
LOOKUP_SECONDS = 10.0  # for all names of hosts together
_LOOKUP_THREADS = 16
# A host that is cut off answers nothing at all: another address of rank 0 is tried after so long.
CONNECT_SECONDS = 3.0
_SAME_TIMEOUT = 0.5  # processes that were started together give up together, some of them before rank 0
_TICK = 0.5
_TOLD_EACH_SECOND = 200  # how many processes hear, at most, who is missing
NAMES = 20  # of processes that are missing
_KINDS = 8
_CODE = 32  # of its hexadecimal digits: 128 bits (RFC 4868)
STRANGER = "the other end does not know the secret of this job"
_ODD = "it sends something else than this version of tfdist does"

_log = logging.getLogger("tfdist")
T = TypeVar("T")


class ProcessGoneError(ConnectionError):
    """The process that should have set a text is gone."""


class BarrierTimeoutError(ClusterError):
    """Not every task has come to the barrier in time."""


class JobUnderWayError(ClusterError):
    """The chief's TensorFlow server runs already: its job has begun without this task, or before it was replaced."""


class UnderWayError(UnreachedError):
    """A TensorFlow server answers: the job has begun."""


class _BrokenError(Exception):
    """The other end breaks the rules above; the text says how."""


class _StrangerError(_BrokenError):
    """It does not know the secret."""


# --- The event loop ---------------------------------------------------------------------------------------------------

_loops: dict[int, asyncio.AbstractEventLoop] = {}
_starting = threading.Lock()


def loop() -> asyncio.AbstractEventLoop:
    """The event loop of this process, which runs in a thread of its own. A forked process has another one."""
    with _starting:
        if os.getpid() not in _loops:
            started = _loops[os.getpid()] = asyncio.SelectorEventLoop()
            started.set_exception_handler(_complain)
            threading.Thread(target=started.run_forever, name="tfdist-server", daemon=True).start()
        return _loops[os.getpid()]


def _complain(running: asyncio.AbstractEventLoop, context: dict) -> None:
    # Not that connections are there when the program ends.
    if "exception" in context:
        running.default_exception_handler(context)


def in_loop(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function in the thread of the event loop, where alone the state of connections may be touched."""

    async def call() -> Any:
        return function(*arguments)

    return asyncio.run_coroutine_threadsafe(call(), loop()).result()


# --- One end of a connection ------------------------------------------------------------------------------------------


class Wire:
    """One end of a connection: lines of JSON, and codes once both ends have proved that they know the secret."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes):
        self.reader, self.writer, self.secret = reader, writer, secret
        self.challenge = secrets.token_hex(32)
        self.limit = FIRST_LINE
        self.keys = [b"", b""]  # of what is sent, and of what comes
        self.buffer = bytearray()
        self.peer = ""
        self._counts = [0, 0]
        connected = writer.get_extra_info("socket")
        with contextlib.suppress(OSError):  # it has ended already
            sockets.notice_end(connected)
            self.peer = sockets.plain(str(connected.getpeername()[0]))
        sockets.keep_from_children(self)

    def fileno(self) -> int:
        """The number of its socket; -1 once it is closed."""
        return self.writer.get_extra_info("socket").fileno()

    async def read(self) -> Any:
        """What the other end says next."""
        searched = 0
        while (end := self.buffer.find(b"\n", searched)) < 0 and len(self.buffer) <= self.limit:
            searched = len(self.buffer)
            if not (more := await self.reader.read(1 << 16)):
                raise EOFError
            self.buffer += more
        if not 0 <= end <= self.limit:
            raise _BrokenError(f"it sends a line of more than {self.limit} bytes")
        line = bytes(self.buffer[:end])
        del self.buffer[: end + 1]
        if self.keys[1]:
            code, line = line[:_CODE], line[_CODE:]
            if not hmac.compare_digest(code, self._code(1, line)):
                raise _StrangerError("a message was altered, repeated or left out on its way")
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise _BrokenError("it sends no JSON") from None

    def send(self, message: object) -> None:
        """Sends a message; what the other end does not take is kept."""
        text = json.dumps(message, separators=(",", ":")).encode()
        if not self.writer.is_closing():
            self.writer.write((self._code(0, text) if self.keys[0] else b"") + text + b"\n")

    def abort(self) -> None:
        """Ends the connection by a reset, which leaves nothing behind."""
        if not self.writer.is_closing():
            sockets.leave_no_trace(self.writer.get_extra_info("socket"))
        self.writer.transport.abort()

    def detached(self) -> socket.socket:
        """The socket, which this leaves to the caller. It does not block."""
        connected = self.writer.get_extra_info("socket").dup()
        self.writer.transport.abort()
        return connected

    def check_version(self, said: Any) -> None:
        """Refuses another version, and what is no tfdist."""
        version = said.get("tfdist") if isinstance(said, dict) else None
        if type(version) is int and version != VERSION:
            # Nobody has proved it: it ends no job.
            raise UnreachedError(
                f"it uses another version of tfdist (received version {version} of the handshake, expected {VERSION}); "
                "install the same one on every machine"
            )
        if version != VERSION or not isinstance(said.get("challenge"), str):
            raise _BrokenError("it is no tfdist")

    def derived(self, purpose: str, other: str) -> bytes:
        """A key, or a proof, made of the secret and the challenges of both ends."""
        words = ["tfdist", str(VERSION), purpose, *sorted([self.challenge, other])]
        # With their lengths: no two lists of words give the same bytes.
        encoded = [word.encode(errors="replace") for word in words]
        data = b"".join(len(word).to_bytes(4, "big") + word for word in encoded)
        return hmac.digest(self.secret, data, "sha256")

    def is_proof(self, said: Any, end: str, other: str) -> bool:
        """Whether the other end has proved that it knows the secret."""
        proof = said.get("proof") if isinstance(said, dict) else None
        expected = self.derived(end, other).hex().encode()
        return isinstance(proof, str) and hmac.compare_digest(proof.encode(errors="replace"), expected)

    def _code(self, receives: int, text: bytes) -> bytes:
        number = self._counts[receives]
        self._counts[receives] += 1
        return hmac.digest(self.keys[receives], number.to_bytes(8, "big") + text, "sha256").hex()[:_CODE].encode()


# --- The server's end -------------------------------------------------------------------------------------------------


class _Guest(Wire):
    """A connection to a listener, of a stranger that has said nothing yet, or of a process that is introduced."""

    known = met = False  # nobody takes its place for others; it has said hello
    rank, id, who = -1, "", ""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes):
        super().__init__(reader, writer, secret)
        self.coming: dict[str, tuple[int, Any]] = {}  # to gatherings: number of its request, and what it brings


class Listener:
    """Listens at a bound socket, until it is closed, for those who know a secret.

    Args:
        bound: A TCP socket, which it takes over.
        secret: The secret; empty if there is none.
        take: Is called, in the loop's thread, with the socket of one who knows it, and with its hello. If it raises a
            ValueError, the connection ends.
        guests: How many connections those who belong here may make at the same time.

    Raises:
        OSError: If another process listens there.
    """

    def __init__(
        self,
        bound: socket.socket,
        secret: bytes,
        take: Callable[[socket.socket, Any], object] | None = None,
        guests: int = 0,
    ):
        self.secret, self._take = secret, take
        self.guests: set[_Guest] = set()
        self.strangers: dict[_Guest, str] = {}
        self._turned_away: list[str] = []
        self._most = max(1, min(guests + SPARE_STRANGERS, make_room(guests + SPARE_STRANGERS)))
        try:
            bound.listen(_ACCEPTED_AT_ONCE)
        except OSError:
            bound.close()
            raise
        self.port: int = bound.getsockname()[1]
        # A few at a time: before more are accepted, strangers have made room.
        serve = asyncio.start_server(self._serve, sock=bound, backlog=_ACCEPTED_AT_ONCE)
        self._server = asyncio.run_coroutine_threadsafe(serve, loop()).result()
        bound.listen(socket.SOMAXCONN)
        sockets.keep_from_children(bound)

    def leave(self) -> None:
        """Stops listening, and ends all connections: the port is free on return."""

        def end() -> None:
            self._server.close()
            for guest in list(self.guests):
                guest.abort()

        in_loop(end)
        in_loop(lambda: None)  # transports close their sockets in the next round

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        guest = _Guest(reader, writer, self.secret)
        self.guests.add(guest)
        self.strangers[guest] = guest.peer
        if len(self.strangers) > self._most:
            crowd = collections.Counter(self.strangers.values()).most_common(1)[0][0]
            oldest = next(one for one, peer in self.strangers.items() if peer == crowd)
            del self.strangers[oldest]
            oldest.abort()
        loop().call_later(SECONDS, lambda: guest.known or guest.abort())
        try:
            await self._attended(guest, await self._introduced(guest))
        except (_BrokenError, UnreachedError) as problem:
            if guest.keys[1] or type(problem) is not _BrokenError:
                self.turn_away(f"{guest.who or f'a process from {guest.peer}'}: {problem}")
        except (EOFError, OSError):
            pass
        finally:
            self._left(guest)
            guest.abort()

    async def _introduced(self, guest: _Guest) -> Any:
        """The server's part of the handshake; what the guest says of itself."""
        guest.send({"tfdist": VERSION, "challenge": guest.challenge, "secret": bool(self.secret)})
        said = await guest.read()
        guest.check_version(said)
        other = said["challenge"]
        if not guest.is_proof(said, "client", other):
            raise _StrangerError("it does not know the secret of this job")
        guest.send({"proof": guest.derived("server", other).hex()})
        guest.keys = [guest.derived(f"messages of the {end}", other) for end in ("server", "client")]
        guest.limit = LINE
        return await guest.read()

    async def _attended(self, guest: _Guest, said: Any) -> None:
        """Gives the connection to whom this listens for."""
        guest.known = True
        guest.send([0, "welcome", None])
        connected = guest.detached()
        try:
            # The other end reads no lines any longer: what is sent from now on is for whom it has asked.
            if not await asyncio.wait_for(loop().sock_recv(connected, 1), SECONDS):
                raise ConnectionResetError
            connected.setblocking(True)
            self._take(connected, said)
        except (OSError, ValueError, asyncio.TimeoutError):
            connected.close()

    def _left(self, guest: _Guest) -> None:
        self.guests.discard(guest)
        self.strangers.pop(guest, None)

    def turn_away(self, problem: str) -> None:
        """Notes, and says once, who does not belong here; whatever strangers say, only a few problems are kept."""
        if problem not in self._turned_away and len(self._turned_away) < _KINDS:
            self._turned_away.append(problem)
            _log.warning("tfdist: turned away %s", problem)

    def turned_away(self) -> str:
        """Who was turned away, for a message: empty, or "; turned away: ..."."""
        return "".join(f"; turned away: {problem}" for problem in self._turned_away)


def make_room(count: int) -> int:
    """Raises the soft limit of open files, up to the hard one, so that so many more files can be opened.

    Args:
        count: How many more.

    Returns:
        How many more can be: fewer if the hard limit does not allow them.

    Example:
        >>> make_room(3) >= 3
        True
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd")) + _SPARE
    if soft != resource.RLIM_INFINITY and soft < used + count:
        wanted = used + count if hard == resource.RLIM_INFINITY else min(used + count, hard)
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return count if soft == resource.RLIM_INFINITY else soft - used


# --- What a job's processes ask for -----------------------------------------------------------------------------------


class Store:
    """What the processes of a job keep for each other; in rank 0 a `Server`, in the others a `Client`.

    Every method raises a ConnectionError if the server is gone, or does not answer.
    """

    def ask(self, seconds: float, operation: str, *arguments: Any) -> tuple[str, Any]:
        """Kind and value of the answer to a request, which may take so long."""
        raise NotImplementedError

    def set(self, name: str, text: str) -> None:
        """Keeps a text; it replaces an earlier one of that name."""
        self.ask(0.0, "set", name, text)

    def decide(self, name: str, text: str) -> str:
        """Keeps a text, unless there is one of that name; returns the one that is kept, the same to all who ask."""
        return self.ask(0.0, "decide", name, text)[1]

    def delete(self, name: str) -> None:
        """Forgets a text, if there is one of that name."""
        self.ask(0.0, "delete", name)

    def get(self, name: str, seconds: float, of: int | None = None) -> str | None:
        """Waits for a text of that name, which rank `of` sets; `None` if there is none within `seconds`.

        Raises:
            ProcessGoneError: If there is none, and that rank's connection has ended.
        """
        kind, value = self.ask(seconds, "get", name, seconds, of)
        if kind == "gone":
            raise ProcessGoneError(f"rank {of} is gone")
        return value

    def glance(self, name: str) -> str | None:
        """A text of that name; `None` if there is none, or no answer soon: nobody waits here for one that hangs."""
        with contextlib.suppress(ConnectionError):
            return self.ask(_SOON - ANSWER_SECONDS, "get", name, 0.0, None)[1]
        return None


class _Own:
    """Rank 0's own request: in place of a connection."""

    def __init__(self) -> None:
        self.answer: futures.Future[tuple[str, Any]] = futures.Future()

    def send(self, message: list) -> None:
        self.answer.set_result((message[1], message[2]))


class _Wait(NamedTuple):
    """A request for a text that is not there yet."""

    asker: _Guest | _Own
    number: int
    of: int | None


class _Gathering(NamedTuple):
    """Who has come to a gathering, and what says whether a value fits."""

    check: Callable[[Any], list[str]]
    came: dict[int, _Guest]


class Server(Listener, Store):
    """Serves the other processes of a job, and keeps what they tell.

    Args:
        bound: Where to listen.
        secret: What they know; empty if there is no secret.
        size: How many processes there are, this one included.
        own: Who this process is: what it has in place of a `hello`.
        hosts: Without a secret: the hosts of the cluster, which alone can end the job.
        stays_open: Whether a process that is started again, while this one goes on, can take its former place.

    Raises:
        ClusterError: If this process may not open as many files as there are processes.
        OSError: If another process listens there.
    """

    def __init__(
        self,
        bound: socket.socket,
        secret: bytes,
        size: int,
        own: dict,
        hosts: Collection[str] = (),
        stays_open: bool = False,
    ):
        self._size, self._own, self._hosts, self._stays_open = size, own, sorted(hosts), stays_open
        self._texts: dict[str, str] = {}
        self._waiting: collections.defaultdict[str, list[_Wait]] = collections.defaultdict(list)
        self._gatherings: dict[str, _Gathering] = {}
        self._over: dict[str, str] = {}
        self._ranks: dict[int, _Guest] = {}
        self._left_at: dict[int, float] = {}
        self._problems: list[str] = []
        self._changed = asyncio.Event()
        self._found: set[str] = set()
        self._lookups: list[threading.Thread] = []
        room, hard_limit = make_room(size), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if room < size:
            bound.close()
            raise ClusterError(
                f"Received: a limit of {hard_limit} open files for rank 0, which can open {max(0, room)} more. "
                f"Expected: one for each of {size} processes. Raise the hard limit of this process to "
                f"{hard_limit + size - room} or more: `ulimit -Hn` shows it; it is set in "
                "/etc/security/limits.conf (nofile), by LimitNOFILE= of a systemd service, by `docker run --ulimit "
                "nofile=`, for Slurm by PropagateResourceLimits"
            )
        super().__init__(bound, secret, guests=size)

    def ask(self, seconds: float, operation: str, *arguments: Any) -> tuple[str, Any]:
        """See `Store`."""
        own = _Own()
        loop().call_soon_threadsafe(self._answer, own, 0, operation, list(arguments))
        try:
            return own.answer.result(seconds + ANSWER_SECONDS)
        except futures.TimeoutError:
            raise ConnectionError("this process has not answered itself") from None

    def collect(
        self,
        name: str,
        value: Any,
        timeout: float,
        names: Callable[[Iterable[int]], list[str]],
        check: Callable[[Any], list[str]],
    ) -> dict[int, Any]:
        """Waits until all processes have come to a gathering; the value of each, by rank. `publish` lets them go.

        Args:
            name: The gathering.
            value: That of this process.
            timeout: How long to wait, in seconds.
            names: Names of ranks, for messages.
            check: Says what is wrong with another process' value, or raises a ValueError if that is something else
                than this version of tfdist says: it ends the job, unless it is a stranger's.

        Raises:
            BarrierTimeoutError: If one does not come in time; it is named, and all hear it.
            ClusterError: If they do not fit together, which all hear.
        """
        coming = self._collected(name, timeout, names, check)
        return {0: value, **asyncio.run_coroutine_threadsafe(coming, loop()).result()}

    def publish(self, name: str, result: Any) -> None:
        """Lets all go who have come to a gathering, with a result."""
        text = pack(result)

        def publish() -> None:
            self._over[name] = text
            # Before they hear: who knows that all have met looks for TensorFlow's server at this port.
            if not self._stays_open:
                self._server.close()
            for guest in self._gatherings.pop(name).came.values():
                guest.limit = LONG_LINE
                guest.send([guest.coming.pop(name)[0], "all", text])

        in_loop(publish)
        _stay_while(lambda: any(_is_behind(guest) for guest in self._ranks.values()), FAREWELL_SECONDS)

    def wait_until_left(self, seconds: float) -> None:
        """Waits until no other process is connected: nobody needs the texts then."""
        _stay_while(lambda: self._ranks, seconds)

    # What follows runs in the loop's thread.

    def _left(self, guest: _Guest) -> None:
        super()._left(guest)
        self._changed.set()
        for gathering in self._gatherings.values():
            if gathering.came.get(guest.rank) is guest:
                del gathering.came[guest.rank]
        if self._ranks.get(guest.rank) is guest:
            del self._ranks[guest.rank]
            self._left_at[guest.rank] = time.monotonic()
            for name in [*self._waiting]:
                self._answer_waits(name, "gone", guest.rank, lambda one: one.of == guest.rank)

    async def _attended(self, guest: _Guest, said: Any) -> None:
        match said:
            case {"rank": int() as rank, "id": str() as identity, "who": str() as who}:
                guest.rank, guest.id, guest.who, guest.met = rank, identity[:100], cleaned(who, 300), True
            case _:
                raise _BrokenError(_ODD)
        before = self._ranks.get(guest.rank)
        other = before.id if before else self._own["id"] if guest.rank == 0 else guest.id
        may_come = True
        if other != guest.id and not self._over:
            whose = before.who if before else self._own["who"]
            problem = f"two processes claim the same rank {guest.rank}: {whose} and {guest.who}; give each its own"
            may_come = await self._decided(guest, [problem], before)
        if self._over and not self._stays_open:
            raise _BrokenError("it comes after all have met")
        if may_come:
            self._place(guest)
        while True:
            match await guest.read():
                case [int() as number, str() as operation, *arguments] if (
                    self.secret or self._over or operation == "gather"
                ):
                    self._answer(guest, number, operation, arguments)
                case _:
                    raise _BrokenError(_ODD)

    def _place(self, guest: _Guest) -> None:
        """Gives a process its rank; what is none of the job's ranks stays a stranger."""
        if 0 < guest.rank < self._size:
            before, self._ranks[guest.rank] = self._ranks.get(guest.rank), guest
            guest.known, guest.limit = True, LONG_LINE if self.secret or self._over else LINE
            self.strangers.pop(guest, None)
            if before is not None:
                before.abort()
        guest.send([0, "welcome", None])

    def _answer(self, asker: _Guest | _Own, number: int, operation: str, arguments: list) -> None:
        match [operation, *arguments]:
            case ["set", str(name), str(text)]:
                self._keep(name, text)
                asker.send([number, "ok", None])
            case ["decide", str(name), str(text)]:
                if name not in self._texts:
                    self._keep(name, text)
                asker.send([number, "ok", self._texts[name]])
            case ["delete", str(name)]:
                self._texts.pop(name, None)
                asker.send([number, "ok", None])
            case ["get", str(name), int() | float() as seconds, int() | None as of]:
                if of in self._left_at and of not in self._ranks and name not in self._texts:
                    asker.send([number, "gone", of])
                elif name in self._texts or not seconds > 0:
                    asker.send([number, "ok", self._texts.get(name)])
                else:
                    self._waiting[name].append(one := _Wait(asker, number, of))
                    late = functools.partial(self._answer_waits, name, "ok", None, lambda other: other is one)
                    loop().call_later(min(seconds, 1e6), late)
            case ["gather", str(name), value] if isinstance(asker, _Guest):
                self._come(asker, number, name, value)
            case _:
                raise _BrokenError(_ODD)

    def _keep(self, name: str, text: str) -> None:
        self._texts[name] = text
        self._answer_waits(name, "ok", text, lambda one: True)

    def _answer_waits(self, name: str, kind: str, value: Any, which: Callable[[_Wait], bool]) -> None:
        waiting = self._waiting.pop(name, [])
        for one in filter(which, waiting):
            one.asker.send([one.number, kind, value])
        if left := [one for one in waiting if not which(one)]:
            self._waiting[name] = left

    def _come(self, guest: _Guest, number: int, name: str, value: Any) -> None:
        if name in self._over:
            guest.send([number, "over", self._over[name]])
            return
        if guest.coming and not (self.secret or self._over):
            raise _BrokenError("it comes to two meetings at the same time")
        guest.coming[name] = number, value
        if name in self._gatherings:
            self._consider(name, guest)

    def _consider(self, name: str, guest: _Guest) -> None:
        gathering = self._gatherings[name]
        try:
            problems = gathering.check(guest.coming[name][1])
        except ValueError as error:
            problems = [
                f"{self._own['who']} hears something else than this version of tfdist says ({cleaned(error, 200)}); "
                "install the same one on every machine"
            ]
        if problems:
            loop().create_task(self._decided(guest, problems))
        elif self._ranks.get(guest.rank) is guest:
            gathering.came[guest.rank] = guest
            self._changed.set()
        else:
            self.turn_away(f"{guest.who} from {guest.peer}, who is no task of this job")
            guest.abort()

    async def _decided(self, guest: _Guest, problems: list[str], rival: _Guest | None = None) -> bool:
        """Decides about a process that does not fit: it ends the job, unless it, or its rival, is a stranger.

        Returns whether its rival was one, and it may come.
        """
        stranger = None if await self._is_ours(guest) else guest
        if stranger is None and rival is not None and not await self._is_ours(rival):
            stranger = rival
        if stranger is None:
            self._problems += [problem for problem in problems if problem not in self._problems]
            self._changed.set()
            return False
        self.turn_away(f"a process from {stranger.peer}, which is no host of this cluster ({problems[0]})")
        stranger.send([0, "error", problems])
        self._left(stranger)
        stranger.writer.close()
        loop().call_later(FAREWELL_SECONDS, stranger.abort)
        return stranger is rival

    async def _is_ours(self, guest: _Guest) -> bool:
        """Whether a process belongs to the job: by the secret, or else by its host, if its name is known in time."""
        place = guest.peer
        if self.secret or place in self._hosts or sockets.is_loopback(place) or sockets.is_own(place):
            return True
        if not self._lookups:
            parts = [self._hosts[part::_LOOKUP_THREADS] for part in range(_LOOKUP_THREADS)]
            # No end of the program waits for them.
            self._lookups = [threading.Thread(target=self._look_up, args=(part,), daemon=True) for part in parts]
            for thread in self._lookups:
                thread.start()
        deadline = time.monotonic() + LOOKUP_SECONDS
        while place not in self._found and time.monotonic() < deadline and any(one.is_alive() for one in self._lookups):
            await asyncio.sleep(0.02)
        return place in self._found

    def _look_up(self, hosts: Iterable[str]) -> None:
        for host in hosts:
            self._found.update(sockets.addresses_of(host))

    async def _collected(
        self,
        name: str,
        timeout: float,
        names: Callable[[Iterable[int]], list[str]],
        check: Callable[[Any], list[str]],
    ) -> dict[int, Any]:
        deadline, note, told_at = time.monotonic() + timeout, _Note(timeout), 0.0
        came = self._gatherings.setdefault(name, _Gathering(check, {})).came
        for guest in [guest for guest in self.guests if name in guest.coming]:
            self._consider(name, guest)
        news: list = []
        while True:
            missing = [rank for rank in range(1, self._size) if rank not in came]
            if self._problems:
                left = min(deadline, time.monotonic() + LATECOMERS_SECONDS)
                await self._until(lambda: len(self._ranks) >= self._size - 1, left)
                await self._break_off("error", ClusterError(self._problems))
            if not missing:
                return {rank: guest.coming[name][1] for rank, guest in sorted(came.items())}
            now = time.monotonic()
            gone = [rank for rank in missing if rank in self._left_at and rank not in self._ranks]
            if gone and self._over and not self._stays_open:
                await self._break_off("error", ClusterError(f"{listed(names(gone))} is gone, after all tasks had met"))
            if now >= deadline:
                late = [rank for rank in missing if self._left_at.get(rank, 0.0) <= now - _SAME_TIMEOUT] or missing
                problem = not_come(timeout, names(late), 0, self.turned_away())
                await self._break_off("late", BarrierTimeoutError(problem))
            note(names(missing), 0, self.turned_away())
            shown = [names(missing[:NAMES]), max(0, len(missing) - NAMES), self.turned_away()]
            if now - told_at >= max(_TICK, self._size / _TOLD_EACH_SECOND) and shown != news:
                news, told_at = shown, now
                for guest in came.values():
                    if not _is_behind(guest):
                        guest.send([0, "waiting", news])
            await self._until(lambda: self._problems or len(came) >= self._size - 1, min(deadline, now + _TICK))

    async def _break_off(self, kind: str, error: ClusterError) -> None:
        """Tells all why they cannot go on, lets them leave, and ends."""
        self._server.close()
        for guest in list(self.guests):
            if guest.met:
                guest.send([0, kind, error.problems])
        await self._until(lambda: not any(guest.met for guest in self.guests), time.monotonic() + FAREWELL_SECONDS)
        for guest in list(self.guests):
            guest.abort()
        raise error

    async def _until(self, true: Callable[[], object], deadline: float) -> None:
        while not true() and (left := deadline - time.monotonic()) > 0:
            self._changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)


class _Note:
    """Warns of those who are missing: after some time, and then again at times."""

    def __init__(self, timeout: float) -> None:
        self._timeout, self._at = timeout, time.monotonic() + NOTE_SECONDS

    def __call__(self, names: list[str], more: int, why: str) -> None:
        if names and time.monotonic() >= self._at:
            _log.warning(waiting(self._timeout, names, more, why))
            self._at = time.monotonic() + NOTE_AGAIN_SECONDS


def _is_behind(guest: _Guest) -> bool:
    """Whether it has not taken all that was sent."""
    return guest.writer.transport.get_write_buffer_size() > 0


def _stay_while(goes_on: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while in_loop(goes_on) and time.monotonic() < deadline:
        time.sleep(0.01)


# --- The client's end -------------------------------------------------------------------------------------------------


def call(place: tuple[str, int], secret: bytes, said: Any, seconds: float, patience: float = math.inf) -> Wire:
    """Connects to a listener, and says hello.

    Args:
        place: Host and port.
        secret: What the listener knows.
        said: The hello.
        seconds: How long to try to connect.
        patience: How long its answers may take.

    Raises:
        UnreachedError: If nothing, or something else, answers.
        ClusterError: If it refuses the hello.
    """
    try:
        connected = sockets.connect(place, seconds)
    except socket.gaierror as error:
        raise UnreachedError(f"its name cannot be resolved ({error.strerror})") from error
    except (OSError, UnicodeError) as error:
        raise UnreachedError(sockets.reason_of(error).lower()) from error
    connected.setblocking(False)

    async def meet() -> Wire:
        wire = Wire(*await asyncio.open_connection(sock=connected), secret)
        try:
            await asyncio.wait_for(_introduce(wire, said), min(patience, SECONDS))
        except Exception as error:
            wire.writer.close()
            raise _unreached(error, wire) from None
        return wire

    return asyncio.run_coroutine_threadsafe(meet(), loop()).result()


async def _introduce(wire: Wire, said: Any) -> None:
    """The client's part of the handshake, until the hello is welcome."""
    wire.buffer += await wire.reader.readexactly(4)
    if is_a_servers(bytes(wire.buffer)):
        raise UnderWayError(
            "a TensorFlow server answers there instead of a waiting tfdist chief: a job is under way already"
        )
    greeting = await wire.read()
    wire.check_version(greeting)
    if bool(greeting.get("secret")) != bool(wire.secret):
        here, there = ("has", "has none") if wire.secret else ("has no", "has one")
        raise UnreachedError(
            f"this process {here} TFDIST_TOKEN, and the other end {there}; set it to the same text on all tasks, "
            "or on none (where it is not set, a secret of the system takes its place)"
        )
    other = greeting["challenge"]
    proof = wire.derived("client", other).hex()
    wire.send({"tfdist": VERSION, "challenge": wire.challenge, "proof": proof})
    wire.keys[0] = wire.derived("messages of the client", other)
    wire.send(said)
    if not wire.is_proof(await wire.read(), "server", other):
        raise _StrangerError("it has another secret")
    wire.keys[1], wire.limit = wire.derived("messages of the server", other), 4 * LONG_LINE
    match await wire.read():
        case [0, "welcome", _]:
            pass
        case [0, "error" | "late", problems]:
            raise ClusterError(_texts(problems))
        case _:
            raise _BrokenError(_ODD)


def _unreached(error: Exception, wire: Wire) -> Exception:
    """What the end of a connection means to whom it connects with the server."""
    if isinstance(error, _StrangerError):
        return UnreachedError(f"{STRANGER} ({error})")
    if isinstance(error, (_BrokenError, asyncio.TimeoutError)):
        why = str(error) or "it is silent"
        return UnreachedError(f"something else than a waiting tfdist chief answers there ({why})")
    if isinstance(error, (EOFError, OSError)):
        hung_up = wire.keys[0] and not wire.keys[1]
        return UnreachedError(f"{STRANGER} (it hung up)" if hung_up else "it was there, and is gone")
    return error


def connected(place: tuple[str, int], secret: bytes, said: Any, seconds: float) -> socket.socket:
    """The socket of a connection to a `Listener` that has a `take`; see `call` for arguments and errors."""
    wire = call(place, secret, said, seconds, seconds)
    try:
        found = in_loop(wire.detached)
        found.setblocking(True)
        found.sendall(b"!")
    except OSError as error:
        raise UnreachedError(sockets.reason_of(error)) from None
    return found


class Client(Store):
    """The connection of another process to the server of its job; see `call` for arguments and errors."""

    def __init__(self, place: tuple[str, int], secret: bytes, said: dict, seconds: float, patience: float = math.inf):
        self._wire = call(place, secret, said, seconds, patience)
        self._name = sockets.join_address(*place)
        self._process = os.getpid()
        self._number = 0
        self._pending: dict[int, asyncio.Future[tuple[str, Any]]] = {}
        self._problem: Exception | None = None
        self.news: list = [[], 0, ""]
        asyncio.run_coroutine_threadsafe(self._listen(), loop())

    def ask(self, seconds: float, operation: str, *arguments: Any) -> tuple[str, Any]:
        """See `Store`."""
        of = arguments[2] if operation == "get" else None
        try:
            return self._begun(operation, *arguments).result(seconds + ANSWER_SECONDS)
        except futures.TimeoutError:
            problem = "does not answer"
        except UnreachedError:
            problem = "is gone"
        kind = ProcessGoneError if of == 0 and problem == "is gone" else ConnectionError
        raise kind(f"the process that keeps the messages of this job, {self._name}, {problem}")

    def gather(self, name: str, value: Any, deadline: float, note: Callable[..., object]) -> tuple[bool, str]:
        """Waits until all have come to a gathering; whether that was before this one came, and the packed result.

        Args:
            name: The gathering.
            value: That of this process.
            deadline: Until when to wait, on `time.monotonic`'s clock.
            note: Is called now and then with what rank 0 says of those who are missing: `news`.

        Raises:
            ClusterError: If rank 0 says that all cannot go on.
            UnreachedError: If it is gone, or nothing has come in time.
        """
        coming = self._begun("gather", name, value)
        while True:
            try:
                kind, result = coming.result(max(0.0, min(1.0, deadline - time.monotonic())))
                return kind == "over", result
            except futures.TimeoutError:
                note(*self.news)
                if time.monotonic() >= deadline:
                    raise UnreachedError("it is there, but the others have not come") from None

    @property
    def ends(self) -> tuple[str, str]:
        """The addresses of both ends of the connection: that of this process, and the one that it has reached."""
        names = (self._wire.writer.get_extra_info(name) for name in ("sockname", "peername"))
        return tuple(sockets.plain(str(name[0])) for name in names)

    @property
    def is_lost(self) -> bool:
        """Whether the connection has ended."""
        return self._problem is not None

    def leave(self) -> None:
        """Ends the connection: this rank then counts as gone."""
        in_loop(self._end, UnreachedError("this process has left"))

    def _begun(self, operation: str, *arguments: Any) -> futures.Future:
        if os.getpid() != self._process:
            raise UnreachedError("a forked process has no connection of its own")
        return asyncio.run_coroutine_threadsafe(self._asked(operation, arguments), loop())

    # What follows runs in the loop's thread.

    async def _asked(self, operation: str, arguments: Sequence[Any]) -> tuple[str, Any]:
        if self._problem is not None:
            raise self._problem
        self._number += 1
        self._pending[self._number] = waiting = loop().create_future()
        self._wire.send([self._number, operation, *arguments])
        return await waiting

    async def _listen(self) -> None:
        try:
            while True:
                match await self._wire.read():
                    case [0, "waiting", [list() as names, int() as more, why]]:
                        self.news = [_texts(names), more, cleaned(why)]
                    case [0, "error", problems]:
                        raise ClusterError(_texts(problems))
                    case [0, "late", problems]:
                        raise BarrierTimeoutError(_texts(problems))
                    case [int() as number, kind, value] if number in self._pending:
                        self._pending.pop(number).set_result((kind, value))
                    case _:
                        raise _BrokenError(_ODD)
        except Exception as error:
            self._end(_unreached(error, self._wire))

    def _end(self, problem: Exception) -> None:
        """Ends the connection, and all that waits for an answer by it."""
        if self._problem is None:
            self._problem = problem
            for waiting in self._pending.values():
                waiting.set_exception(problem)
            self._pending.clear()
            self._wire.writer.close()


def attend(
    who: str,
    first: str,
    places: Sequence[tuple[str, int]],
    secret: bytes,
    own: dict,
    name: str,
    value: Callable[[Client], Any],
    read: Callable[[str], T],
    timeout: float,
    unreached: Callable[[str], str],
    before: Client | None = None,
    rejoin: bool = False,
) -> tuple[Client, bool, T]:
    """The part of every rank but 0 in a gathering: tries until it reaches rank 0, and waits until all have come.

    Args:
        who: This process, for messages.
        first: Rank 0, for messages.
        places: Host and port where rank 0 may be.
        secret: The secret of the job.
        own: What this process says as its `hello`.
        name: The gathering.
        value: What this process tells, once it is connected.
        read: Reads the result; it raises an `UnreachedError` if that is something else.
        timeout: How long to try, in seconds.
        unreached: What to say if rank 0 was not reached, with why.
        before: The connection, if there is one since an earlier gathering.
        rejoin: Whether to raise `JobUnderWayError` if a TensorFlow server answers in the place of rank 0.

    Returns:
        The connection, whether the others had come before, and the result.

    Raises:
        BarrierTimeoutError: If rank 0 is not found, or another process has not come; names it.
        ClusterError: If rank 0 says that the processes do not fit together.
    """
    deadline = time.monotonic() + timeout
    problems: dict[str, str] = {}
    note = _Note(timeout)
    clients = [before] if before else []

    def attempt(place: tuple[str, int], left: float) -> tuple[Client, bool, T]:
        # Where several ports are tried, a service that waits for us to speak may be at most of them.
        patience = CONNECT_SECONDS if len(places) > 1 and sockets.join_address(*place) not in problems else left
        try:
            client = clients.pop() if clients else Client(place, secret, own, min(CONNECT_SECONDS, left), patience)
        except UnderWayError as error:
            if rejoin:
                raise JobUnderWayError(f"{who}: {error}") from None
            raise
        try:
            over, result = client.gather(name, value(client), deadline, note)
            return client, over, read(result)
        except BaseException as error:
            client.leave()
            # Before the time is over, it is rank 0 that is missing.
            if isinstance(error, UnreachedError) and client.news[0] and time.monotonic() >= deadline:
                raise BarrierTimeoutError(not_come(timeout, *client.news)) from None
            raise

    try:
        attempts = {sockets.join_address(*place): functools.partial(attempt, place) for place in places}
        return keep_trying(attempts, deadline, problems, lambda: note([first], 0, f": {_by_problem(problems)}"))
    except UnreachedError:
        raise BarrierTimeoutError(unreached(_by_problem(problems))) from None


def hello(rank: int, who: str) -> dict:
    """How a process introduces itself.

    Args:
        rank: Its rank.
        who: What tells people which one it is.
    """
    return {"rank": rank, "id": secrets.token_hex(8), "who": who}


# --- Texts and messages -----------------------------------------------------------------------------------------------


def is_a_servers(first: bytes) -> bool:
    """Whether a connection begins as that to a TensorFlow server does: with an HTTP/2 frame of settings.

    Example:
        >>> is_a_servers(b"\\0\\0\\x12\\4"), is_a_servers(b"\\0\\0\\0\\x10")
        (True, False)
    """
    return first[:1] == b"\0" and first[3:4] == b"\4"  # after the length, three bytes, which is below 64 KiB


def waiting(timeout: float, names: list[str], more: int, why: str) -> str:
    """The warning while processes are missing.

    Example:
        >>> waiting(300.0, ["worker 1 (b:1)"], 0, "")
        'tfdist: waiting for worker 1 (b:1) (start_timeout 300 s)'
    """
    return f"tfdist: waiting for {listed(names, more, NAMES)} (start_timeout {round(timeout, 1):g} s){why}"


def not_come(timeout: float, names: list[str], more: int, turned_away: str) -> str:
    """The error if processes have not come."""
    return (
        f"not all tasks came within start_timeout={round(timeout, 1):g} s; missing: {listed(names, more, NAMES)}; "
        "start them, look into their output for why they did not start, and check that their hosts reach that of "
        f"rank 0 (a firewall? another network: TFDIST_INTERFACE, TFDIST_MEETING){turned_away}"
    )


def pack(value: object) -> str:
    """JSON, compressed, as text: what all hear of all grows with the square of their number."""
    return base64.b64encode(zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 9)).decode()


def unpack(text: object, most: int) -> dict:
    """The JSON object that `pack` has packed.

    Args:
        text: What has come.
        most: The most bytes that it may stand for: a few could stand for gigabytes.

    Raises:
        UnreachedError: If it is something else.

    Example:
        >>> unpack(pack({"a": 1}), 100)
        {'a': 1}
    """
    try:
        value = json.loads(zlib.decompressobj().decompress(base64.b64decode(str(text)), most))
    except (ValueError, RecursionError, binascii.Error, zlib.error):
        value = None
    if not isinstance(value, dict):
        raise UnreachedError("it sends no compressed JSON object")
    return value


def _texts(found: object) -> list[str]:
    """Texts of the other end, fit to be printed."""
    return [cleaned(text) for text in (found if isinstance(found, list) else [found] if found else [])]


def _by_problem(problems: dict[str, str]) -> str:
    """The problems, each with the places where it was seen, if there are several."""
    if len(problems) == 1:
        return next(iter(problems.values()))
    seen = dict.fromkeys(problems.values())
    return "; ".join(f"{', '.join(one for one in problems if problems[one] == what)}: {what}" for what in seen)
