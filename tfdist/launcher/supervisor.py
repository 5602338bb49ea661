"""A run: attempts, one after another, until the training is complete, or given up.

An attempt is a loop over what happens to its processes: output, ends, signals, progress, time. What to do about it,
policy.py decides.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tfdist.cluster.ports import reserve
from tfdist.cluster.rendezvous.endpoints import port_range
from tfdist.cluster.sockets import join_address
from tfdist.launcher.guardian import Guardian
from tfdist.launcher.operating_system import Interrupted, SignalInbox
from tfdist.launcher.output import Terminal, Writer
from tfdist.launcher.plan import ProcessPlan, RunOptions, jobs_of
from tfdist.launcher.policy import (
    Failure,
    GiveUp,
    Incident,
    Recovery,
    Restart,
    RestartPolicy,
    Watchdog,
    choose,
    counted,
    exit_code,
    suspect,
    used_up,
)
from tfdist.launcher.process import Process, ProcessGroup, StartProgram
from tfdist.supervision.events import FILE_NAME, EventLog
from tfdist.supervision.exit_codes import HUNG, PREEMPTED, UNSAVED
from tfdist.supervision.identity import Identity
from tfdist.supervision.progress import Progress

# A program may take twice as long as before until it calls fit.
_UNUSUAL = 2.0
_TOO_SOON = "ended before the training began again"

# After a failure that looks like the consequence of another: how long the culprit may take to end as well.
_MOMENT = 2.0
# Once a peer has failed nothing can be saved any more; TensorFlow swallows SIGTERM, so most of this is waiting.
FAILURE_GRACE = 2.0
# How a process ends that is asked to save, and does not: of the signal, also inside a shell, or as one that could not.
_UNSAVED_ENDS = (exit_code(-signal.SIGTERM), UNSAVED)
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

    @property
    def reason(self) -> str:
        """Why nothing is started again; empty if there is nothing to say about that."""
        return self.decision.reason if isinstance(self.decision, GiveUp) else ""


@dataclass(frozen=True)
class Patience:
    """How long to wait for what, in seconds.

    Attributes:
        grace: between a signal that is passed on and SIGKILL.
        hang_timeout: without progress, until a process counts as hung; None: what is unusual for it.
        start_timeout: until the first step.
    """

    grace: float = 30.0
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
        grace: seconds between a signal that is passed on and SIGKILL.

    Attributes:
        ending: how it ended, once it has.
    """

    def __init__(self, workers: int, policy: RestartPolicy, log_dir: Path, terminal: Terminal, grace: float) -> None:
        self._workers = workers
        self._policy = policy
        self._log_dir = log_dir
        self.terminal, self.grace = terminal, grace
        self._files = Writer()
        self._events = EventLog(str(log_dir), "launcher", do=self._files.do)
        self._recovery: Recovery | None = None

    def run(self, inbox: SignalInbox | None = None) -> int:
        """Returns the exit code of the run once none of its processes exists any more.

        Args:
            inbox: the signals to the launcher, if somebody has entered it; by default one is entered here.

        Raises:
            OSError: a process could not be started; those already started have been killed.
            ClusterError: there are no free ports.
        """
        try:
            with nullcontext(inbox) if inbox else SignalInbox() as signals, Guardian() as guardian:
                return self._run(signals, guardian)
        finally:
            self._files.close()
            if self._files.dropped:
                self.terminal.message(f"{FILE_NAME} in {self._log_dir}/ is not complete: {self._files.problem}")
            self.terminal.finish()

    def _run(self, inbox: SignalInbox, guardian: Guardian) -> int:
        restart = Restart(0, self._workers, 0.0)
        while True:
            ending = self._attempt(restart, inbox, guardian)
            if not isinstance(ending.decision, Restart) or ending.interrupt is not None:
                return self._conclude(ending)
            restart = ending.decision
            self._announce(ending.incident, restart)
            try:
                inbox.wait(restart.delay)
            except Interrupted as stop:
                self.terminal.message(f"{stop} received: not restarted")
                self._recovery = None
                return self._conclude(Ending(exit_code(-stop.signal), interrupt=stop.signal))

    def _attempt(self, restart: Restart, inbox: SignalInbox, guardian: Guardian) -> Ending:
        """Runs the processes once."""

    def _note_replacement(self, failure: Failure, number: int, delay: float, more: str = "") -> None:
        """Says that a process is started again alone, as which replacement, and after how many seconds."""
        self._events.write(
            "replacement",
            task=failure.name,
            kind=_kind(failure),
            cause=failure.cause,
            exit_code=failure.exit_code,
            log=failure.log_path,
            number=number,
            delay=delay,
        )
        when = f" in {delay:g} s" if delay else ""
        self.terminal.message(f"{failure.cause} ({failure.log_path}); started again{when}{more}")

    def _note_start(self, restart: int, workers: int, processes: Mapping[str, int]) -> None:
        launcher = asdict(Identity.of(os.getpid()))
        self._events.write("start", restart=restart, workers=workers, processes=processes, launcher=launcher)

    def _announce(self, incident: Incident, restart: Restart) -> None:
        self._events.write("restart", restart=restart.number, workers=restart.workers, delay=restart.delay)
        self._recovery = Recovery(incident, restart, f"{self._policy.used} of {self._policy.limit}")
        when = f" in {restart.delay:g} s" if restart.delay else ""
        self.terminal.message(f"{incident.cause}; {self._recovery.name}{when}")

    def _end_recovery(self, how: str) -> None:
        if self._recovery is not None:
            self.terminal.message(f"{self._recovery.name}: {how}")
            self._recovery = None

    def _conclude(self, ending: Ending) -> int:
        self.ending = ending
        self._end_recovery("complete" if ending.code == 0 else _TOO_SOON)
        if ending.code == PREEMPTED and ending.failure is None:
            self._events.write("preempted", exit_code=ending.code)
        elif ending.error:
            self._events.write("gave-up", reason=ending.error, exit_code=ending.code)
            self.terminal.message(ending.error)
        elif ending.failure is not None:
            self._events.write("gave-up", reason=ending.reason, exit_code=ending.code)
            self._report(ending.failure, ending.reason)
        elif ending.interrupt is not None:
            self._events.write("interrupted", signal=ending.interrupt.name, exit_code=ending.code)
            if ending.code == UNSAVED:
                self.terminal.message(
                    f"stopped by {ending.interrupt.name}, and could not save (exit code {UNSAVED}): what was trained "
                    "since the last backup is lost; its output says why, and where it goes on"
                )
        else:
            self._events.write("complete", restarts=self._policy.used)
        return ending.code

    def _report(self, failure: Failure, reason: str) -> None:
        """Tells the user which failure has ended the run, and why nothing is started again."""
        self.terminal.message(failure.report())
        if reason:
            self.terminal.message(reason)


