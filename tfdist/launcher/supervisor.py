"""A run with its restarts: one attempt after another until the training is complete, or given up."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tfdist.launcher.attempt import ClusterAttempt, Ending, Loss, Replacements, Surroundings
from tfdist.launcher.failure import Failure, Watchdog, counted, exit_code
from tfdist.launcher.group import ProcessGroup
from tfdist.launcher.guardian import Guardian
from tfdist.launcher.operating_system import SignalInbox
from tfdist.launcher.process import StartProgram
from tfdist.launcher.restarts import GiveUp, Incident, Recovery, Replacement, Restart, RestartPolicy, used_up
from tfdist.launcher.run_plan import ProcessPlan
from tfdist.launcher.terminal import Terminal
from tfdist.launcher.warm.zygote import WarmStarts
from tfdist.supervision.events import EventLog
from tfdist.supervision.exit_codes import PREEMPTED, UNSAVED
from tfdist.supervision.identity import Identity
from tfdist.supervision.progress import Progress

_TICK = 0.05
# A program may take twice as long as before until it calls fit.
_UNUSUAL = 2.0
_TOO_SOON = "ended before the training began again"

# Given the number of training processes and that of the restart, holds the ports and yields the plans.
Prepare = Callable[[int, int], AbstractContextManager[Sequence[ProcessPlan]]]


@dataclass(frozen=True)
class Patience:
    """How long to wait for what, in seconds.

    Attributes:
        grace: between a signal that is passed on and SIGKILL.
        hang_timeout: without progress, until a process counts as hung; None: what is unusual for it.
        start_timeout: until the first step.
    """

    grace: float = 10.0
    hang_timeout: float | None = None
    start_timeout: float = 600.0


class Supervisor:
    """Runs one attempt after another until the training is complete, or given up.

    What an attempt is, is in the subclasses.

    Args:
        workers: how many training processes to begin with.
        policy: decides about restarts.
        log_dir: folder of the logs; it exists.
        terminal: where output and messages go.
        warm: whether to keep a process ready for quick restarts, once the program trains.
    """

    def __init__(
        self, workers: int, policy: RestartPolicy, log_dir: Path, terminal: Terminal, warm: bool = False
    ) -> None:
        self._workers = workers
        self._policy = policy
        self._log_dir = log_dir
        self._terminal = terminal
        self._warm = warm
        self._events = EventLog(str(log_dir), "launcher")
        self._recovery: Recovery | None = None

    def run(self) -> int:
        """Returns the exit code of the run once none of its processes exists any more.

        Raises:
            OSError: a process could not be started; those already started have been killed.
            ClusterError: there are no free ports.
        """
        restart = Restart(0, self._workers, 0.0)
        with SignalInbox() as inbox, Guardian() as guardian, WarmStarts(guardian, self._warm) as starts:
            while True:
                ending = self._attempt(restart, inbox, guardian, starts)
                if not isinstance(ending.decision, Restart) or ending.interrupt is not None:
                    return self._conclude(ending)
                restart = ending.decision
                assert ending.incident is not None
                self._announce(ending.incident, restart)
                if (number := _wait_to_restart(restart.delay, inbox, starts.worth_waiting)) is not None:
                    self._terminal.message(f"{number.name} received: not restarted")
                    self._events.write("interrupted", signal=number.name, exit_code=exit_code(-number))
                    return exit_code(-number)

    def _attempt(self, restart: Restart, inbox: SignalInbox, guardian: Guardian, starts: WarmStarts) -> Ending:
        raise NotImplementedError

    def _note_start(self, restart: int, workers: int, processes: Mapping[str, int]) -> None:
        what = {"restart": restart, "workers": workers, "processes": processes}
        self._events.write("start", **what, launcher=asdict(Identity.of(os.getpid())))

    def _decide(self, incident: Incident) -> Restart | GiveUp:
        self._end_recovery(_TOO_SOON)
        decision = self._policy.decide(incident)
        failure = incident.failure
        self._events.write(
            "failure",
            task=failure.name,
            kind=_kind(failure),
            cause=incident.cause,
            exit_code=failure.exit_code,
            step=incident.step,
            log=failure.log_path,
        )
        return decision

    def _announce(self, incident: Incident, restart: Restart) -> None:
        self._events.write("restart", restart=restart.number, workers=restart.workers, delay=restart.delay)
        self._recovery = Recovery(incident, restart, self._policy.limit)
        when = f" in {restart.delay:g} s" if restart.delay else ""
        self._terminal.message(f"{incident.cause}; {self._recovery.name}{when}")

    def _on_progress(self, progress: Mapping[str, Progress | None]) -> None:
        if self._recovery is not None and self._recovery.is_complete(progress):
            outcome = self._recovery.outcome(progress, time.monotonic())
            self._events.write("training-again", **asdict(outcome))
            self._end_recovery(str(outcome))

    def _end_recovery(self, how: str) -> None:
        if self._recovery is not None:
            self._terminal.message(f"{self._recovery.name}: {how}")
            self._recovery = None

    def _conclude(self, ending: Ending) -> int:
        self._end_recovery("complete" if ending.code == 0 else _TOO_SOON)
        if ending.code == PREEMPTED and ending.failure is None:
            self._events.write("preempted", exit_code=ending.code)
        elif ending.error:
            self._events.write("gave-up", reason=ending.error, exit_code=ending.code)
            self._terminal.message(ending.error)
        elif ending.failure is not None:
            reason = ending.decision.reason if isinstance(ending.decision, GiveUp) else ""
            self._events.write("gave-up", reason=reason, exit_code=ending.code)
            self._report(ending.failure, ending.incident, reason)
        elif ending.interrupt is not None:
            self._events.write("interrupted", signal=ending.interrupt.name, exit_code=ending.code)
            if ending.code == UNSAVED:
                self._terminal.message(
                    f"stopped by {ending.interrupt.name}, and could not save (exit code {UNSAVED}): what was trained "
                    "since the last backup is lost; its output says why, and where it goes on"
                )
        else:
            self._events.write("complete", restarts=self._policy.used)
        return ending.code

    def _report(self, failure: Failure, incident: Incident | None, reason: str) -> None:
        """Tells the user which failure has ended the run, and why nothing is started again."""
        self._terminal.message(failure.report())
        if reason:
            self._terminal.message(reason)


class TrainingRun(Supervisor):
    """Runs processes that are all started together, and end together. Where they run is in the subclasses.

    Args:
        workers: how many training processes to begin with.
        policy: decides about restarts.
        log_dir: folder of the logs; it exists.
        terminal: where output and messages go.
        patience: how long to wait for what.
        warm: whether to keep a process ready for quick restarts, once the program trains.
    """

    def __init__(
        self,
        workers: int,
        policy: RestartPolicy,
        log_dir: Path,
        terminal: Terminal,
        patience: Patience,
        warm: bool = False,
    ) -> None:
        super().__init__(workers, policy, log_dir, terminal, warm)
        self._patience = patience
        self._started_at = 0.0
        self._has_reported = False
        self._preparation = 0.0

    def _attempt(self, restart: Restart, inbox: SignalInbox, guardian: Guardian, starts: WarmStarts) -> Ending:
        with self._started(restart, inbox, guardian, starts) as group:
            self._started_at, self._has_reported = time.monotonic(), False
            # Whether the program trains, and how long it takes to prepare for that, is known from the first time.
            due = self._started_at + _UNUSUAL * self._preparation if restart.number else None
            watchdog = Watchdog(self._patience.hang_timeout, self._patience.start_timeout, due)
            processes = {process.plan.name: process.group for process in group.processes}
            self._note_start(restart.number, group.workers, processes)
            on_progress = functools.partial(self._note_progress, starts)
            replacements = Replacements(group, self._replace, starts.worth_waiting)
            around = Surroundings(group, inbox, self._terminal, self._patience.grace, self._decide, on_progress)
            return ClusterAttempt(around, watchdog, replacements).run()

    def _started(
        self, restart: Restart, inbox: SignalInbox, guardian: Guardian, starts: WarmStarts
    ) -> AbstractContextManager[ProcessGroup]:
        """The processes of an attempt, as long as the `with` block lasts."""
        raise NotImplementedError

    def _replace(self, loss: Loss) -> Replacement | None:
        failure, replacement = loss.failure, self._policy.replace(loss.failure.name, loss.lived)
        lost = {"task": failure.name, "kind": _kind(failure), "cause": failure.cause, "exit_code": failure.exit_code}
        what = f"{failure.cause} ({failure.log_path})"
        if replacement is not None:
            number, delay = replacement.number, replacement.delay
            self._events.write("replacement", **lost, log=failure.log_path, number=number, delay=delay)
            when = f" in {delay:g} s" if delay else ""
            self._terminal.message(
                f"{what}; started again{when} (replacement {number} of {self._policy.limit}), the others go on"
            )
        elif loss.left:
            self._events.write("loss", **lost, log=failure.log_path, workers=loss.left)
            self._terminal.message(
                f"{what}; not started again: {used_up(self._policy.used)}; the training goes on with "
                f"{counted(loss.left, 'worker')}"
            )
        return replacement

    def _note_progress(self, starts: WarmStarts, progress: Mapping[str, Progress | None]) -> None:
        if not self._has_reported and any(progress.values()):
            self._has_reported = True
            self._preparation = max(self._preparation, time.monotonic() - self._started_at)
        if any(report is not None and report.has_trained for report in progress.values()):
            starts.prepare(self._preparation)
        self._on_progress(progress)


class ClusterRun(TrainingRun):
    """Runs a cluster on this machine.

    Args:
        prepare: plans one attempt.
        workers: how many training processes to begin with.
        policy: decides about restarts.
        log_dir: folder of the logs; it exists.
        terminal: where output and messages go.
        patience: how long to wait for what.
        warm: whether to keep a process ready for quick restarts, once the program trains.
        start_program: starts what is planned; by default it is started in the quickest way there is.

    Example:
        >>> ClusterRun(prepare, 2, RestartPolicy(3), Path("logs"), terminal, Patience()).run()  # doctest: +SKIP
        0
    """

    def __init__(
        self,
        prepare: Prepare,
        workers: int,
        policy: RestartPolicy,
        log_dir: Path,
        terminal: Terminal,
        patience: Patience,
        warm: bool = False,
        start_program: StartProgram | None = None,
    ) -> None:
        super().__init__(workers, policy, log_dir, terminal, patience, warm)
        self._prepare = prepare
        self._start_program = start_program

    @contextmanager
    def _started(
        self, restart: Restart, inbox: SignalInbox, guardian: Guardian, starts: WarmStarts
    ) -> Iterator[ProcessGroup]:
        start = self._start_program or starts.start
        with (
            self._prepare(restart.workers, restart.number) as plans,
            ProcessGroup(plans, self._log_dir, self._terminal, guardian, restart.number, start) as group,
        ):
            yield group


def _kind(failure: Failure) -> str:
    if failure.hang or failure.lost:
        return "hang" if failure.hang else "host"
    return "signal" if failure.status < 0 else "exit"


def _wait_to_restart(seconds: float, inbox: SignalInbox, longer: Callable[[], float]) -> signal.Signals | None:
    """Waits so many seconds, or `longer()` if that is more; returns the signal that ended the waiting early."""
    begin = time.monotonic()
    while True:
        number = inbox.take_stop()
        remaining = begin + max(seconds, longer()) - time.monotonic()
        if number is not None or remaining <= 0:
            return number
        time.sleep(min(_TICK, remaining))
