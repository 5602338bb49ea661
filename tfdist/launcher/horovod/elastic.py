"""`tfdist run --transport horovod -n MIN:MAX --host-discovery PROGRAM`: Horovod says who takes part, tfdist runs it.

To be imported once Horovod is known to be there.
"""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from horovod.runner.util import network

from tfdist.launcher.attempt import FAILURE_GRACE, Attempt, Ending, Surroundings
from tfdist.launcher.failure import Failure, choose, counted, exit_code
from tfdist.launcher.group import ProcessGroup
from tfdist.launcher.guardian import Guardian
from tfdist.launcher.horovod.driver import Driver, Order, QuietHorovod
from tfdist.launcher.horovod.options import ElasticOptions
from tfdist.launcher.horovod.remote import over_there
from tfdist.launcher.operating_system import SignalInbox
from tfdist.launcher.process import Process, start_unpinned
from tfdist.launcher.restarts import Incident, Restart, RestartPolicy
from tfdist.launcher.run_plan import ProcessPlan
from tfdist.launcher.supervisor import Supervisor
from tfdist.launcher.terminal import Terminal
from tfdist.launcher.warm.zygote import WarmStarts
from tfdist.strategies.horovod.memory_folders import remove_abandoned
from tfdist.supervision.exit_codes import PREEMPTED, UNSAVED

# How long to wait for those that go on to say from which step, before it is told that they do.
_SAY_SECONDS = 30.0
# After how long to say that the others have not gone on.
_WAIT_SECONDS = 15.0


class ElasticRun(Supervisor):
    """An elastic job, over restarts.

    Args:
        options: what the user asked for; checked by `check_hosts`.
        env: the environment of the processes.
        log_dir: folder of the logs; it exists.
        terminal: where output and messages go.
    """

    def __init__(self, options: ElasticOptions, env: Mapping[str, str], log_dir: Path, terminal: Terminal) -> None:
        super().__init__(options.fewest, RestartPolicy(options.max_restarts), log_dir, terminal)
        self._options, self._env = options, env

    def run(self) -> int:
        """Returns the exit code once no process of the job exists any more."""
        remove_abandoned()
        try:
            with QuietHorovod(self._log_dir):
                return super().run()
        finally:
            remove_abandoned()

    def _attempt(self, restart: Restart, inbox: SignalInbox, guardian: Guardian, starts: WarmStarts) -> Ending:
        asked, env = self._options, {**self._env, "TFDIST_RESTART": str(restart.number)}
        self._note_start(restart.number, asked.fewest, processes={})  # Horovod has not said yet which there are
        driver = Driver(asked.fewest, asked.most, asked.program, asked.interface)
        self._terminal.only = None if asked.show_all else ""
        # Horovod's driver has threads in this process.
        with ProcessGroup([], self._log_dir, self._terminal, guardian, restart.number, start_unpinned) as group:
            around = Surroundings(group, inbox, self._terminal, asked.grace, self._decide, self._on_progress)
            return ElasticAttempt(around, driver, asked, env).run()

    def _report(self, failure: Failure, incident: Incident | None, reason: str) -> None:
        assert incident is not None
        why = f"; {reason}" if reason else ""
        self._terminal.message(
            f"{incident.cause}{why}; too few processes are left to go on, since Horovod does not use a host again "
            "on which one has failed. Started again, a script with BackupAndRestore goes on from its last backup. "
            f"Complete log: {failure.log_path}"
        )


@dataclass
class _Change:
    """Other processes than before are to go on."""

    cause: str
    size: int
    at: float