class TrainingRun(Supervisor):
    """Runs processes that are all started together, and end together. Where they run is in the subclasses.

    Args:
        workers: how many training processes to begin with.
        policy: decides about restarts.
        log_dir: folder of the logs; it exists.
        terminal: where output and messages go.
        patience: how long to wait for what.

    Attributes:
        group: the processes that were started last.
    """

    def __init__(
        self,
        workers: int,
        policy: RestartPolicy,
        log_dir: Path,
        terminal: Terminal,
        patience: Patience,
    ) -> None:
        super().__init__(workers, policy, log_dir, terminal, patience.grace)
        self._patience = patience
        # When the processes were started that have not reported yet, and how long the slowest took for that.
        self._started_at: float | None = None
        self._preparation = 0.0
        self._looked_at = 0.0
        self._room: Future[int] | None = None

    def _attempt(self, restart: Restart, inbox: SignalInbox, guardian: Guardian) -> Ending:
        with self._started(restart, inbox, guardian) as group:
            self._inbox, self.group = inbox, group
            self._started_at = self._looked_at = time.monotonic()
            self._room = None
            # Whether the program trains, and how long it takes to prepare for that, is known from the first time.
            due = self._started_at + _UNUSUAL * self._preparation if restart.number else None
            watchdog = Watchdog(self._patience.hang_timeout, self._patience.start_timeout, due)
            self._note_start(restart.number, group.workers, {one.plan.name: one.group for one in group.processes})
            return ClusterAttempt(self, group, inbox, watchdog).run()

    def _started(
        self, restart: Restart, inbox: SignalInbox, guardian: Guardian
    ) -> AbstractContextManager[ProcessGroup]:
        """The processes of an attempt, as long as the `with` block lasts."""

    def decide(self, incident: Incident) -> Restart | GiveUp:
        """What to do about a failure that ends an attempt, while its processes still exist."""
        self._end_recovery(_TOO_SOON)
        decision = self._policy.decide(incident)
        if incident.asked:
            self.terminal.message(
                "the run will not grow: it has not saved on SIGTERM, as BackupAndRestore does by its preemption_signal="
            )
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

    def replace(self, failure: Failure, lived: float, left: int) -> tuple[int, float] | None:
        """What to do about a worker that the others can do without for a while, as the policy says it.

        Args:
            failure: what became of it.
            lived: for how many seconds it had existed.
            left: how many workers there are without it, those included that are about to be started again.
        """
        replacement = self._policy.replace(failure.name, lived)
        if replacement is not None:
            more = f" (replacement {replacement[0]} of {self._policy.limit}), the others go on"
            self._note_replacement(failure, *replacement, more)
        elif left:
            self._events.write(
                "loss",
                task=failure.name,
                kind=_kind(failure),
                cause=failure.cause,
                exit_code=failure.exit_code,
                log=failure.log_path,
                workers=left,
            )
            self.terminal.message(
                f"{failure.cause} ({failure.log_path}); not started again: {used_up(self._policy.used)}; the training "
                f"goes on with {counted(left, 'worker')}"
            )
        return replacement

    def more_workers(self, workers: int, progress: Mapping[str, Progress | None]) -> int:
        """With how many workers to go on instead of these; 0: with these."""
        if self._room is None:
            lacks = workers < self._workers and self._recovery is None
            if lacks and self._policy.may_grow(progress, time.monotonic() - self._looked_at):
                self._room = self._look_for_room()
            return 0
        if not self._room.done():
            return 0
        room, self._room, self._looked_at = min(self._room.result(), self._workers), None, time.monotonic()
        return room if room > workers else 0

    def _look_for_room(self) -> Future[int]:
        """For how many workers there is room: on one machine, for as many as there were."""
        found: Future[int] = Future()
        found.set_result(self._workers)
        return found

    def note_progress(self, progress: Mapping[str, Progress | None]) -> None:
        """Is called at every tick with what the training processes report."""
        if self._started_at is not None and any(progress.values()):
            self._preparation = max(self._preparation, time.monotonic() - self._started_at)
            self._started_at = None
        if self._recovery is not None and self._recovery.is_complete(progress):
            outcome = self._recovery.outcome(progress, time.monotonic())
            self._events.write("training-again", **asdict(outcome))
            self._end_recovery(str(outcome))


