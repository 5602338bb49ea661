"""One life of an elastic job: from the start of Horovod's driver until nothing can go on, or all is done."""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdist.launch.failure import Failure, choose, exit_code
from tfdist.launch.group import ProcessGroup
from tfdist.launch.guardian import Guardian
from tfdist.launch.horovod.driver import Driver, Order
from tfdist.launch.horovod.locations import is_here, over_there
from tfdist.launch.plan import ProcessPlan
from tfdist.launch.process import Process
from tfdist.launch.program_start import spawn
from tfdist.launch.restarts import Incident
from tfdist.launch.signals import SignalInbox
from tfdist.launch.terminal import Terminal
from tfdist.supervision.exit_codes import PREEMPTED
from tfdist.supervision.progress import Progress

# How long to wait for those that go on to say from which step, before it is told that they do.
_SAY_SECONDS = 30.0
# After how long to say that the others have not gone on.
_WAIT_SECONDS = 15.0
# Whoever is left of a job that cannot go on has nothing to save.
_FAILURE_GRACE = 2.0


@dataclass(frozen=True)
class ElasticEnding:
    """How it ended.

    Attributes:
        code: exit code of the job, if this was the end of it.
        incident: the process to blame and how far the job had got, if it failed.
        interrupt: the signal that the launcher got, if any.
        error: why Horovod has given up, if it says so.
    """

    code: int
    incident: Incident | None = None
    interrupt: signal.Signals | None = None
    error: Exception | None = None


@dataclass
class _Change:
    """Other processes than before are to go on."""

    cause: str
    size: int
    at: float


