"""The launcher's connection to the agent of one host: how it is made, what is said when it fails, and how it ends."""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shlex
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tfdist
from tfdist.cluster import sockets
from tfdist.cluster.foreign_text import cleaned
from tfdist.launcher.hosts.frames import Channel, FrameError, Message, Output, message
from tfdist.launcher.hosts.listing import ListedHost
from tfdist.launcher.machine import Machine, own_version

SSH = "ssh"
# A host that says nothing for so long is lost; sooner, if a process elsewhere has failed meanwhile: that comes from it.
SILENCE = 20.0
SUSPICIOUS = 8.0
# Nobody can be asked for anything. The connections of ~/.ssh/config (ControlPath) are used, but none is left behind.
_OPTIONS = (
    *("-T", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ControlMaster=no", "-o", "ClearAllForwardings=yes", "-o", "RemoteCommand=none"),
)
_NO_FOLDER, _NO_PYTHON, _NO_TFDIST, _SSH_FAILED = 91, 92, 93, 255
# In one line without quotes that a shell other than sh would take for something else.
_SCRIPT = "cd {folder} 2>/dev/null || exit 91; command -v {python} >/dev/null || exit 92; exec {python} -c {code}"
_CODE = (
    "import sys, importlib.util as util; sys.path = [p for p in sys.path if p] + [{parent!r}]; "
    "sys.exit(93) if util.find_spec('tfdist') is None else None; "
    "from tfdist.launcher.hosts.agent import main; main()"
)
_END_SECONDS = 5.0
_CODE_SECONDS = 2.0
_SAID, _SHOWN = 8192, 500


class HostsError(OSError):
    """Hosts that cannot be reached or used; the text names each, why, and what to do."""


@dataclass(frozen=True)
class Reach:
    """How hosts are reached.

    Attributes:
        ssh: the command, with options.
        python: that of the other hosts; None: the path of this one.
        folder: where the processes work.
    """

    ssh: tuple[str, ...] = (SSH,)
    python: str | None = None
    folder: str = "."

    def command(self, name: str, is_here: bool) -> list[str]:
        """The argument vector that runs the agent of a host.

        Example:
            >>> words = Reach(folder="/work").command("node-1", is_here=False)
            >>> words[:2], words[-2]
            (['ssh', '-T'], 'node-1')
        """
        if is_here:
            return [sys.executable, "-c", _code()]
        words = {"folder": self.folder, "python": self.python or sys.executable, "code": _code()}
        script = _SCRIPT.format(**{key: shlex.quote(word) for key, word in words.items()})
        # The user's own shell over there may be another one than sh.
        return [*self.ssh, *_OPTIONS, name, f"exec /bin/sh -c {shlex.quote(script)}"]


def _code() -> str:
    """Lets Python run the agent. Where tfdist is not installed over there, it may be found where it is here."""
    return _CODE.format(parent=str(Path(tfdist.__file__).resolve().parent.parent))


def is_this_machine(name: str) -> bool:
    """Whether a host is the one that this runs on; an alias of ~/.ssh/config is another one.

    Example:
        >>> is_this_machine("localhost"), is_this_machine("somebody@localhost")
        (True, False)
    """
    user, _, host = name.rpartition("@")
    if user and user != getpass.getuser():
        return False
    if host == socket.gethostname() or sockets.is_loopback(host):
        return True
    try:
        return sockets.is_own(host)
    except (OSError, UnicodeError):
        return False


@dataclass(frozen=True)
class Facts:
    """What an agent has told of its host.

    Attributes:
        version: of tfdist.
        machine: what there is for the processes.
        identity: of the machine, by which two names of one are noticed.
    """

    version: str
    machine: Machine
    identity: str

    @classmethod
    def of(cls, told: Message) -> Facts:
        """Raises KeyError, TypeError, ValueError or OverflowError if something else was told."""
        cores, gpus = tuple(map(int, told["cores"])), tuple(map(str, told["gpus"]))
        return cls(cleaned(told["version"], 100), Machine(cores, gpus), cleaned(told["machine"], 200))


class Connection:
    """A connection to an agent; nothing in it waits for the other side, but `close`.

    Args:
        host: whose agent it is.
        reach: how it is reached.
        hello: what the agent is told first.

    Attributes:
        host: whose agent it is.
        lost: why it is of no use any more; empty while it is.
        facts: what the agent has told of its host; None at first.
        pid: of ssh.
        is_here: whether it is on this machine.
    """

    def __init__(self, host: ListedHost, reach: Reach, hello: Message) -> None:
        self.host = host
        self.lost = ""
        self.facts: Facts | None = None
        self.is_here = is_this_machine(host.name)
        self._reach = reach
        self._said = b""
        greeting = secrets.token_bytes(16)
        ours, theirs = os.pipe(), os.pipe()
        errors = os.pipe()
        try:
            self._process = subprocess.Popen(
                reach.command(host.name, self.is_here),
                stdin=ours[0],
                stdout=theirs[1],
                stderr=errors[1],
                # Away from our terminal: no Ctrl-C reaches it.
                start_new_session=True,
            )
        except OSError as error:
            for descriptor in (ours[1], theirs[0], errors[0]):
                os.close(descriptor)
            raise HostsError(
                f"--ssh {shlex.join(reach.ssh)}: {error.strerror}. Expected: the client of OpenSSH; install it (the "
                "package openssh-client), or say how to call it"
            ) from None
        finally:
            for descriptor in (ours[0], theirs[1], errors[1]):
                os.close(descriptor)
        self.pid = self._process.pid
        self._errors = errors[0]
        os.set_blocking(self._errors, False)
        self.channel = Channel(theirs[0], ours[1], greeting)
        self.send(**hello, greeting=greeting.hex(), is_here=self.is_here)

    @property
    def name(self) -> str:
        """What the user calls the host."""
        return self.host.name

    @property
    def silence(self) -> float:
        """For how many seconds nothing has come from it."""
        return time.monotonic() - self.channel.heard

    def send(self, **fields: Any) -> None:
        """Sends a message, or what still waits of others."""
        self.channel.send(message(**fields) if fields else b"")

    def hear(self) -> list[Message | Output]:
        """What has come since the last call; afterwards the connection may be lost."""
        if self.lost:
            return []
        self._hear_errors()
        found: list[Message | Output] = []
        try:
            found = self.channel.receive()
        except FrameError as error:
            self.lose(
                f"something prints into the connection of host {self.name}: {error}. Expected: nothing but the agent "
                "prints there; look for what ~/.bashrc and the like leave running in the background"
            )
        if self.channel.has_ended:
            self.lose(self._why_ended())
        elif self.facts is not None and self.silence > SILENCE:
            self.lose(f"host {self.name} does not answer any more: no sign of it for {self.silence:.0f} s")
        for told in found:
            if isinstance(told, dict) and told["kind"] == "hello":
                self._meet(told)
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

    def stop(self) -> None:
        """Says goodbye: the agent ends what it has started."""
        self.channel.close()

    def close(self) -> None:
        """Returns when the connection has ended."""
        self.stop()
        if self.lost or self.facts is None:  # nothing was started there
            self._process.kill()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
        if self._errors >= 0:
            os.close(self._errors)
            self._errors = -1

    def _meet(self, told: Message) -> None:
        try:
            self.facts = Facts.of(told)
        except (KeyError, TypeError, ValueError, OverflowError):
            self.lose(f"host {self.name}: its agent has said {cleaned(told, _SHOWN)}. Expected: tfdist {own_version()}")
            return
        if self.facts.version != own_version():
            self.lose(
                f"host {self.name} has tfdist {self.facts.version}, and this machine {own_version()}. Expected: the "
                "same; install it there, or name a Python that has it by --remote-python"
            )

    def _hear_errors(self) -> None:
        with contextlib.suppress(OSError):
            while data := os.read(self._errors, _SAID):
                self._said = (self._said + data)[-_SAID:]

    def _why_ended(self) -> str:
        """Why the connection has ended by itself."""
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_CODE_SECONDS)
        self._hear_errors()
        said = _last_line(self._said)
        if self.facts is not None:
            what = "the connection has ended" if code == _SSH_FAILED else f"its agent has ended with exit code {code}"
            return f"host {self.name} is lost: {what}{f' ({said})' if said else ''}"
        python = self._reach.python or sys.executable
        if self.is_here or code not in (_NO_FOLDER, _NO_PYTHON, _NO_TFDIST, _SSH_FAILED):
            return (
                f"host {self.name}: its agent has ended with exit code {code}: {said or '(it printed nothing)'}"
                f"{self._noise()}. Expected: tfdist {own_version()} and its dependencies in {python} over there"
            )
        if code == _NO_FOLDER:
            return (
                f"host {self.name} has no folder {self._reach.folder}. Expected: the same folder on all hosts, with "
                "the same program; use a shared file system, or copy it there"
            )
        if code == _NO_PYTHON:
            return (
                f"host {self.name} has no {python}. Expected: the same Python in the same place on all hosts; name "
                "that of the other hosts by --remote-python"
            )
        if code == _NO_TFDIST:
            return (
                f"host {self.name}: {python} has no tfdist there. Expected: tfdist {own_version()}; install it there, "
                "or name a Python that has it by --remote-python"
            )
        return (
            f"host {self.name} cannot be reached: {self._reach.ssh[0]} says: {said or '(nothing)'}. Expected: "
            f"{self._try()} works and asks for nothing: a key without a passphrase or in ssh-agent, and the host in "
            "~/.ssh/known_hosts; try it"
        )

    def _try(self) -> str:
        return f"`{shlex.join((*self._reach.ssh, self.name, 'true'))}`"

    def _noise(self) -> str:
        noise = _last_line(self.channel.decoder.noise)
        return f"; it has printed: {noise}" if noise else ""


def _last_line(said: bytes) -> str:
    lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
    return cleaned(lines[-1], _SHOWN).rstrip(".") if lines else ""
