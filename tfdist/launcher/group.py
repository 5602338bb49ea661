"""The processes of a run from one start to its end: started, heard, watched and ended together."""

from __future__ import annotations

import dataclasses
import os
import selectors
import time
from collections.abc import Sequence
from pathlib import Path

from tfdist.launcher.failure import Failure
from tfdist.launcher.guardian import Guardian
from tfdist.launcher.process import Process, StartProgram, start_afresh
from tfdist.launcher.run_plan import REPLACEMENT, ProcessPlan
from tfdist.launcher.terminal import Terminal
from tfdist.supervision.exit_codes import PREEMPTED
from tfdist.supervision.progress import SAVED, VARIABLE, Progress, ProgressFile

_TICK = 0.02
_TAIL_LINES = 200
# More than a pipe or a pseudo-terminal holds when its process ends. Helpers may go on printing into it for ever.
_LAST_CHUNKS = 64
_LAST_BYTES = 256 * 1024


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
        self._start_program = start_program
        self._progress_files: dict[str, ProgressFile] = {}
        self._continues = f"restart {restart}" if restart else ""
        self.processes = [self._made(plan, self._continues) for plan in plans]
        self._started: list[Process] = []

    def _made(self, plan: ProcessPlan, continues: str) -> Process:
        if plan.trains and not plan.serves:
            file = self._progress_files[plan.name] = ProgressFile()
            plan = dataclasses.replace(plan, env={**plan.env, VARIABLE: file.value})
        return Process(plan, self._log_dir, continues, self._start_program)

    def __enter__(self) -> ProcessGroup:
        try:
            for process in self.processes:
                self._start(process)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        while not self.is_over:
            self._poll_processes()
            time.sleep(_TICK)
        for process in self.processes:
            process.close()
        for file in self._progress_files.values():
            file.close()
        self._selector.close()

    @property
    def is_over(self) -> bool:
        """Whether no process that was started exists any more."""
        return all(process.is_over for process in self._started)

    @property
    def trainers(self) -> list[Process]:
        """The processes that take part in the training."""
        return [process for process in self.processes if process.plan.trains]

    @property
    def workers(self) -> int:
        """The number of workers: of those that can be replaced, if there are any, otherwise of all that train."""
        return sum(process.plan.is_replaceable for process in self.trainers) or len(self.trainers)

    @property
    def running(self) -> list[Process]:
        """The processes that have not ended."""
        return [process for process in self.processes if process.status is None]

    def tick(self) -> list[Process]:
        """Passes output on for a moment and returns the processes that were found to have ended."""
        self._hear()
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
        was_shown = process.plan.shown and self._terminal.is_tty and self._terminal.only in (None, process.plan.name)
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
        successor = self._made(plan, f"replacement {number}")
        self.processes[self.processes.index(process)] = successor
        self._started.remove(process)
        process.close()
        self._start(successor)
        return successor

    def add(self, plan: ProcessPlan) -> Process:
        """Starts one more process.

        Raises:
            OSError: it could not be started.
        """
        process = self._made(plan, self._continues)
        self.processes.append(process)
        self._start(process)
        return process

    def read_available(self, process: Process) -> None:
        """Reads what a process has printed so far, within limits."""
        heard = 0
        for _ in range(_LAST_CHUNKS):
            if process.output is None or heard >= _LAST_BYTES:
                return
            data = self._read_output(process)
            if not data:
                return
            heard += len(data)

    def signal(self, number: int) -> None:
        """Sends a signal to every process that has not ended, and to its helpers."""
        for process in self.running:
            process.signal(number)

    def kill(self) -> None:
        """Kills every process and all helpers at once."""
        for process in self._started:
            process.kill()

    def resize(self) -> None:
        """Tells the process that is shown live what size the terminal has now."""
        if self._terminal.is_tty and self.processes:
            first = self.processes[0]
            first.resize(self._terminal.size_inside(first.plan.name))

    def _start(self, process: Process) -> None:
        process.start(self._size_for(process))
        self._started.append(process)
        self._guardian.add(process.group, process.plan.env.get("TFDIST_RUN_ID", ""))
        if process.output is not None:
            self._selector.register(process.output, selectors.EVENT_READ, process)

    def _size_for(self, process: Process) -> os.terminal_size | None:
        live = self._terminal.is_tty and process is self.processes[0]
        return self._terminal.size_inside(process.plan.name) if live else None

    def _hear(self) -> None:
        for key, _ in self._selector.select(_TICK):
            self._read_output(key.data)

    def _read_output(self, process: Process) -> bytes:
        descriptor = process.output
        data = process.read()
        if process.output is None:
            self._selector.unregister(descriptor)  # type: ignore[arg-type]
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
            self._terminal.feed(process.plan.name, b"", final=True)
