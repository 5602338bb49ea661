"""Warm starts: a process that has imported TensorFlow waits to be forked when workers have to be started again.

Importing TensorFlow takes longer than all the rest of a restart. The zygote imports it while the training goes on and
never uses it; a worker forked from it begins as if it had just been started, with its own environment, cores and
output. It is a child of the launcher like any other.

The standard library's `multiprocessing.forkserver` would not do: its processes are children of the server, so that
their exit codes are lost with it and their numbers cannot be kept until their groups have ended; they run a function
without `atexit` handlers instead of a script, and the imports have the normal priority.

What cannot differ from a fresh start: variables that are read by the interpreter or by imports, which is why `fits`
compares them and preloaded.py watches over what a script sets before it imports TensorFlow; and the seed of Python's
string hashes, which all workers of one zygote share.
"""

from __future__ import annotations

import contextlib
import enum
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from tfdist.launcher.guardian import Guardian
from tfdist.launcher.operating_system import adopting_orphans, die_with_parent, spawn
from tfdist.launcher.process import Program, start_afresh
from tfdist.launcher.run_plan import ProcessPlan
from tfdist.launcher.warm.preloaded import shared_part

_PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "zygote_program.py")
_SPAWN_DEADLINE, _END_DEADLINE = 5.0, 10.0
# Programs that train sooner than this have not imported TensorFlow: there is nothing to gain.
_WORTHWHILE = 2.0
_LONGEST_WAIT = 10.0
# How long programs train before the zygote imports TensorFlow beside them.
_HEAD_START = 3.0
# After so many seconds the imports no longer wait for times in which nobody else wants the processor.
_LONGEST_DEFERENCE = 60.0


class _State(enum.Enum):
    IMPORTING = enum.auto()
    READY = enum.auto()
    FAILED = enum.auto()


class ZygoteError(RuntimeError):
    """The zygote could not start a worker, which has to be started without it."""


@dataclass
class ForkedProcess:
    """A worker that the zygote has forked, and a child of this process.

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
        idle: whether to import TensorFlow only while nobody else wants the processor.

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

    def __init__(self, command: Sequence[str], env: Mapping[str, str], idle: bool = True) -> None:
        self._command = tuple(command)
        self._env = shared_part(env)
        self._state = _State.IMPORTING
        self.set_by_import: dict[str, str] = {}
        self._connection, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = spawn(
                    [sys.executable, "-u", _PROGRAM, str(theirs.fileno()), "idle" if idle else "normal", *command[2:]],
                    subprocess.DEVNULL,
                    # The first worker's number of threads is likely to be everybody's.
                    {**self._env, **{name: env[name] for name in ("OMP_NUM_THREADS",) if name in env}},
                    pass_fds=[theirs.fileno()],
                    before_exec=die_with_parent(os.getpid()),
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
        """Lets it import with normal priority, as far as that is allowed: it takes a privilege (CAP_SYS_NICE)."""
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            for thread in psutil.Process(self._process.pid).threads():
                os.sched_setscheduler(thread.id, os.sched_getscheduler(0), os.sched_getparam(0))
                os.setpriority(os.PRIO_PROCESS, thread.id, os.getpriority(os.PRIO_PROCESS, 0))

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
                _end(pid)
            raise ZygoteError(f"the zygote could not fork a worker: {error}") from error
        return ForkedProcess(pid)

    def close(self) -> None:
        """Ends the zygote; its workers live on."""
        self._connection.close()
        self._process.kill()
        # It cannot be waited for while it waits for a disk that does not answer (state D).
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_DEADLINE)


def _end(pid: int) -> None:
    """Kills a worker that has not begun. One that waits for a disk (state D) ends later, and never begins either."""
    with contextlib.suppress(ProcessLookupError, psutil.TimeoutExpired, psutil.NoSuchProcess):
        os.kill(pid, signal.SIGKILL)
        psutil.Process(pid).wait(_END_DEADLINE)


def can_fork(command: Sequence[str]) -> bool:
    """Whether a zygote can stand for a command: a Python script or module under the launcher's own interpreter.

    Example:
        >>> can_fork([sys.executable, "-u", "train.py"]), can_fork(["sh", "train.sh"])
        (True, False)
    """
    if sys.platform != "linux" or tuple(command[:2]) != (sys.executable, "-u") or len(command) < 3:
        return False
    return command[2].endswith(".py") or (command[2] == "-m" and len(command) > 3)


class WarmStarts:
    """Starts programs afresh at first, and from a zygote once there is one.

    Args:
        guardian: ends the zygote if the launcher is killed.
        enabled: whether there may be a zygote at all.

    Example:
        >>> with Guardian() as guardian, WarmStarts(guardian, enabled=True) as starts:  # doctest: +SKIP
        ...     program = starts.start(plan, output=1)
        ...     starts.prepare(9.0)  # once it trains, which took 9 s
    """

    def __init__(self, guardian: Guardian, enabled: bool) -> None:
        self._guardian = guardian
        self._enabled = enabled
        self._zygote: Zygote | None = None
        self._plan: ProcessPlan | None = None
        self._fresh_start = 0.0
        self._trains_since: float | None = None
        self._imports_since = 0.0

    def __enter__(self) -> WarmStarts:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def start(self, plan: ProcessPlan, output: int) -> Program:
        """Starts a program in the quickest way there is.

        Raises:
            OSError: the command cannot be run.
        """
        self._plan, self._trains_since = plan, None
        if self._zygote is not None and self._zygote.is_ready() and self._zygote.fits(plan.command, plan.env):
            try:
                return self._zygote.spawn(plan.env, plan.cpus, output)
            except ZygoteError:
                self._close()
        return start_afresh(plan, output)

    def prepare(self, fresh_start: float) -> None:
        """Makes the next start a warm one. To be called again and again while the programs train.

        The imports begin some seconds after the first call: they would delay the first steps, and a program that fails
        so soon is started afresh.

        Args:
            fresh_start: seconds that a program needs, when started afresh, to have all its imports behind it.
        """
        if not self._enabled or self._plan is None:
            return
        now = time.monotonic()
        if self._zygote is not None:
            if now - self._imports_since > _LONGEST_DEFERENCE and self._zygote.is_importing():
                self._zygote.hurry()  # the training leaves it no time
                self._imports_since = math.inf
            return
        self._trains_since = self._trains_since or now
        if now - self._trains_since < _HEAD_START:
            return
        self._fresh_start = fresh_start
        if fresh_start < _WORTHWHILE or not can_fork(self._plan.command):
            self._enabled = False
            return
        try:
            self._zygote = Zygote(self._plan.command, self._plan.env)
        except OSError:
            self._enabled = False
        else:
            self._guardian.add(self._zygote.group)
            self._imports_since = now

    def worth_waiting(self) -> float:
        """For how many seconds after a failure it pays to wait with the next start: imports that are under way end
        sooner than new ones would."""
        if self._zygote is None or not self._zygote.is_importing():
            return 0.0
        self._zygote.hurry()
        return min(self._fresh_start, _LONGEST_WAIT)

    def _close(self) -> None:
        if self._zygote is not None:
            self._guardian.remove(self._zygote.group)
            self._zygote.close()
            self._zygote = None
