"""Warm starts: a process that has imported TensorFlow waits to be forked when workers have to be started again.

Importing TensorFlow takes longer than all the rest of a restart. The zygote imports it while the training goes on and
never uses it; a worker forked from it begins as if it had just been started, with its own environment, cores and
output. It is a child of the launcher like any other.

What cannot differ from a fresh start: variables that are read by the interpreter or by imports, which is why `fits`
compares them and preloaded.py watches over what a script sets before it imports TensorFlow; and the seed of Python's
string hashes, which all workers of one zygote share.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfdist.launch.import_settings import shared_part
from tfdist.launch.kernel import adopting_orphans, death_pact

_PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "zygote_program.py")
_SPAWN_DEADLINE = 5.0


class _State(enum.Enum):
    IMPORTING = enum.auto()
    READY = enum.auto()
    FAILED = enum.auto()


class ZygoteError(RuntimeError):
    """The zygote could not start a worker, which has to be started without it."""


@dataclass
class ForkedProcess:
    """A worker that the zygote has forked: to be waited for like any child of this process.

    Attributes:
        pid: its number.
        returncode: how it ended, as `subprocess` says it; None as long as nobody has seen that it ended.
    """

    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        """Returns how it ended, or None if it still runs."""
        return self._look(os.WNOHANG)

    def wait(self) -> int:
        """Waits for its end and returns its returncode."""
        code = self._look(0)
        assert code is not None
        return code

    def _look(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class Zygote:
    """A process that imports TensorFlow in the background, to fork workers later.

    Args:
        command: the argument vector of the workers, one that `can_fork` accepts; or only its first two words, the
            interpreter and -u, for workers that run different programs.
        env: the environment of one of them.

    Attributes:
        set_by_import: environment variables that the imports have set, once it is ready.

    Raises:
        OSError: it could not be started.

    Example:
        >>> zygote = Zygote([sys.executable, "-u", "train.py"], os.environ)
        >>> if zygote.is_ready() and zygote.fits(command, env):
        ...     worker = zygote.spawn(env, cpus=(0, 1), output=1)
        >>> zygote.close()
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._command = tuple(command)
        self._env = shared_part(env)
        self._state = _State.IMPORTING
        self.set_by_import: dict[str, str] = {}
        self._connection, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-u", _PROGRAM, str(theirs.fileno()), *command[2:]],
                    # The first worker's number of threads is likely to be everybody's.
                    env={**self._env, **{name: env[name] for name in ("OMP_NUM_THREADS",) if name in env}},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    preexec_fn=death_pact(os.getpid()),
                )
        except BaseException:
            self._connection.close()
            raise

    @property
    def group(self) -> int:
        """Its process group; the workers are in groups of their own."""
        return self._process.pid

    def is_ready(self) -> bool:
        """Whether it has imported everything. Stays False when that has failed."""
        return self._look() is _State.READY

    def is_importing(self) -> bool:
        """Whether it may still become ready."""
        return self._look() is _State.IMPORTING

    def hurry(self) -> None:
        """Ends its deference to the training (see zygote_server.py): there is none any more."""
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, os.getpriority(os.PRIO_PROCESS, 0))

    def _look(self) -> _State:
        if self._state is _State.IMPORTING:
            with contextlib.suppress(BlockingIOError):
                # One message, or the end.
                word = self._connection.recv(2**16, socket.MSG_DONTWAIT)
                self._state = _State.READY if word else _State.FAILED
                self.set_by_import = json.loads(word or b"{}")
        return self._state

    def fits(self, command: Sequence[str], env: Mapping[str, str]) -> bool:
        """Whether a worker with this command and environment would be the same as one that is started afresh."""
        return tuple(command) == self._command and shared_part(env) == self._env

    def spawn(
        self,
        env: Mapping[str, str],
        cpus: Sequence[int],
        output: int,
        arguments: Sequence[str] = (),
        folder: str | None = None,
    ) -> ForkedProcess:
        """Starts a worker; it leads a process group of its own and dies with this process.

        Args:
            env: its complete environment, one that `fits`.
            cpus: cores to pin it to; empty = not pinned.
            output: file descriptor for its standard output and error.
            arguments: more words, behind those of the command.
            folder: to work in; None = this process' own when it made the zygote.

        Raises:
            ZygoteError: there is no worker, and there will be none.
        """
        asked = {"env": dict(env), "cpus": list(cpus), "arguments": list(arguments), "folder": folder}
        request = json.dumps(asked).encode() + b"\n"
        ours, theirs = socket.socketpair()
        pid = 0
        try:
            with ours, ours.makefile("rb") as answers, adopting_orphans():
                with theirs:
                    socket.send_fds(self._connection, [b"F"], [theirs.fileno(), output])
                ours.settimeout(_SPAWN_DEADLINE)
                ours.sendall(request)
                pid = int(answers.readline() or 0)
                if not pid:
                    raise ZygoteError("the zygote ended before it had forked a worker")
                ours.sendall(b"go\n")
        except OSError as error:
            # It does not begin without our "go", so that nobody runs besides the one that is started instead.
            if pid:
                ForkedProcess(pid).wait()
            raise ZygoteError(f"the zygote could not fork a worker: {error}") from error
        return ForkedProcess(pid)

    def close(self) -> None:
        """Ends the zygote; its workers live on."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


def can_fork(command: Sequence[str]) -> bool:
    """Whether a zygote can stand for a command: a Python script or module under the launcher's own interpreter.

    Example:
        >>> can_fork([sys.executable, "-u", "train.py"]), can_fork(["sh", "train.sh"])
        (True, False)
    """
    if sys.platform != "linux" or tuple(command[:2]) != (sys.executable, "-u") or len(command) < 3:
        return False
    return command[2].endswith(".py") or (command[2] == "-m" and len(command) > 3)
