"""The processes of an attempt: started, heard, watched and ended together."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from tfdist.launcher.guardian import Guardian
from tfdist.launcher.operating_system import die_with_parent, spawn
from tfdist.launcher.output import Terminal, Writer, last_lines, write_all
from tfdist.launcher.plan import REPLACEMENT, ProcessPlan
from tfdist.launcher.policy import Failure
from tfdist.supervision.exit_codes import PREEMPTED
from tfdist.supervision.progress import SAVED, VARIABLE, Progress, ProgressFile

_TAIL_BYTES = 64 * 1024
_CHUNK = 64 * 1024
# How long helpers of a process that has ended (Python's resource tracker, say) may clean up before they are killed.
_HELPERS_GRACE = 1.0
# How long the kernel may take to end a process that was killed. One that waits for a disk, a network file system or a
# GPU that does not answer (state D) ends only when that has answered.
_KILL_SECONDS = 30.0
# The states of a process that is gone, or of which only the exit code is left.
_ENDED = ("", psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


# Given a plan and the file descriptor for its output, starts the leader of a process group of its own. What it returns
# has `pid` and `wait`, as `subprocess.Popen` has them.
StartProgram = Callable[[ProcessPlan, int], Any]


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
        # Between fork and exec. No other thread of the launcher holds a lock that is taken here (see output.py).
        die_with_launcher()
        if plan.cpus:
            os.sched_setaffinity(0, plan.cpus)

    return spawn(plan.command, output, plan.env, before_exec=before_exec)


def start_unpinned(plan: ProcessPlan, output: int) -> subprocess.Popen[bytes]:
    """The same where this process has several threads: no Python code runs between fork and exec.

    So the program has to pin itself to cores, and to ask the kernel to end it with this process.
    """
    return spawn(plan.command, output, plan.env)


class Process:
    """A process in a process group of its own, away from the launcher's terminal.

    Its whole output passes through the launcher, which reads `output`, to a log: a full disk costs the log, never the
    training.

    Args:
        plan: what to run.
        log_dir: folder of the logs; None where somebody else keeps the log of what is shown, and this one goes nowhere.
        continues: what it is that continues a log, such as "restart 1"; empty: the log is a new one.
        start_program: starts what is planned.
        files: writes the log.

    Raises:
        OSError: the log of a process that continues none cannot be made; or a link is in its place.

    Attributes:
        plan: what it runs.
        log_path: its log.
        group: its process group; 0 before it has started.
        status: its returncode as `subprocess` defines it; None while it runs.
        is_over: whether the process and its whole group have ended.
        output: file descriptor to read from; None when there is nothing (more) to read.
        left_behind: what to tell the user if it could not be ended; empty if it could.
        lost: why its host is of no use any more; empty while it is.
    """

    def __init__(
        self,
        plan: ProcessPlan,
        log_dir: Path | None,
        continues: str = "",
        start_program: StartProgram = start_afresh,
        files: Writer | None = None,
    ) -> None:
        self.plan = plan
        self.log_path = log_dir / plan.log_name if log_dir else Path(os.devnull)
        self.group = 0
        self.status: int | None = None
        self.is_over = False
        self.output: int | None = None
        self._start_program = start_program
        self._started_at = self._ended_at = 0.0
        self._killed_at: float | None = None
        self.left_behind = self.lost = ""
        self._files = files or Writer()
        self._log: BinaryIO | None = None
        self._tail = b""
        self._make_log(continues)

    def start(self) -> None:
        """Starts the process.

        Raises:
            OSError: the command cannot be run.
        """
        self._started_at = time.monotonic()
        self.output, inner = os.pipe()
        try:
            self._program = self._start_program(self.plan, inner)
        finally:
            os.close(inner)
        self.group = self._program.pid
        os.set_blocking(self.output, False)

    @property
    def state(self) -> str:
        """What it is doing, as `process_state` has it."""
        return process_state(self.group)

    @property
    def lived(self) -> float:
        """For how many seconds it had existed when it was seen to have ended."""
        return self._ended_at - self._started_at

    def read(self) -> bytes:
        """What it has printed since the last call, which is also written to its log; empty at the end of the output."""
        try:
            data = os.read(self.output, _CHUNK)
        except BlockingIOError:
            return b""
        if data:
            self.hear(data)
        else:
            self.close_output()
        return data

    def hear(self, data: bytes) -> None:
        """Takes what it has printed."""
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        self._files.do(len(data), functools.partial(self._write_log, data))

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
        if self.is_over:
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
            self._program.wait()
            self.is_over = True
        elif time.monotonic() - self._ended_at > _HELPERS_GRACE:
            self.kill()
        return False

    def signal(self, number: int) -> None:
        """Sends a signal to the whole group; nothing before it has started, and once the group has ended.

        SIGTERM goes to a Python program alone: its data loading processes would die of it before it has saved.
        """
        if self.is_over or not self.group:  # 0 would be the launcher's own group
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

    def tail(self, count: int) -> tuple[str, ...]:
        """The last lines it has printed."""
        return last_lines(self._tail, count)

    def close(self) -> None:
        """Closes its files."""
        self.close_output()
        if self._log is not None:
            self._files.do(0, self._log.close)

    def _make_log(self, continues: str) -> None:
        problem: list[OSError] = []

        def make() -> None:
            try:
                self._log = _open_log(self.log_path, continues)
            except OSError as error:
                problem.append(error)
                raise

        self._files.call(make)
        if problem and (not continues or problem[0].errno == errno.ELOOP):
            raise problem[0]

    def _write_log(self, data: bytes) -> None:
        if self._log is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        write_all(self._log.fileno(), data)

    def _is_stuck(self) -> bool:
        return self._killed_at is not None and time.monotonic() - self._killed_at > _KILL_SECONDS

    def _leave_behind(self, pids: Sequence[int]) -> None:
        """Waits no longer for processes that the kernel does not end."""
        who = ", ".join(f"{pid} ({process_state(pid)})" for pid in pids)
        self.left_behind = (
            f"{self.plan.name}: process {who} has not ended {_KILL_SECONDS:g} s after SIGKILL, and is left behind. The "
            "kernel ends it when what it waits for answers: a disk, a network file system, a GPU. It may still hold "
            "memory and files"
        )
        self.is_over = True


def process_state(pid: int) -> str:
    """What a process is doing, one of psutil's constants such as "running" or "stopped"; "" if there is none."""
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return ""


