"""One attempt of a run: from the start of its processes to the end of the last one, and why it ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tfdist.launcher.failure import Failure, Watchdog, choose, counted, exit_code, suspect
from tfdist.launcher.group import ProcessGroup
from tfdist.launcher.operating_system import SignalInbox
from tfdist.launcher.process import Process
from tfdist.launcher.restarts import GiveUp, Incident, Replacement, Restart
from tfdist.launcher.terminal import Terminal
from tfdist.supervision.exit_codes import HUNG, PREEMPTED
from tfdist.supervision.progress import Progress

# After a failure that looks like the consequence of another: how long the culprit may take to end as well.
_MOMENT = 2.0
# Once a peer has failed nothing can be saved any more; TensorFlow swallows SIGTERM, so most of this is waiting.
FAILURE_GRACE = 2.0
# Wrappers such as `uv run` pass the Ctrl-C on that we already got from the terminal.
_SAME_KEY_PRESS = 0.3


@dataclass(frozen=True)
class Ending:
    """How an attempt ended.

    Attributes:
        code: exit code of the run, if this was the end of it.
        failure: the process to blame, if one failed.
        incident: the same with all that is known; None if the processes were being stopped already.
        decision: what was decided about that.
        interrupt: the signal that the launcher got, if any.
        error: why the processes could not be started, if they could not.
    """

    code: int
    failure: Failure | None = None
    incident: Incident | None = None
    decision: Restart | GiveUp | None = None
    interrupt: signal.Signals | None = None
    error: str = ""


@dataclass(frozen=True)
class Surroundings:
    """What an attempt of any kind works with.

    Attributes:
        group: the processes.
        inbox: the signals to the launcher.
        terminal: where messages go.
        grace: seconds between a signal that is passed on and SIGKILL.
        decide: is asked about a failure that ends the attempt, while the processes still exist.
        on_progress: is told at every tick what the training processes report.
    """

    group: ProcessGroup
    inbox: SignalInbox
    terminal: Terminal
    grace: float
    decide: Callable[[Incident], Restart | GiveUp]
    on_progress: Callable[[Mapping[str, Progress | None]], object]


class Attempt:
    """Sees a group of processes through to its end: passes on output and signals, and asks what to do about a failure.

    What is specific to a kind of run is in the subclasses.

    Args:
        around: what it works with.
    """

    def __init__(self, around: Surroundings) -> None:
        self._group = around.group
        self._inbox = around.inbox
        self._terminal = around.terminal
        self._grace = around.grace
        self._ask = around.decide
        self._on_progress = around.on_progress
        self._failures: list[Failure] = []
        self._first_failure_at = 0.0
        self._incident: Incident | None = None
        self._decision: Restart | GiveUp | None = None
        self._progressed = False
        self._interrupt: signal.Signals | None = None
        self._interrupted_at = 0.0
        self._interrupted: list[Process] = []
        self._stopping = False
        self._kill_at: float | None = None

    def run(self) -> Ending:
        """Returns once no process exists any more."""
        while not self._is_over():
            for process in self._group.tick():
                self._note_end(process)
            self._obey(self._inbox.take())
            self._watch()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._group.kill()
            self._go_on()
        return self._ending()

    def _is_over(self) -> bool:
        return self._group.is_over

    def _note_end(self, process: Process) -> None:
        raise NotImplementedError

    def _go_on(self) -> None:
        """What else is done at each tick."""

    def _ending(self) -> Ending:
        raise NotImplementedError

    def _note_failure(self, failure: Failure) -> None:
        if not self._failures:
            self._first_failure_at = time.monotonic()
        self._failures.append(failure)

    def _watch(self) -> None:
        progress = self._group.progress()
        self._on_progress(progress)
        self._progressed = self._progressed or _has_trained(progress)

    def _obey(self, signals: Sequence[signal.Signals]) -> None:
        for number in signals:
            if number == signal.SIGWINCH:
                self._group.resize()
            elif self._interrupt is None:
                self._begin_interrupt(number)
            elif number == signal.SIGINT and time.monotonic() - self._interrupted_at > _SAME_KEY_PRESS:
                self._kill_at = time.monotonic()

    def _begin_interrupt(self, number: signal.Signals) -> None:
        self._interrupt, self._interrupted_at = number, time.monotonic()
        self._interrupted = self._group.running
        again = "; press Ctrl-C again to kill them now" if number == signal.SIGINT else ""
        count = counted(len(self._interrupted), "process", "es")
        self._terminal.message(f"{number.name} received and passed on to {count} (SIGKILL in {self._grace:g} s{again})")
        self._stop(number, self._grace)

    def _stop(self, number: signal.Signals, grace: float) -> None:
        self._stopping = True
        self._group.signal(number)
        deadline = time.monotonic() + grace
        self._kill_at = deadline if self._kill_at is None else min(self._kill_at, deadline)

    def _blame(self, failure: Failure) -> None:
        """Asks what to do about a failure that ends the attempt."""
        self._incident = self._incident_of(failure)
        self._decision = self._ask(self._incident)

    def _incident_of(self, failure: Failure) -> Incident:
        return Incident(
            failure,
            trains=any(process.plan.name == failure.name for process in self._group.trainers),
            progress=self._group.progress(),
            progressed=self._progressed,
            workers=self._workers(),
            at=self._first_failure_at,
        )

    def _workers(self) -> int:
        return self._group.workers


@dataclass(frozen=True)
class Loss:
    """A worker that has died and that the others can do without for a while.

    Attributes:
        failure: what became of it.
        lived: for how many seconds it had existed.
        left: how many workers there are without it, those included that are about to be started again.
    """

    failure: Failure
    lived: float
    left: int


# What to do about a loss: None leaves the place empty.
Replace = Callable[[Loss], Replacement | None]


class Replacements:
    """Fills the places of workers that have died.

    Args:
        group: the processes.
        ask: decides about a loss.
        worth_waiting: for how many seconds it pays to wait with a start.

    Example:
        >>> replacements = Replacements(group, lambda loss: Replacement(1, 0.0), lambda: 0.0)  # doctest: +SKIP
        >>> if replacements.take(process):  # doctest: +SKIP
        ...     replacements.start_due()
    """

    def __init__(self, group: ProcessGroup, ask: Replace, worth_waiting: Callable[[], float]) -> None:
        self._group = group
        self._ask = ask
        self._worth_waiting = worth_waiting
        self._pending: dict[Process, tuple[Replacement, float]] = {}

    def take(self, process: Process) -> bool:
        """Takes care of a process that has failed. False: nobody is left or about to come, and the training is lost."""
        others = [other for other in self._group.processes if other.plan.is_replaceable and other is not process]
        left = sum(other.status is None or other in self._pending for other in others)
        assert process.status is not None
        decision = self._ask(Loss(self._group.failure(process, process.status), process.lived, left))
        if decision is None:
            return left > 0
        process.kill()  # its helpers: they may hold its port
        self._pending[process] = decision, time.monotonic()
        return True

    def start_due(self) -> bool:
        """Starts what is due by now; returns whether a place was empty that is being filled.

        Raises:
            OSError: a process could not be started.
        """
        was_empty = bool(self._pending)
        for process, (replacement, since) in list(self._pending.items()):
            wait = max(replacement.delay, self._worth_waiting())
            if process.is_over and time.monotonic() - since >= wait:
                del self._pending[process]
                self._group.replace(process, replacement.number)
        return was_empty


class ClusterAttempt(Attempt):
    """An attempt of a cluster on this machine: all processes are started together, and end together.

    Args:
        around: what it works with; the processes are already started.
        watchdog: judges whether the processes get on.
        replacements: fill the places of workers that the others can do without.

    Example:
        >>> with ProcessGroup(plans, log_dir, terminal, guardian) as group:  # doctest: +SKIP
        ...     around = Surroundings(group, inbox, terminal, 10.0, policy.decide, print)
        ...     ClusterAttempt(around, watchdog, Replacements(group, ask, lambda: 0.0)).run().code
        0
    """

    def __init__(self, around: Surroundings, watchdog: Watchdog, replacements: Replacements) -> None:
        super().__init__(around)
        self._watchdog = watchdog
        self._replacements = replacements
        self._preempted = False
        self._trained_at: float | None = None
        self._released = False

    def _note_end(self, process: Process) -> None:
        status = self._group.status(process)
        if process.plan.is_replaceable and status and self._is_dispensable(process):
            return
        if status == PREEMPTED and process.plan.trains:
            self._note_preemption()
        elif status and not self._stopping and not self._preempted:
            self._note_failure(self._group.failure(process, status))

    def _is_dispensable(self, process: Process) -> bool:
        """Whether the training goes on without a worker that has failed, or with another one in its place."""
        if self._stopping or self._preempted or self._failures:
            return False
        if self._training_has_ended():
            return True
        self._progressed = self._progressed or _has_trained(self._group.progress())
        # On a host that is lost, another one could not be started either.
        return self._progressed and not process.lost and self._replacements.take(process)

    def _note_preemption(self) -> None:
        """The processes save together and leave together; the slowest one has the grace period for that."""
        if not self._stopping and not self._preempted:
            self._kill_at = time.monotonic() + self._grace
        if self._incident is None:
            self._preempted = True
            self._failures.clear()  # a peer that leaves looks like a failure to those that are still there

    def _watch(self) -> None:
        super()._watch()
        if self._stopping or self._preempted or self._failures:
            return
        if not self._training_has_ended() and self._replacements.start_due():
            self._watchdog.excuse(time.monotonic())  # the others may have nobody to work with
        alive = {process.plan.name: process for process in self._group.trainers if process.status is None}
        seen = {name: report for name, report in self._group.progress().items() if name in alive}
        overdue = self._watchdog.overdue(seen, time.monotonic())
        if overdue is not None:
            states = {name: process.state for name, process in alive.items()}
            found = suspect(overdue, seen, states)
            self._note_failure(self._group.failure(alive[found.name], HUNG, found.text))

    def _go_on(self) -> None:
        now = time.monotonic()
        if self._failures and not self._stopping:
            culprit = choose(self._failures)
            if not culprit.is_consequence or now - self._first_failure_at > _MOMENT:
                self._end_after(culprit)
        if not (self._failures or self._released) and self._training_has_ended():
            self._trained_at = self._trained_at or now
            self._release(now - self._trained_at)

    def _training_has_ended(self) -> bool:
        return all(process.status is not None or process.plan.serves for process in self._group.trainers)

    def _end_after(self, failure: Failure) -> None:
        self._blame(failure)
        if isinstance(self._decision, Restart):
            self._stopping = True
            self._group.kill()
        else:
            self._stop(signal.SIGTERM, min(self._grace, FAILURE_GRACE))

    def _release(self, since_training: float) -> None:
        """Ends what outlasts the training: servers may serve for ever, an evaluator may watch for ever."""
        evaluates = not self._preempted and any(p.plan.job == "evaluator" for p in self._group.running)
        if evaluates and (self._stopping or since_training < self._grace):
            return  # it may have the last checkpoint to evaluate, or has its signal already
        self._released = True
        if evaluates:
            self._terminal.message(
                f"the evaluator still runs {self._grace:g} s after the end of the training and is stopped now; "
                "a longer --grace gives it more time"
            )
        self._stop(signal.SIGTERM, min(self._grace, FAILURE_GRACE))

    def _ending(self) -> Ending:
        if self._failures and not self._stopping:
            self._end_after(choose(self._failures))  # all ended within a moment
        failure = choose(self._failures) if self._failures else None
        return Ending(self._code(failure), failure, self._incident, self._decision, self._interrupt)

    def _code(self, failure: Failure | None) -> int:
        if self._preempted:
            return PREEMPTED
        if failure is not None:
            return failure.exit_code
        codes = {p.status for p in self._interrupted if p.plan.job != "ps" and not p.plan.serves}
        if self._interrupt is None or not codes:
            return 0
        if len(codes) == 1 and (code := codes.pop()) is not None and code >= 0:
            return code  # all ended by themselves and agree, for instance on "saved, start me again"
        return exit_code(-self._interrupt)


def _has_trained(progress: Mapping[str, Progress | None]) -> bool:
    return any(report is not None and report.has_trained for report in progress.values())
