"""The launcher's connections to the agents of hosts: made, spoken through, and given up when they fail.

They speak in lines of JSON through the standard input and output of ssh. Before an agent's first line comes whatever
the user's shell has printed over there. The agent's first line is the one with a greeting that only the agent can know.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import secrets
import selectors
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import tfdist
from tfdist.cluster.foreign_text import cleaned
from tfdist.cluster.sockets import is_loopback, is_own, join_address
from tfdist.json_schema import NOTHING, check
from tfdist.launcher.hosts.places import ListedHost
from tfdist.launcher.operating_system import end_within
from tfdist.launcher.plan import Machine

# An environment can have megabytes.
_LONGEST = 64 << 20
_CHUNK = 256 * 1024
_MOST_READS = 16
_NOISE = 4096

BEAT = 2.0

Message = dict[str, Any]

# What an agent says, by kind.
_SAID: dict[str, dict[str, Any]] = {
    "hello": {"greeting": str, "version": str, "machine": str, "cores": [int], "gpus": [str], "shares_logs": bool},
    "ready": {"address": str, "ports": [int]},
    "error": {"text": str, "name?": str},
    "beat": {},
    "message": {"text": str},
    "events": {"text": str},
    "output": {"name": str, "data": str},
    "started": {"name": str, "pid": int},
    "progress": {
        **{"name": str, "time": float, "reports": int, "phase": str},
        **{"step": int, "resumed_step": (int, NOTHING), "waits_to": str},
    },
    "closed": {"name": str},
    "end": {"name": str, "status": int},
    "over": {"name": str},
}


def check_said(said: Message) -> None:
    """Raises ValueError unless an agent may say this."""
    if said["kind"] not in _SAID:
        raise ValueError("a kind that this version does not know")
    check(said, {"kind": str, **_SAID[said["kind"]]})


class LineError(ValueError):
    """A line that is no message: something else prints into the connection."""


def line(**fields: Any) -> bytes:
    """The line of a message.

    Example:
        >>> line(kind="beat")
        b'{"kind": "beat"}\\n'
    """
    return json.dumps(fields).encode() + b"\n"


class Lines:
    """Finds the messages in bytes that come in pieces.

    Args:
        greeting: stands in the first message; all before that is noise. Empty: there is no noise.

    Attributes:
        noise: the end of what came before the first message.

    Example:
        >>> lines = Lines("123")
        >>> lines.feed(b"Welcome to node-1!\\n{"), lines.feed(line(kind="hello", greeting="123")[1:])
        ([], [{'kind': 'hello', 'greeting': '123'}])
        >>> lines.noise
        b'Welcome to node-1!\\n'
    """

    def __init__(self, greeting: str = "") -> None:
        self._greeting = greeting  # empty once it has come
        self._begun = b""
        self.noise = b""

    def feed(self, data: bytes) -> list[Message]:
        """Takes bytes, and returns what is complete.

        Raises:
            LineError: after the greeting there is something else than messages.
        """
        *complete, self._begun = (self._begun + data).split(b"\n")
        found: list[Message] = []
        for text in complete:
            said = _read(text)
            if said is not None and said.get("greeting") == self._greeting:
                self._greeting = ""
            if self._greeting:
                self.noise = (self.noise + text + b"\n")[-_NOISE:]
            elif said is None:
                raise LineError(repr(text[:40]))
            else:
                found.append(said)
        if len(self._begun) > _LONGEST:
            if not self._greeting:
                raise LineError(repr(self._begun[:40]))
            self._begun = b""
        return found


def _read(text: bytes) -> Message | None:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) and isinstance(said.get("kind"), str) else None


class Channel:
    """One end of a connection. Nothing waits here: what cannot be sent now is sent by a later call.

    Args:
        reading: unbuffered file, which belongs to the channel from now on.
        writing: the same.
        greeting: see `Lines`.

    Attributes:
        reading: the file.
        lines: finds the messages.
        heard: when something has come, on the clock of `time.monotonic`.
        has_ended: whether nothing more can come.
        unsent: what waits to be sent.
    """

    def __init__(self, reading: FileIO, writing: FileIO, greeting: str = "") -> None:
        self.reading, self._writing = reading, writing
        for file in (reading, writing):
            os.set_blocking(file.fileno(), False)
        self.lines = Lines(greeting)
        self.heard = self._beaten = time.monotonic()
        self.has_ended = False
        self.unsent = bytearray()

    def send(self, line: bytes = b"") -> None:
        """Sends a line, or what still waits, as far as that is possible now."""
        self.unsent += line
        # Nobody reads it any more: that is noticed where something should come from there.
        with contextlib.suppress(OSError, ValueError):
            while self.unsent and (count := self._writing.write(self.unsent[:_CHUNK])):
                del self.unsent[:count]

    def beat(self) -> None:
        """Shows the other end every now and then that this one is alive. To be called again and again."""
        if time.monotonic() >= self._beaten + BEAT:
            self._beaten = time.monotonic()
            self.send(line(kind="beat"))
        else:
            self.send()

    def receive(self) -> list[Message]:
        """What has come since the last call.

        Raises:
            LineError: something else than messages has come.
        """
        found: list[Message] = []
        # Also the end, where that is right behind: what it has caused elsewhere is known in a moment.
        for _ in range(_MOST_READS):
            data = None
            with contextlib.suppress(OSError):
                data = b"" if self.has_ended else self.reading.read(_CHUNK)
            if data is None:
                break
            self.has_ended = not data
            if self.has_ended:
                break
            self.heard = time.monotonic()
            found += self.lines.feed(data)
        return found

    def close(self) -> None:
        """Closes the connection; a second call does nothing."""
        self._writing.close()
        self.reading.close()


# A host that says nothing for so long is lost; sooner, if a process elsewhere has failed meanwhile: that comes from it.
SILENCE = 20.0
SUSPICIOUS = 8.0
# Nobody can be asked for anything. The connections of ~/.ssh/config (ControlPath) are used, but none is left behind.
_OPTIONS = (
    *("-T", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ControlMaster=no", "-o", "ClearAllForwardings=yes", "-o", "RemoteCommand=none"),
)
_SSH_FAILED = 255
# By exit code.
_WHY_NOT_REACHED = {
    91: (
        "host {name} has no folder {folder}. Expected: the same folder on all hosts, with the same program; use a "
        "shared file system, or copy it there"
    ),
    92: (
        "host {name} has no {python}. Expected: the same Python in the same place on all hosts; name that of the other "
        "hosts by --remote-python"
    ),
    93: (
        "host {name}: {python} has no tfdist there. Expected: tfdist {version}; install it there, or name a Python "
        "that has it by --remote-python"
    ),
    _SSH_FAILED: (
        "host {name} cannot be reached: {ssh} says: {said}. Expected: {attempt} works and asks for nothing: a key "
        "without a passphrase or in ssh-agent, and the host in ~/.ssh/known_hosts; try it"
    ),
}
# In one line without quotes that a shell other than sh would take for something else.
_SCRIPT = "cd {folder} 2>/dev/null || exit 91; command -v {python} >/dev/null || exit 92; exec {python} -c {code}"
_PARENT = str(Path(tfdist.__file__).resolve().parent.parent)
# Lets Python run the agent. Where tfdist is not installed over there, it may be found where it is here.
_CODE = (
    f"import sys, importlib.util as util; sys.path = [p for p in sys.path if p] + [{_PARENT!r}]; "
    "sys.exit(93) if util.find_spec('tfdist') is None else None; "
    "from tfdist.launcher.hosts.agent import main; main()"
)
_END_SECONDS = 5.0
_CODE_SECONDS = 2.0
_MOST_SAID, _SHOWN = 8192, 500


class HostsError(OSError):
    """Hosts that cannot be reached or used; the text names each, why, and what to do."""


@dataclass(frozen=True)
class Reach:
    """How hosts are reached, and what their agents are told about the run.

    Attributes:
        ssh: the command, with options.
        python: that of the other hosts; None: the path of this one.
        folder: where the processes work.
        run_id: name of the run.
        log_dir: absolute folder of the logs.
        variables: those of this machine that go to other hosts.
    """

    ssh: tuple[str, ...]
    python: str | None
    folder: str
    run_id: str
    log_dir: str
    variables: Mapping[str, str]

    def command(self, name: str, is_here: bool) -> list[str]:
        """The argument vector that runs the agent of a host.

        Example:
            >>> words = Reach(("ssh",), None, "/home/me", "run", "/home/me/logs", {}).command("node-1", is_here=False)
            >>> words[:2], words[-2]
            (['ssh', '-T'], 'node-1')
        """
        if is_here:
            return [sys.executable, "-c", _CODE]
        words = {"folder": self.folder, "python": self.python or sys.executable, "code": _CODE}
        script = _SCRIPT.format(**{key: shlex.quote(word) for key, word in words.items()})
        # The user's own shell over there may be another one than sh.
        return [*self.ssh, *_OPTIONS, name, f"exec /bin/sh -c {shlex.quote(script)}"]


def is_this_machine(name: str) -> bool:
    """Whether a host is the one that this runs on; an alias of ~/.ssh/config is another one.

    Example:
        >>> is_this_machine("localhost"), is_this_machine("somebody@localhost")
        (True, False)
    """
    user, _, host = name.rpartition("@")
    if user and user != getpass.getuser():
        return False
    return host == socket.gethostname() or is_loopback(host) or is_own(host)


class Connection:
    """A connection to an agent; nothing in it waits for the other side, but `close`.

    Args:
        host: whose agent it is.
        reach: how it is reached.
        hello: what the agent is told first.
        is_here: whether it is on this machine.

    Attributes:
        host: whose agent it is.
        lost: why it is of no use any more; empty while it is.
        machine: what the host has for the processes; None until the agent has told it.
        identity: of the machine, by which two names of one are noticed.
        answer: what the agent has said to "prepare"; None at first.
        pid: of ssh.
        is_here: whether it is on this machine.
    """

    def __init__(self, host: ListedHost, reach: Reach, hello: Message, is_here: bool) -> None:
        self.host = host
        self.lost = ""
        self.machine: Machine | None = None
        self.identity = ""
        self.answer: Message | None = None
        self.is_here = is_here
        self._reach = reach
        self._said = b""
        greeting = secrets.token_hex(16)
        try:
            self._process = subprocess.Popen(
                reach.command(host.name, is_here),
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # away from our terminal: no Ctrl-C reaches it
            )
        except OSError as error:
            raise HostsError(
                f"--ssh {shlex.join(reach.ssh)}: {error.strerror}. Expected: the client of OpenSSH; install it (the "
                "package openssh-client), or say how to call it"
            ) from None
        self.pid = self._process.pid
        os.set_blocking(self._process.stderr.fileno(), False)
        self.channel = Channel(self._process.stdout, self._process.stdin, greeting)
        self.send(**hello, greeting=greeting, is_here=self.is_here)

    @property
    def name(self) -> str:
        """What the user calls the host."""
        return self.host.name

    @property
    def silence(self) -> float:
        """For how many seconds nothing has come from it."""
        return time.monotonic() - self.channel.heard

    def send(self, **fields: Any) -> None:
        """Sends a message."""
        self.channel.send(line(**fields))

    def hear(self) -> list[Message]:
        """What has come since the last call; afterwards the connection may be lost."""
        if self.lost:
            return []
        self._hear_errors()
        found: list[Message] = []
        try:
            found = self.channel.receive()
        except LineError as error:
            self.lose(
                f"something prints into the connection of host {self.name}: {error}. Expected: nothing but the agent "
                "prints there; look for what ~/.bashrc and the like leave running in the background"
            )
        if self.channel.has_ended:
            self.lose(self._why_ended())
        elif self.machine is not None and self.silence > SILENCE:
            self.lose(f"host {self.name} does not answer any more: no sign of it for {self.silence:.0f} s")
        for told in found:
            try:
                check_said(told)
            except ValueError as error:
                self.lose(
                    f"host {self.name}: its agent has said {cleaned(told, _SHOWN)} ({error}). Expected: tfdist "
                    f"{tfdist.__version__}"
                )
                return []
            if told["kind"] == "hello":
                self._meet(told)
            elif told["kind"] in ("ready", "error"):
                self.answer = told
        return found

    def lose(self, why: str) -> None:
        """Gives the connection up."""
        self.lost = self.lost or why
        self._process.kill()

    def is_late(self, seconds: float) -> None:
        """Gives a connection up that is not made after so many seconds."""
        self.lose(
            f"host {self.name}: its agent has not answered within {seconds:g} s{self._noise()}. Expected: {self._try()}"
            " ends at once; what ~/.bashrc and the like do over there must not wait"
        )

    def close(self) -> None:
        """Returns when the connection has ended."""
        self.channel.close()
        if self.lost or self.machine is None:  # nothing was started there
            self._process.kill()
        end_within(_END_SECONDS, self._process)
        self._process.stderr.close()

    def _meet(self, told: Message) -> None:
        self.machine = Machine(tuple(told["cores"]), tuple(told["gpus"]), self.name)
        self.identity = cleaned(told["machine"], 200)
        if (version := cleaned(told["version"], 100)) != tfdist.__version__:
            self.lose(
                f"host {self.name} has tfdist {version}, and this machine {tfdist.__version__}. Expected: the "
                "same; install it there, or name a Python that has it by --remote-python"
            )

    def _hear_errors(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while data := self._process.stderr.read(_MOST_SAID):
                self._said = (self._said + data)[-_MOST_SAID:]

    def _why_ended(self) -> str:
        """Why the connection has ended by itself."""
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_CODE_SECONDS)
        self._hear_errors()
        said = _last_line(self._said)
        if self.machine is not None:
            what = "the connection has ended" if code == _SSH_FAILED else f"its agent has ended with exit code {code}"
            return f"host {self.name} is lost: {what}{f' ({said})' if said else ''}"
        python = self._reach.python or sys.executable
        if self.is_here or code not in _WHY_NOT_REACHED:
            return (
                f"host {self.name}: its agent has ended with exit code {code}: {said or '(it printed nothing)'}"
                f"{self._noise()}. Expected: tfdist {tfdist.__version__} and its dependencies in {python} over there"
            )
        return _WHY_NOT_REACHED[code].format(
            name=self.name,
            folder=self._reach.folder,
            python=python,
            version=tfdist.__version__,
            ssh=self._reach.ssh[0],
            said=said or "(nothing)",
            attempt=self._try(),
        )

    def _try(self) -> str:
        return f"`{shlex.join((*self._reach.ssh, self.name, 'true'))}`"

    def _noise(self) -> str:
        noise = _last_line(self.channel.lines.noise)
        return f"; it has printed: {noise}" if noise else ""


def _last_line(said: bytes) -> str:
    lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
    return cleaned(lines[-1], _SHOWN).rstrip(".") if lines else ""


# ssh itself gives up after its ConnectTimeout of ten seconds; the agent then has to be loaded, perhaps from NFS.
_CONNECT_SECONDS = 60.0
_READY_SECONDS = 30.0
_TICK = 0.02


class Reached(contextlib.AbstractContextManager):
    """The hosts that were reached, in the order in which the user has named them.

    Attributes:
        connections: by the names of the hosts.
        problems: why others were not reached, by name.
    """

    def __init__(self) -> None:
        self.connections: dict[str, Connection] = {}
        self.problems: dict[str, str] = {}

    @property
    def machines(self) -> dict[str, Machine]:
        """What there is for the processes, by the names of the hosts."""
        return {name: one.machine for name, one in self.connections.items() if one.machine is not None}

    @classmethod
    def reach(
        cls,
        listed: Sequence[ListedHost],
        reach: Reach,
        restart: int = 0,
        check: Callable[[], object] = lambda: None,
    ) -> Reached:
        """Connects to all hosts.

        Args:
            listed: the hosts.
            reach: how.
            restart: how often the run has been started again.
            check: is called again and again meanwhile; what it raises ends the waiting.

        Raises:
            HostsError: ssh cannot be run.
        """
        self = cls()
        try:
            with _probe(reach.log_dir) as probe:
                hello = {
                    "kind": "hello",
                    "run_id": reach.run_id,
                    "log_dir": reach.log_dir,
                    "variables": dict(reach.variables),
                    "probe": probe,
                    "restart": restart,
                }
                # Names may take seconds to look up: nobody is connected yet, and waits.
                here = {host.name: is_this_machine(host.name) for host in listed}
                for host in listed:
                    self.connections[host.name] = Connection(host, reach, hello, here[host.name])
                everyone = list(self.connections.values())
                self._wait(everyone, lambda connection: connection.machine is not None, _CONNECT_SECONDS, check)
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
        # This machine's own address is the one from which another host is reached.
        for is_here in (False, True):
            asked = [one for name, one in self.connections.items() if name in counts and one.is_here == is_here]
            towards = next((address for address, _ in places.values() if not is_loopback(address)), "127.0.0.1")
            for connection in asked:
                connection.send(kind="prepare", count=counts[connection.name], towards=towards)
            self._wait(asked, lambda connection: connection.answer is not None, _READY_SECONDS, check)
            if lost := [connection.lost for connection in asked if connection.lost]:
                raise HostsError("; ".join(lost))
            places.update({one.name: _place(one, counts[one.name]) for one in asked})
        self._check_addresses({name: address for name, (address, _) in places.items()})
        return {name: [join_address(address, port) for port in ports] for name, (address, ports) in places.items()}

    def close(self) -> None:
        """Ends all that runs there, and returns when the connections have ended."""
        for connection in self.connections.values():
            connection.channel.close()  # that is the goodbye: the agent ends what it has started
        for connection in self.connections.values():
            connection.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _wait(
        self,
        asked: Sequence[Connection],
        is_done: Callable[[Connection], bool],
        seconds: float,
        check: Callable[[], object],
    ) -> None:
        """Hears those that were asked until each is done, or lost."""
        deadline = time.monotonic() + seconds
        while waiting := [one for one in asked if not one.lost and not is_done(one)]:
            check()
            # Until one of them says something, but not for long.
            with selectors.DefaultSelector() as selector:
                for connection in waiting:
                    selector.register(connection.channel.reading, selectors.EVENT_READ)
                selector.select(_TICK)
            for connection in self.connections.values():
                connection.channel.beat()
            for connection in waiting:
                connection.hear()
                if time.monotonic() > deadline and not is_done(connection):
                    connection.is_late(seconds)

    def _check_addresses(self, addresses: Mapping[str, str]) -> None:
        others = {name: address for name, address in addresses.items() if is_loopback(address)}
        machines = {self.connections[name].identity for name in addresses}
        if others and len(machines) > 1:
            name = next(iter(others))
            raise HostsError(
                f"host {name} was reached at {others[name]}, a port that is passed on, perhaps: other hosts cannot "
                "connect to that address. Expected: ssh reaches each host at an address that all hosts can use; or "
                "name the network interface that they share by TFDIST_INTERFACE"
            )


def _place(connection: Connection, count: int) -> tuple[str, list[int]]:
    told = connection.answer
    assert told is not None
    if told["kind"] == "ready" and len(told["ports"]) == count:
        return cleaned(told["address"], 100), told["ports"]
    problem = (
        cleaned(told["text"]) if told["kind"] == "error" else f"Received: {told['ports']}. Expected: {count} ports"
    )
    raise HostsError(f"host {connection.name}: {problem}")


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