class ClusterRun(TrainingRun):
    """Runs a cluster on this machine.

    Args:
        options: what was asked for.
        plan: `plan_run` with all that is the same in each attempt.
        policy: decides about restarts.
        log_dir: folder of the logs; it exists.
        terminal: where output and messages go.
        patience: how long to wait for what.
        start_program: starts what is planned.

    Example:
        >>> run = ClusterRun(options, plan, policy, folder, terminal, Patience(), start_afresh)  # doctest: +SKIP
        >>> run.run()  # doctest: +SKIP
        0
    """

    def __init__(
        self,
        options: RunOptions,
        plan: Callable[..., list[ProcessPlan]],
        policy: RestartPolicy,
        log_dir: Path,
        terminal: Terminal,
        patience: Patience,
        start_program: StartProgram,
    ) -> None:
        super().__init__(options.workers, policy, log_dir, terminal, patience)
        self._options, self._plan = options, plan
        self._start_program = start_program

    @contextmanager
    def _started(self, restart: Restart, inbox: SignalInbox, guardian: Guardian) -> Iterator[ProcessGroup]:
        options = replace(self._options, workers=restart.workers)
        low, high = port_range(os.environ)
        with reserve(len(options.tasks), options.host, low, high) as reservation:
            jobs = jobs_of(options, [join_address(options.host, port) for port in reservation.ports])
            plans = self._plan(options, jobs=jobs, restart=restart.number)
            with ProcessGroup(
                plans, self._log_dir, self.terminal, guardian, restart.number, self._start_program
            ) as group:
                yield group


