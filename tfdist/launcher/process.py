"""One process of a run: how it is started, heard and ended."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

import psutil

from tfdist.launcher.operating_system import die_with_parent, spawn
from tfdist.launcher.run_plan import ProcessPlan
from tfdist.launcher.terminal import last_lines

_TAIL_BYTES = 64 * 1024
_CHUNK = 64 * 1024
# How long helpers of a process that has ended (Python's resource tracker, say) may clean up before they are killed.
_HELPERS_GRACE = 1.0
# How long the kernel may take to end a process that was killed. One that waits for a disk, a network file system or a
# GPU that does not answer (state D) ends only when that has answered.
_KILL_SECONDS = 30.0
# The states of a process that is gone, or of which only the exit code is left.
_ENDED = ("", psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


class Program(Protocol):
    """A started program: leader of a process group of its own, child of this process."""

    pid: int

    def wait(self) -> int:
        """Waits for its end and returns what `subprocess` calls returncode."""


StartProgram = Callable[[ProcessPlan, int], Program]


def start_afresh(plan: ProcessPlan, output: int) -> subprocess.Popen[bytes]:
    """Starts a program in a new process.

    Args:
        plan: what to run.
        output: file descriptor for its standard output and error.

    Raises:
        OSError: the command cannot be run.

    Example:
        >>> start_afresh(plan, output=1).wait()  # doctest: +SKIP
        0
    """
    die_with_launcher = die_with_parent(os.getpid())

    def before_exec() -> None:
        # Between fork and exec. The launcher has one thread only, so that Python is safe there.
        die_with_launcher()
        if plan.cpus:
            os.sched_setaffinity(0, plan.cpus)

    return spawn(plan.command, output, plan.env, stdin=plan.stdin, before_exec=before_exec)


def start_unpinned(plan: ProcessPlan, output: int) -> subprocess.Popen[bytes]:
    """The same where this process has several threads: no Python code runs between fork and exec.

    So the program has to pin itself to cores, and to ask the kernel to end it with this process.
    """
    return spawn(plan.command, output, plan.env, stdin=plan.stdin)


class Process:
    """A process in a process group of its own, away from the launcher's terminal.

    Its whole output goes to a log; that of a shown process passes through the launcher, which reads `output`.

    Args:
        plan: what to run.
        log_dir: folder of the logs; None where somebody else keeps the log of what is shown.
        continues: what it is that continues a log, such as "restart 1"; empty: the log is a new one.
        start_program: starts what is planned.

    Attributes:
        plan: what it runs.
        log_path: its log.
        status: its returncode as `subprocess` defines it; None while it runs.
        output: file descriptor to read from; None when there is nothing (more) to read.
        left_behind: what to tell the user if it could not be ended; empty if it could.
        lost: why its host is of no use any more; empty while it is.
    """

    def __init__(
        self, plan: ProcessPlan, log_dir: Path | None, continues: str = "", start_program: StartProgram = start_afresh
    ) -> None:
        self.plan = plan
        self.log_path = log_dir / plan.log_name if log_dir else Path(os.devnull)
        self.status: int | None = None
        self.output: int | None = None
        self._start_program = start_program
        self._started_at = self._ended_at = 0.0
        self._reaped = False
        self._killed_at: float | None = None
        self.left_behind = self.lost = ""
        self._log, self._log_start = _open_log(self.log_path, continues)

    def start(self, size: os.terminal_size | None) -> None:
        """Starts the process; with a size, a shown one gets a pseudo-terminal of that size instead of a pipe.

        Raises:
            OSError: the command cannot be run.
        """
        self._started_at = time.monotonic()
        if not self.plan.shown:
            self._program = self._start_program(self.plan, self._log.fileno())
            return
        self.output, inner = os.pipe() if size is None else _open_terminal(size)
        try:
            self._program = self._start_program(self.plan, inner)
        finally:
            os.close(inner)
        os.set_blocking(self.output, False)

    @property
    def group(self) -> int:
        """Its process group."""
        return self._program.pid

    @property
    def state(self) -> str:
        """What it is doing, as `process_state` has it."""
        return process_state(self.group)

    @property
    def lived(self) -> float:
        """For how many seconds it had existed when it was seen to have ended."""
        return self._ended_at - self._started_at

    @property
    def is_over(self) -> bool:
        """Whether the process and its whole group have ended."""
        return self._reaped

    def read(self) -> bytes:
        """What it has printed since the last call, which is also written to its log; empty at the end of the output."""
        assert self.output is not None
        try:
            data = os.read(self.output, _CHUNK)
        except BlockingIOError:
            return b""
        except OSError:
            data = b""  # EIO: nobody has the pseudo-terminal open any more
        if data:
            # A full disk costs the log, not the training.
            with contextlib.suppress(OSError):
                self._log.write(data)
        else:
            self.close_output()
        return data

    def close_output(self) -> None:
        """Stops reading: a process that left the group may keep the other end open for ever."""
        if self.output is not None:
            os.close(self.output)
            self.output = None

    def poll(self) -> bool:
        """Looks after the process; True exactly once, when it is first seen to have ended.

        The process stays a zombie until its group is empty or was killed: as long as its number is taken, a signal to
        the group cannot hit a stranger.
        """
        if self._reaped:
            return False
        if self.status is None:
            ended = os.waitid(os.P_PID, self.group, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                if self._is_stuck():
                    self._leave_behind([self.group])
                    self.status, self._ended_at = -signal.SIGKILL, time.monotonic()
                return self.left_behind != ""
            self.status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            self._ended_at = time.monotonic()
            return True
        others = _other_members(self.group)
        if not others or self._is_stuck():
            if others:
                self._leave_behind(others)
            self._reap()
        elif time.monotonic() - self._ended_at > _HELPERS_GRACE:
            self.kill()
        return False

    def signal(self, number: int) -> None:
        """Sends a signal to the whole group; nothing once the group has ended.

        SIGTERM goes to a Python program alone: its data loading processes would die of it before it has saved.
        """
        if self._reaped:
            return
        alone = number == signal.SIGTERM and self.status is None and self.plan.command[0] == sys.executable
        with contextlib.suppress(ProcessLookupError):
            if alone:
                os.kill(self.group, number)
            else:
                os.killpg(self.group, number)

    def kill(self) -> None:
        """Kills the whole group."""
        if self._killed_at is None:
            self._killed_at = time.monotonic()
        self.signal(signal.SIGKILL)

    def resize(self, size: os.terminal_size) -> None:
        """Gives its pseudo-terminal another size."""
        if self.output is not None:
            _set_size(self.output, size)

    def tail(self, count: int) -> tuple[str, ...]:
        """The last lines it has logged, even if the program has deleted the log; none if it cannot be read."""
        log = self._log.fileno()
        try:
            size = os.fstat(log).st_size
            # pread, because the process shares this file's position.
            return last_lines(os.pread(log, _TAIL_BYTES, max(size - _TAIL_BYTES, self._log_start)), count)
        except OSError:
            return ()

    def close(self) -> None:
        """Closes its files."""
        self.close_output()
        self._log.close()

    def _is_stuck(self) -> bool:
        return self._killed_at is not None and time.monotonic() - self._killed_at > _KILL_SECONDS

    def _leave_behind(self, pids: Sequence[int]) -> None:
        """Waits no longer for processes that the kernel does not end."""
        who = ", ".join(f"{pid} ({process_state(pid)}{_where(pid)})" for pid in pids)
        self.left_behind = (
            f"{self.plan.name}: process {who} has not ended {_KILL_SECONDS:g} s after SIGKILL, and is left behind. The "
            "kernel ends it when what it waits for answers: a disk, a network file system, a GPU. It may still hold "
            "memory and files"
        )
        self._reaped = True

    def _reap(self) -> None:
        self._program.wait()
        self._reaped = True


def process_state(pid: int) -> str:
    """What a process is doing, one of psutil's constants such as "running" or "stopped"; "" if there is none."""
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return ""