class ElasticAttempt(Attempt):
    """Runs what Horovod's driver orders, until nothing can go on, or all is done.

    Args:
        around: what it works with; without processes yet.
        driver: not yet started.
        options: what the user asked for.
        env: the processes' environment, but for what Horovod adds.
    """

    def __init__(self, around: Surroundings, driver: Driver, options: ElasticOptions, env: Mapping[str, str]) -> None:
        super().__init__(around)
        self._driver, self._fewest, self._command, self._env = driver, options.fewest, options.command, env
        self._chosen = options.chosen
        self._orders: dict[Process, Order] = {}
        # Those that Horovod does not want any more.
        self._unwanted_until: dict[Process, float] = {}
        self._generation = self._largest = 0
        self._failed_at: float | None = None
        self._change: _Change | None = None

    def run(self) -> Ending:
        """Returns once no process exists any more."""
        self._driver.start()
        return super().run()

    def _is_over(self) -> bool:
        nothing_runs = self._driver.orders.empty() and self._group.is_over
        return nothing_runs and (self._driver.is_over or self._interrupt is not None)

    def _go_on(self) -> None:
        self._start_ordered()
        self._note_generation()
        self._stop_dismissed()
        self._tell()

    def _start_ordered(self) -> None:
        while True:
            try:
                order = self._driver.orders.get_nowait()
            except queue.Empty:
                return
            if self._interrupt is not None:
                order.end(1)
                continue
            env = {**self._env, **order.env}
            command, variables = self._command, b""
            if not is_here(order.host):
                command, variables = over_there(command, order.host, env, self._chosen)
            taken = {process.plan.index for process in self._orders}
            index = order.rank if order.rank not in taken else max(taken) + 1
            try:
                process = self._group.add(ProcessPlan("worker", index, command, env, shown=True, stdin=variables))
            except OSError:
                order.end(1)
                raise
            self._orders[process] = order

    def _note_generation(self) -> None:
        """Whether Horovod has given the ranks anew; and who has the first one."""
        if self._terminal.only is not None:
            ranks = {process.plan.name: self._driver.rank_of(self._orders[process]) for process in self._group.running}
            self._terminal.only = next((name for name, rank in ranks.items() if rank == 0), self._terminal.only)
        if self._driver.generation == self._generation:
            return
        first, self._generation = self._generation == 0, self._driver.generation
        if not first:
            causes = [self._incident_of(failure).cause for failure in self._failures[:1]]
            self._failures.clear()
            self._failed_at = None
            self._change = _Change("".join(causes), self._driver.size, time.monotonic())
        self._largest = self._driver.size

    def _note_end(self, process: Process) -> None:
        order, status = self._orders[process], self._group.status(process)
        assert status is not None
        order.end(exit_code(status))
        unwanted = process in self._unwanted_until or order.is_dismissed.is_set() or order.is_over.is_set()
        if status not in (0, PREEMPTED) and not unwanted and self._interrupt is None:
            self._note_failure(self._group.failure(process, status))
            self._failed_at = time.monotonic()

    def _stop_dismissed(self) -> None:
        """Ends processes that Horovod does not want any more."""
        dismissed = set()
        while not self._driver.dismissed.empty():
            dismissed.add(self._driver.dismissed.get())
        now = time.monotonic()
        for process in self._group.running:
            order = self._orders[process]
            if (order.host, order.slot) in dismissed:
                if not order.is_over.is_set():
                    self._terminal.message(f"{process.plan.name} is ended: its host {order.host} is not used any more")
                self._unwanted_until[process] = now  # it waits for a rank in vain
            elif process not in self._unwanted_until and self._interrupt is None:
                if order.is_over.is_set():
                    process.signal(signal.SIGTERM)
                    self._unwanted_until[process] = now + min(self._grace, FAILURE_GRACE)
                elif order.is_dismissed.is_set():
                    self._unwanted_until[process] = now + self._grace
            if now >= self._unwanted_until.get(process, float("inf")):
                process.kill()

    def _tell(self) -> None:
        while not self._driver.news.empty():
            self._terminal.message(self._driver.news.get())
        if self._failed_at is not None and time.monotonic() - self._failed_at > _WAIT_SECONDS:
            self._failed_at = None
            cause = self._incident_of(self._failures[0]).cause
            self._terminal.message(
                f"{cause}; the others have not gone on yet, which takes hosts for "
                f"{counted(self._fewest, 'process', 'es')} at least"
            )
        if (change := self._change) is None:
            return
        steps = [
            report.resumed_step
            for report in self._group.progress().values()
            if report is not None and report.time > change.at and report.resumed_step is not None
        ]
        if not steps and time.monotonic() - change.at < _SAY_SECONDS and not self._driver.is_over:
            return
        where = f" from step {max(steps)}" if steps else ""
        why = change.cause or "the hosts have changed"
        self._terminal.message(f"{why}; the training goes on{where} with {counted(change.size, 'process', 'es')}")
        self._change = None

    def _workers(self) -> int:
        return self._largest

    def _ending(self) -> Ending:
        self._driver.stop()
        # Who was taken off the list, or failed before the others went on, does not count.
        last = {
            (order.host, order.slot): self._group.status(process)
            for process, order in self._orders.items()
            if self._driver.rank_of(order) >= 0
        }
        codes = set(last.values())
        if codes and codes <= {0}:
            return Ending(0)
        if codes and codes <= {0, PREEMPTED}:
            return Ending(PREEMPTED, interrupt=self._interrupt)
        if self._interrupt is not None and UNSAVED in codes and codes <= {0, PREEMPTED, UNSAVED}:
            return Ending(UNSAVED, interrupt=self._interrupt)
        if self._interrupt is not None:
            return Ending(exit_code(-self._interrupt), interrupt=self._interrupt)
        if not self._failures:
            error = self._driver.error
            why = f"Horovod could not start the processes: {error}" if error else "Horovod has ended the processes"
            return Ending(1, error=why)
        failure = choose(self._failures)
        self._blame(failure)
        return Ending(failure.exit_code, failure, self._incident, self._decision)


def is_here(host: str) -> bool:
    """Whether a name is one of this machine.

    Example:
        >>> is_here("localhost")
        True
    """
    return network.resolve_host_address(host) in network.get_local_host_addresses()