def announcement(options: RunOptions, log_dir: str, show_all: bool, place: str = "this machine") -> str:
    """The line at the start: what runs, and where the output is that is not shown.

    Example:
        >>> announcement(RunOptions(), "logs", show_all=False)
        '2 workers on this machine; output of worker 1 goes to logs/'
    """
    jobs = [job for job, _ in options.tasks]
    counts = [counted(jobs.count(job), job, "" if job == "ps" else "s") for job in dict.fromkeys(jobs)]
    if options.stages:
        counts[0] += f" ({options.stages})"
    what = counts[0] if len(counts) == 1 else f"{', '.join(counts[:-1])} and {counts[-1]}"
    hidden = [f"{job} {index}" for job, index in options.tasks[1:]]
    if show_all or not hidden:
        where = f"complete logs in {log_dir}/"
    elif len(hidden) == 1:
        where = f"output of {hidden[0]} goes to {log_dir}/"
    else:
        where = f"output of the other {len(hidden)} goes to {log_dir}/"
    return f"{what} on {place}; {where}"


class Attempt:
    """Sees a group of processes through to its end: passes on output and signals.

    What is specific to a kind of run is in the subclasses.

    Args:
        run: what it is an attempt of.
        group: the processes.
        inbox: the signals to the launcher.
    """

    def __init__(self, run: Supervisor, group: ProcessGroup, inbox: SignalInbox) -> None:
        self._run, self._group, self._inbox = run, group, inbox
        self._terminal, self._grace = run.terminal, run.grace
        self._interrupt: signal.Signals | None = None
        self._interrupted_at = 0.0
        self._interrupted: list[Process] = []
        self._stopping = False
        self._kill_at: float | None = None
        # Processes that are to be started again, as which replacement, and when.
        self._pending: dict[Process, tuple[int, float]] = {}

    def run(self) -> Ending:
        """Returns once no process exists any more."""
        while not self._is_over():
            for process in self._group.tick():
                self._note_end(process)
            self._obey(self._inbox.take())
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._group.kill()
            self._go_on()
        return self._ending()

    def _is_over(self) -> bool:
        return self._group.is_over

    def _note_end(self, process: Process) -> None:
        """Is called once for each process that has ended."""

    def _go_on(self) -> None:
        """What else is done at each tick."""

    def _ending(self) -> Ending:
        """How it has ended."""

    def _obey(self, signals: Sequence[signal.Signals]) -> None:
        for number in signals:
            if self._interrupt is None:
                self._begin_interrupt(number)
            elif number == signal.SIGINT and time.monotonic() - self._interrupted_at > _SAME_KEY_PRESS:
                self._kill_at = time.monotonic()

    def _start_replacements(self) -> bool:
        """Starts what is due by now; returns whether a place was empty that is being filled.

        Raises:
            OSError: a process could not be started.
        """
        was_empty = bool(self._pending)
        for process, (number, due) in list(self._pending.items()):
            if process.is_over and time.monotonic() >= due:
                del self._pending[process]
                self._group.replace(process, number)
        return was_empty

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