class ElasticLife:
    """Runs what Horovod's driver orders.

    Args:
        driver: not yet started.
        fewest: how many processes go on at least.
        command: what each process runs.
        env: their environment, but for what Horovod adds.
        log_dir: folder of the logs.
        terminal: where output and messages go.
        show_all: whether all output goes there, not only that of rank 0.
        guardian: ends the processes if the launcher is killed.
        inbox: the signals to the launcher.
        grace: seconds between a signal and SIGKILL.
        restart: how often the job has been started again.
        on_progress: is told at every tick what the processes report.
    """

    def __init__(
        self,
        driver: Driver,
        fewest: int,
        command: Sequence[str],
        env: Mapping[str, str],
        log_dir: Path,
        terminal: Terminal,
        show_all: bool,
        guardian: Guardian,
        inbox: SignalInbox,
        grace: float,
        restart: int,
        on_progress: Callable[[Mapping[str, Progress | None]], object],
    ) -> None:
        self._driver, self._fewest, self._command, self._env = driver, fewest, tuple(command), env
        self._terminal, self._inbox, self._grace, self._on_progress = terminal, inbox, grace, on_progress
        self._shown = terminal if show_all else _OfFirst(terminal)
        # Horovod's driver has threads in this process: no Python runs between fork and exec, and that programs do not
        # outlive the launcher is the guardian's task alone.
        self._group = ProcessGroup([], log_dir, self._shown, guardian, restart, spawn)  # type: ignore[arg-type]
        self._orders: dict[Process, Order] = {}
        self._kill_at: dict[Process, float] = {}
        self._interrupt: signal.Signals | None = None
        self._generation = self._largest = 0
        self._failures: list[Failure] = []
        self._failed_at: float | None = None
        self._change: _Change | None = None
        self._progressed = False

    def run(self) -> ElasticEnding:
        """Returns once no process exists any more."""
        self._driver.start()
        with self._group:
            while not self._is_done():
                self._start_ordered()
                self._note_generation()
                for process in self._group.tick():
                    self._note_end(process)
                self._obey(self._inbox.take())
                self._stop_dismissed()
                self._tell()
            self._driver.stop()
            return self._ending()

    def _is_done(self) -> bool:
        nothing_runs = self._driver.orders.empty() and self._group.is_over
        return nothing_runs and (self._driver.is_over or self._interrupt is not None)

    def _start_ordered(self) -> None:
        while self._interrupt is None:
            try:
                order = self._driver.orders.get_nowait()
            except queue.Empty:
                return
            env = {**self._env, **order.env}
            command = self._command if is_here(order.host) else over_there(self._command, order.host, env)
            taken = {process.plan.index for process in self._orders}
            index = order.rank if order.rank not in taken else max(taken) + 1
            try:
                process = self._group.add(ProcessPlan("worker", index, command, env, shown=True))
            except OSError:
                order.end(1)
                raise
            self._orders[process] = order

    def _note_generation(self) -> None:
        """Whether Horovod has given the ranks anew; and who has the first one."""
        if isinstance(self._shown, _OfFirst):
            ranks = {process.plan.name: self._driver.rank_of(self._orders[process]) for process in self._group.running}
            self._shown.first = next((name for name, rank in ranks.items() if rank == 0), self._shown.first)
        if self._driver.generation == self._generation:
            return
        first, self._generation = self._generation == 0, self._driver.generation
        if not first:
            causes = [self._incident(failure).cause for failure in self._failures[:1]]
            self._failures.clear()
            self._failed_at = None
            self._change = _Change("".join(causes), self._driver.size, time.monotonic())
        self._largest = self._driver.size

    def _note_end(self, process: Process) -> None:
        order, status = self._orders[process], process.status
        assert status is not None
        order.end(exit_code(status))
        unwanted = process in self._kill_at or order.is_dismissed.is_set() or order.is_over.is_set()
        if status not in (0, PREEMPTED) and not unwanted and self._interrupt is None:
            self._failures.append(self._group.failure(process, status))
            self._failed_at = time.monotonic()

    def _obey(self, signals: Sequence[signal.Signals]) -> None:
        for number in signals:
            if number == signal.SIGWINCH:
                self._group.resize()
            elif self._interrupt is None:
                self._interrupt = number
                running = self._group.running
                self._terminal.message(
                    f"{number.name} received and passed on to {_processes(len(running))} (SIGKILL in {self._grace:g} s)"
                )
                self._stop(running, number, self._grace)
            elif number == signal.SIGINT:
                self._group.kill()

    def _stop_dismissed(self) -> None:
        """Processes that Horovod does not want any more."""
        dismissed = set()
        while not self._driver.dismissed.empty():
            dismissed.add(self._driver.dismissed.get())
        for process in self._group.running:
            order = self._orders[process]
            if (order.host, order.slot) in dismissed:
                if not order.is_over.is_set():
                    self._terminal.message(f"{process.plan.name} is ended: its host {order.host} is not used any more")
                self._kill_at[process] = 0.0  # it waits for a rank in vain
            elif process not in self._kill_at and order.is_over.is_set():
                self._stop([process], signal.SIGTERM, min(self._grace, _FAILURE_GRACE))
            elif process not in self._kill_at and order.is_dismissed.is_set():
                self._kill_at[process] = time.monotonic() + self._grace
            if time.monotonic() > self._kill_at.get(process, float("inf")):
                process.kill()

    def _stop(self, processes: Sequence[Process], number: int, grace: float) -> None:
        for process in processes:
            process.signal(number)
            self._kill_at[process] = time.monotonic() + grace

    def _tell(self) -> None:
        while not self._driver.news.empty():
            self._terminal.message(self._driver.news.get())
        progress = self._group.progress()
        self._on_progress(progress)
        self._progressed = self._progressed or any(report and report.has_trained for report in progress.values())
        if self._failed_at is not None and time.monotonic() - self._failed_at > _WAIT_SECONDS:
            self._failed_at = None
            cause = self._incident(self._failures[0]).cause
            self._terminal.message(
                f"{cause}; the others have not gone on yet, which takes hosts for {_processes(self._fewest)} at least"
            )
        if (change := self._change) is None:
            return
        steps = [
            report.resumed_step
            for report in progress.values()
            if report is not None and report.time > change.at and report.resumed_step is not None
        ]
        if not steps and time.monotonic() - change.at < _SAY_SECONDS and not self._driver.is_over:
            return
        where = f" from step {max(step for step in steps if step is not None)}" if steps else ""
        why = change.cause or "the hosts have changed"
        self._terminal.message(f"{why}; the training goes on{where} with {_processes(change.size)}")
        self._change = None

    def _incident(self, failure: Failure) -> Incident:
        workers, now = self._largest, time.monotonic()
        return Incident(failure, True, self._group.progress(), self._progressed, workers, now)

    def _ending(self) -> ElasticEnding:
        # Who was taken off the list, or failed before the others went on, does not count.
        last = {
            (order.host, order.slot): process.status
            for process, order in self._orders.items()
            if self._driver.rank_of(order) >= 0
        }
        codes = set(last.values())
        if codes and codes <= {0}:
            return ElasticEnding(0)
        if codes and codes <= {0, PREEMPTED}:
            return ElasticEnding(PREEMPTED, interrupt=self._interrupt)
        if self._interrupt is not None:
            return ElasticEnding(exit_code(-self._interrupt), interrupt=self._interrupt)
        if not self._failures:
            return ElasticEnding(1, error=self._driver.error)
        failure = choose(self._failures)
        return ElasticEnding(failure.exit_code, self._incident(failure), error=self._driver.error)


class _OfFirst:
    """A terminal that shows the output of one process only; which one that is may change."""

    def __init__(self, terminal: Terminal):
        self.first = ""
        self._terminal = terminal

    @property
    def is_tty(self) -> bool:
        return self._terminal.is_tty

    def size_inside(self, name: str) -> os.terminal_size:
        return self._terminal.size_inside(name)

    def feed(self, name: str, data: bytes, final: bool = False) -> None:
        if name == self.first:
            self._terminal.feed(name, data, final)


def _processes(count: int) -> str:
    return f"{count} process{'' if count == 1 else 'es'}"