def _open_log(path: Path, continues: str) -> BinaryIO:
    """Opens a log, which a restart continues."""
    if not continues:
        return open(path, "wb", buffering=0, opener=_no_link)
    path.parent.mkdir(parents=True, exist_ok=True)  # the program may have deleted it
    log = open(path, "a+b", buffering=0, opener=_no_link)  # noqa: SIM115
    with contextlib.suppress(OSError):
        size = os.fstat(log.fileno()).st_size
        open_line = size > 0 and os.pread(log.fileno(), 1, size - 1) != b"\n"
        log.write(b"\n" * open_line + f"--- {continues} ---\n".encode())
    return log


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


_TICK = 0.02
_TAIL_LINES = 200
# As much as a pipe can hold when its process ends (fs.pipe-max-size). Helpers may go on printing into it for ever.
_LAST_CHUNKS = 16


class ProcessGroup:
    """All processes of a plan. None of them outlives the `with` block.

    Args:
        plans: the processes, that with rank 0 first.
        log_dir: folder of the logs; None: see `Process`.
        terminal: where their output goes.
        guardian: ends them if the launcher is killed.
        restart: how often the run has been started again.
        start_program: starts what is planned.

    Attributes:
        processes: the processes in the order of the plans.

    Raises:
        OSError: on entry; a process could not be started, and those already started have been killed.

    Example:
        >>> with ProcessGroup(plans, Path("logs"), terminal, guardian) as group:  # doctest: +SKIP
        ...     while not group.is_over:
        ...         group.tick()
    """

    def __init__(
        self,
        plans: Sequence[ProcessPlan],
        log_dir: Path | None,
        terminal: Terminal,
        guardian: Guardian,
        restart: int = 0,
        start_program: StartProgram = start_afresh,
    ) -> None:
        self._terminal = terminal
        self._guardian = guardian
        self._selector = selectors.DefaultSelector()
        self._log_dir = log_dir
        self._files = Writer()
        self._loses = False
        self._start_program = start_program
        self._progress_files: dict[str, ProgressFile] = {}
        self._continues = f"restart {restart}" if restart else ""
        self.processes = [self._made(plan, self._continues) for plan in plans]
        self._started: list[Process] = []

    def _made(self, plan: ProcessPlan, continues: str) -> Process:
        env = {**plan.env, **self._room_for(plan)}
        if not plan.serves:
            if (before := self._progress_files.pop(plan.name, None)) is not None:
                before.close()
            file = self._progress_files[plan.name] = ProgressFile()
            env[VARIABLE] = file.value
        return Process(dataclasses.replace(plan, env=env), self._log_dir, continues, self._start_program, self._files)

    def _room_for(self, plan: ProcessPlan) -> dict[str, str]:
        """How wide a progress bar may be that is shown behind the name of its process."""
        columns = self._terminal.columns_inside(plan.name) if plan.shown and not plan.env.get("COLUMNS") else None
        return {"COLUMNS": str(columns)} if columns else {}

    def __enter__(self) -> ProcessGroup:
        try:
            for process in self.processes:
                self._start(process)
            self._wait_for_starts()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait_for_starts(self) -> None:
        """Until all have started, or it is known why not: here they have."""

    def __exit__(self, *error: object) -> None:
        self.kill()
        while not self.is_over:
            self._poll_processes()
            time.sleep(_TICK)
        for process in self.processes:
            process.close()
        self._files.close()
        if lost := self._files.dropped:
            self._terminal.message(f"{lost} bytes are missing in the logs in {self._log_dir}/: {self._files.problem}")
        for file in self._progress_files.values():
            file.close()
        self._selector.close()

    @property
    def is_over(self) -> bool:
        """Whether no process that was started exists any more."""
        return all(process.is_over for process in self._started)

    @property
    def workers(self) -> int:
        """The number of processes that train."""
        return len(self.trainers)

    @property
    def trainers(self) -> list[Process]:
        """The processes that train: all, or those of parameter servers that are workers."""
        has_servers = any(process.plan.job == "ps" for process in self.processes)
        return [process for process in self.processes if not has_servers or process.plan.job == "worker"]

    @property
    def running(self) -> list[Process]:
        """The processes that have not ended."""
        return [process for process in self._started if process.status is None]

    def tick(self) -> list[Process]:
        """Passes output on for a moment and returns the processes that were found to have ended."""
        self._hear()
        if self._files.dropped and not self._loses:
            self._loses = True
            self._terminal.message(f"the logs in {self._log_dir}/ are not complete any more: {self._files.problem}")
        return self._poll_processes()

    def progress(self) -> dict[str, Progress | None]:
        """The last report of each training process that makes reports, by name."""
        return {name: file.read() for name, file in self._progress_files.items()}

    def status(self, process: Process) -> int | None:
        """The returncode of a process. That of one which died after it had saved, since its end took long, is 77."""
        if process.status is not None and process.status < 0:
            report = self.progress().get(process.plan.name)
            if report is not None and report.phase == SAVED:
                return PREEMPTED
        return process.status

    def failure(self, process: Process, status: int, hang: str = "") -> Failure:
        """Describes what became of a process, with the last lines of its log."""
        self.read_available(process)
        tail = tuple(line for line in process.tail(_TAIL_LINES) if not self._terminal.hides(line))
        log_path = str(process.log_path)
        # A pipe may lead elsewhere than the messages do.
        was_shown = process.plan.shown and self._terminal.shows_both
        return Failure(process.plan.name, status, tail, log_path, hang, host=process.plan.host, was_shown=was_shown)

    def replace(self, process: Process, number: int) -> Process:
        """Starts a process in the place of one that is over; the log goes on.

        Args:
            process: one of `processes`.
            number: of the replacement, which the new process finds in its environment.

        Raises:
            OSError: it could not be started.
        """
        plan = dataclasses.replace(process.plan, env={**process.plan.env, REPLACEMENT: str(number)})
        return self._put(plan, f"replacement {number}")

    def add(self, plan: ProcessPlan) -> Process:
        """Starts one more process, or one in the place of that with its name, which is over.

        Raises:
            OSError: it could not be started.
        """
        return self._put(plan, self._continues)

    def _put(self, plan: ProcessPlan, continues: str) -> Process:
        process, names = self._made(plan, continues), [one.plan.name for one in self.processes]
        if plan.name in names:
            at = names.index(plan.name)
            before, self.processes[at] = self.processes[at], process
            before.close()
            self._started = [one for one in self._started if one is not before]
        else:
            self.processes.append(process)
        self._start(process)
        return process

    def read_available(self, process: Process) -> None:
        """Reads what a process has printed so far, within limits."""
        for _ in range(_LAST_CHUNKS):
            if process.output is None or not self._read_output(process):
                return

    def signal(self, number: int) -> None:
        """Sends a signal to every process that has not ended, and to its helpers."""
        for process in self.running:
            process.signal(number)

    def kill(self) -> None:
        """Kills every process and all helpers at once."""
        for process in self._started:
            process.kill()

    def _start(self, process: Process) -> None:
        process.start()
        self._started.append(process)
        self._guardian.add(process.group, process.plan.env.get("TFDIST_RUN_ID", ""))
        if process.output is not None:
            self._selector.register(process.output, selectors.EVENT_READ, process)

    @property
    def _is_behind(self) -> bool:
        """Whether who prints had better wait: much waits to be written, and moves."""
        return self._terminal.is_behind or self._files.is_behind

    def _hear(self) -> None:
        ready = self._selector.select(_TICK)
        if self._is_behind:
            time.sleep(_TICK)
        for key, _ in ready:
            if not self._is_behind:
                self._read_output(key.data)

    def _read_output(self, process: Process) -> bytes:
        descriptor = process.output
        data = process.read()
        if process.output is None:
            self._selector.unregister(descriptor)  # type: ignore[arg-type]
        if process.plan.shown:
            self._terminal.feed(process.plan.name, data, final=process.output is None)
        return data

    def _poll_processes(self) -> list[Process]:
        ended = []
        for process in self._started:
            if process.is_over:
                continue
            if process.poll():
                ended.append(process)
            if process.is_over:
                self._guardian.remove(process.group)
                self._read_rest(process)
                if process.left_behind:
                    self._terminal.message(process.left_behind)
        return ended

    def _read_rest(self, process: Process) -> None:
        self.read_available(process)
        if process.output is not None:
            self._selector.unregister(process.output)
            process.close_output()
            if process.plan.shown:
                self._terminal.feed(process.plan.name, b"", final=True)