class ClusterAttempt(Attempt):
    """An attempt of a cluster: all processes are started together, and end together.

    It asks the run what to do about a failure.

    Args:
        run: what it is an attempt of; decides.
        group: the processes, which have started.
        inbox: the signals to the launcher.
        watchdog: judges whether the processes get on.
    """

    def __init__(self, run: TrainingRun, group: ProcessGroup, inbox: SignalInbox, watchdog: Watchdog) -> None:
        super().__init__(run, group, inbox)
        self._watchdog = watchdog
        self._failures: list[Failure] = []
        self._first_failure_at = 0.0
        self._incident: Incident | None = None
        self._decision: Restart | GiveUp | None = None
        self._progressed = False
        self._grows_to = 0
        # Processes that were killed and may take a while to end.
        self._hung: set[Process] = set()
        self._preempted = False
        self._released = False

    def _note_end(self, process: Process) -> None:
        status = self._group.status(process)
        if process.plan.is_replaceable and status and self._is_dispensable(process):
            return
        if status == PREEMPTED:
            self._note_preemption()
        elif status and not self._stopping and not self._preempted:
            self._note_failure(self._group.failure(process, status))

    def _is_dispensable(self, process: Process) -> bool:
        """Whether the training goes on without a worker that has failed, or with another one in its place."""
        if self._stopping or self._preempted or self._failures:
            return False
        if self._training_has_ended():
            return True
        self._note_progress()
        # On a host that is lost, another one could not be started either.
        return self._progressed and not process.lost and self._is_replaced(process)

    def _is_replaced(self, process: Process) -> bool:
        """Has a worker replaced, or not. False: nobody is left or about to come, and the training is lost."""
        others = [other for other in self._group.trainers if other is not process]
        left = sum(other.status is None or other in self._pending for other in others)
        replacement = self._run.replace(self._group.failure(process, process.status), process.lived, left)
        if replacement is None:
            return left > 0
        process.kill()  # its helpers: they may hold its port
        number, delay = replacement
        self._pending[process] = number, time.monotonic() + delay
        return True

    def _note_preemption(self) -> None:
        """The processes save together and leave together; the slowest one has the grace period for that."""
        if not self._stopping and not self._preempted:
            self._kill_at = time.monotonic() + self._grace
        if self._incident is None:
            self._preempted = True
            self._failures.clear()  # a peer that leaves looks like a failure to those that are still there

    def _note_failure(self, failure: Failure) -> None:
        if not self._failures:
            self._first_failure_at = time.monotonic()
        self._failures.append(failure)

    def _note_progress(self) -> None:
        progress = self._group.progress()
        self._run.note_progress(progress)
        self._progressed = self._progressed or any(report and report.has_trained for report in progress.values())

    def _watch(self) -> None:
        """Looks for hangs, for workers that are due to be started again, and for room for more."""
        if not self._training_has_ended() and self._start_replacements():
            self._watchdog.excuse(time.monotonic())  # the others may have nobody to work with
        alive = {one.plan.name: one for one in self._group.processes if one.status is None and one not in self._hung}
        seen = {name: report for name, report in self._group.progress().items() if name in alive}
        overdue = self._watchdog.overdue(seen, time.monotonic())
        if overdue is not None:
            name, text = suspect(overdue, seen, {name: process.state for name, process in alive.items()})
            if not alive[name].plan.serves and alive[name].plan.is_replaceable:
                self._terminal.message(f"{name} hangs: killed")
                self._hung.add(alive[name])
                alive[name].kill()
            else:
                self._note_failure(self._group.failure(alive[name], HUNG, text))
        elif not self._grows_to and (workers := self._run.more_workers(self._group.workers, seen)):
            self._grows_to = workers
            now = counted(self._group.workers, "worker")
            self._terminal.message(f"there is room for {counted(workers, 'worker')}; saving with {now} to start again")
            self._group.signal(signal.SIGTERM)

    def _go_on(self) -> None:
        self._note_progress()
        if not (self._stopping or self._preempted or self._failures):
            self._watch()
        if self._failures and not self._stopping:
            culprit = choose(self._failures)
            if not culprit.is_consequence or time.monotonic() - self._first_failure_at > _MOMENT:
                self._end_after(culprit)
        if not (self._failures or self._released) and self._training_has_ended():
            self._released = True  # servers may serve for ever
            self._stop(signal.SIGTERM, min(self._grace, FAILURE_GRACE))

    def _training_has_ended(self) -> bool:
        is_over = self._group.processes[0].status == 0  # workers that come and go end with it
        return all(
            process.status is not None or process.plan.serves or (is_over and process.plan.is_replaceable)
            for process in self._group.processes
        )

    def _end_after(self, failure: Failure) -> None:
        """Asks what to do about a failure, and ends the other processes."""
        self._incident = self._incident_of(failure)
        self._decision = self._run.decide(self._incident)
        if isinstance(self._decision, Restart):
            self._stopping = True
            self._group.kill()
        else:
            self._stop(signal.SIGTERM, min(self._grace, FAILURE_GRACE))

    def _incident_of(self, failure: Failure | None) -> Incident:
        return Incident(
            failure,
            progress=self._group.progress(),
            progressed=self._progressed,
            workers=self._group.workers,
            at=self._first_failure_at if failure else time.monotonic(),
            asked=self._grows_to > 0 and failure is not None and failure.exit_code in _UNSAVED_ENDS,
        )

    def _ending(self) -> Ending:
        if self._failures and not self._stopping:
            self._end_after(choose(self._failures))  # all ended within a moment
        failure = choose(self._failures) if self._failures else None
        if self._preempted and self._grows_to and self._interrupt is None:
            self._incident = self._incident_of(None)
            self._decision = self._run._policy.grow(self._grows_to, self._incident.at)
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


def _kind(failure: Failure) -> str:
    if failure.hang or failure.lost:
        return "hang" if failure.hang else "host"
    return "signal" if failure.status < 0 else "exit"