def _open_log(path: Path, continues: str) -> tuple[BinaryIO, int]:
    """Opens a log, which a restart continues, and says where this process's own part begins."""
    if not continues:
        return open(path, "w+b", buffering=0, opener=_no_link), 0
    path.parent.mkdir(parents=True, exist_ok=True)  # the program may have deleted it
    log = open(path, "a+b", buffering=0, opener=_no_link)  # noqa: SIM115
    with contextlib.suppress(OSError):
        size = os.fstat(log.fileno()).st_size
        open_line = size > 0 and os.pread(log.fileno(), 1, size - 1) != b"\n"
        log.write(b"\n" * open_line + f"--- {continues} ---\n".encode())
    return log, os.fstat(log.fileno()).st_size


def _no_link(path: str, flags: int) -> int:
    """In a folder that others can write to, a link in the place of a log would lead to a file that must not be lost."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        text = "is a link. Expected: a file, or none yet; remove the link, or choose another --log-dir"
        raise OSError(errno.ELOOP, text, str(path)) from None


def _other_members(group: int) -> list[int]:
    """The members of a process group besides its leader that are not zombies."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if pid != group and os.getpgid(pid) == group and process_state(pid) not in _ENDED:
                found.append(pid)
    return found


def _where(pid: int) -> str:
    """In which function of the kernel a process waits, as far as we may know it."""
    try:
        function = Path("/proc", str(pid), "wchan").read_text().strip()
    except OSError:
        return ""
    return f" in {function}" if function not in ("", "0") else ""


def _open_terminal(size: os.terminal_size) -> tuple[int, int]:
    outer, inner = pty.openpty()
    attributes = termios.tcgetattr(inner)
    attributes[1] &= ~termios.ONLCR  # lines end with "\n" in the log, as they do through a pipe
    termios.tcsetattr(inner, termios.TCSANOW, attributes)
    _set_size(outer, size)
    return outer, inner


def _set_size(terminal: int, size: os.terminal_size) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", size.lines, size.columns, 0, 0))
