"""A search on this machine: its tuners are started, watched, and started again, until the script has ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tfdist.launcher.attempt import FAILURE_GRACE, Attempt, Ending, Surroundings
from tfdist.launcher.failure import Failure, choose, exit_code
from tfdist.launcher.group import ProcessGroup
from tfdist.launcher.guardian import Guardian
from tfdist.launcher.operating_system import SignalInbox
from tfdist.launcher.process import Process
from tfdist.launcher.restarts import GiveUp, Restart, RestartPolicy, used_up
from tfdist.launcher.run_plan import ProcessPlan
from tfdist.launcher.supervisor import Supervisor
from tfdist.launcher.terminal import Terminal
from tfdist.launcher.warm.zygote import WarmStarts
from tfdist.supervision.events import EventStream
from tfdist.supervision.exit_codes import PREEMPTED, REFUSED, UNSAVED
from tfdist.tuning.member import START_AGAIN, Meeting, name_of

# These end a tuner, but not the search: it was asked to stop, or has lost one of its processes.
_GOES_ON = (PREEMPTED, UNSAVED, START_AGAIN)
# After a failure that looks like the consequence of another: how long the culprit may take to end as well.
_MOMENT = 2.0
_FIRST_DELAY, _LONGEST_DELAY = 1.0, 30.0
_LOOK_EVERY = 0.25
# On a cluster: how long the machine of tuner 0 may take to begin the search.
_LATEST = 3600.0
NO_SEARCH = (
    "Received: a script that has ended without a call of tuner.search(). Expected: a KerasTuner script, which makes a "
    "tuner, such as keras_tuner.RandomSearch(...), and calls its search(); use `tfdist run` for other scripts"
)

Plans = Mapping[int, Sequence[ProcessPlan]]


class TuneRun(Supervisor):
    """Runs the tuners of a search on this machine.

    Args:
        plans: the processes of each tuner here.
        search_id: names the whole search.
        max_restarts: how often a tuner is started again that has not begun a trial.
        log_dir: folder of the logs; it exists.
        terminal: where output and messages go.
        grace: seconds between a signal that is passed on and SIGKILL.

    Example:
        >>> TuneRun(plans, "20261126-1", 3, Path("logs"), terminal, 10.0).run()  # doctest: +SKIP
        0
    """

    def __init__(
        self, plans: Plans, search_id: str, max_restarts: int, log_dir: Path, terminal: Terminal, grace: float
    ) -> None:
        super().__init__(sum(map(len, plans.values())), RestartPolicy(max_restarts), log_dir, terminal)
        self._plans = plans
        self._search_id = search_id
        self._grace = grace

    def _attempt(self, restart: Restart, inbox: SignalInbox, guardian: Guardian, starts: WarmStarts) -> Ending:
        with ProcessGroup([], self._log_dir, self._terminal, guardian) as group:
            return _TuneAttempt(group, inbox, self).run()

    def _conclude(self, ending: Ending) -> int:
        code = super()._conclude(ending)
        # Who was interrupted may be started again, by Slurm say, and the others wait for that.
        if 0 in self._plans and ending.interrupt is None:
            Meeting(self._search_id, ended=code).write(self._log_dir)
        return code


@dataclass
class _Tuner:
    """A tuner and its processes.

    Attributes:
        plans: of its processes.
        processes: those that were started last.
        failures: of these.
        failed_at: when the first of them failed.
        begins_trials: whether it has begun a trial since it was started.
        in_vain: how often in a row it was started and has not begun a trial.
        due: when it is to be started again; None if it is not.
    """

    plans: Sequence[ProcessPlan]
    processes: list[Process] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    failed_at: float = 0.0
    begins_trials: bool = False
    in_vain: int = 0
    due: float | None = None

    @property
    def has_ended(self) -> bool:
        """Whether all of its processes have ended well, and it is not started again."""
        return self.due is None and bool(self.processes) and all(process.status == 0 for process in self.processes)


class _TuneAttempt(Attempt):
    """Sees the tuners through to the end of the script in tuner 0.

    The others are started once that has begun its search: what the script does before, it does in one process, and a
    script that does not search is run only once.

    Args:
        group: without processes yet.
        inbox: the signals to the launcher.
        run: what is run.
    """

    def __init__(self, group: ProcessGroup, inbox: SignalInbox, run: TuneRun) -> None:
        super().__init__(Surroundings(group, inbox, run._terminal, run._grace, run._decide, run._on_progress))
        self._run = run
        self._tuners = {tuner: _Tuner(plans) for tuner, plans in run._plans.items()}
        self._events = EventStream(run._log_dir, keep=False)
        self._events.read()  # what an earlier run has left in the folder
        self._begun_at = time.monotonic()
        self._look_at = 0.0
        self._search_is_over = False
        self._before = self._meeting()
        self._failure: Failure | None = None
        self._give_up: GiveUp | None = None
        self._error, self._code = "", 0
        if 0 in self._tuners:
            self._start([0])

    def _is_over(self) -> bool:
        return self._stopping and self._group.is_over

    def _note_end(self, process: Process) -> None:
        number, tuner = next((number, one) for number, one in self._tuners.items() if process in one.processes)
        status = self._group.status(process)
        if self._stopping:
            return
        if not status and number:
            self._read_events()
        # Only tuner 0 ends by itself. Another one that does so in the search, by sys.exit() say, leaves its trial.
        if status or (number and not self._search_is_over):
            if not tuner.failures:
                tuner.failed_at = time.monotonic()
            left = "" if status else "has ended in the middle of the search with exit code 0"
            tuner.failures.append(self._group.failure(process, status, left))

    def _go_on(self) -> None:
        if self._stopping:
            return
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _LOOK_EVERY
            self._look()
        for number, tuner in self._tuners.items():
            if tuner.failures:
                self._end_tuner(number, tuner, now)
            elif tuner.due is not None and now >= tuner.due:
                self._start_again(tuner)
        if not self._stopping and any(one.has_ended for number, one in self._tuners.items() if self._ends_with(number)):
            meeting = self._meeting()
            self._error = NO_SEARCH if 0 in self._tuners and (meeting is None or not meeting.port) else ""
            self._code = 1 if self._error else 0
            self._stop(signal.SIGTERM, min(self._grace, FAILURE_GRACE))

    def _ends_with(self, number: int) -> bool:
        return number == 0 or 0 not in self._tuners

    def _look(self) -> None:
        """Reads what the tuners have written, and starts those that are to come."""
        self._read_events()
        waiting = [number for number, tuner in self._tuners.items() if not tuner.processes]
        meeting = self._meeting()
        if meeting is not None and meeting.port:
            if waiting:
                self._start(waiting)
        elif meeting is not None and meeting.ended is not None and 0 not in self._tuners:
            if meeting != self._before or meeting.ended == 0:
                self._code = meeting.ended
                self._stop(signal.SIGTERM, min(self._grace, FAILURE_GRACE))
        elif waiting and time.monotonic() - self._begun_at > _LATEST:
            self._error = f"tuner 0 has not begun its search within {_LATEST / 60:.0f} minutes; nothing to do here"
            self._code = 1
            self._stop(signal.SIGTERM, 0.0)

    def _read_events(self) -> None:
        for event in self._events.read():
            kind = event["event"]
            if kind in ("trial", "trial-again"):
                for number, tuner in self._tuners.items():
                    tuner.begins_trials = tuner.begins_trials or event["name"] == name_of(number)
            elif kind in ("search", "searched"):
                self._search_is_over = kind == "searched"

    def _meeting(self) -> Meeting | None:
        return Meeting.read(self._run._log_dir, self._run._search_id)

    def _start(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            tuner = self._tuners[number]
            tuner.processes = [self._group.add(plan) for plan in tuner.plans]
        self._run._note_start(self._run._policy.used, len(self._group.processes), self._pids())

    def _pids(self) -> dict[str, int]:
        return {process.plan.name: process.group for process in self._group.processes}

    def _end_tuner(self, number: int, tuner: _Tuner, now: float) -> None:
        """Ends all processes of a tuner of which one has failed, and decides about it once they are gone."""
        culprit = choose(tuner.failures)
        alive = [process for process in tuner.processes if not process.is_over]
        if alive and culprit.is_consequence and now - tuner.failed_at < _MOMENT:
            return
        for process in alive:
            process.kill()
        if not alive:
            tuner.failures = []
            self._read_events()
            reason = self._against(number, tuner, culprit)
            if reason is None:
                self._replace(tuner, culprit, now)
            else:
                self._failure, self._give_up = culprit, GiveUp(reason)
                self._stop(signal.SIGTERM, self._grace)

    def _against(self, number: int, tuner: _Tuner, failure: Failure) -> str | None:
        """Why a tuner is not started again; None if it is."""
        limit = self._run._policy.limit
        tuner.in_vain = 0 if tuner.begins_trials else tuner.in_vain + 1
        if failure.status == REFUSED:
            return f"not restarted: exit code {REFUSED} says that it would fail again"
        if failure.status > 0 and failure.status not in _GOES_ON and not failure.is_consequence:
            # What is wrong with a trial only, KerasTuner catches.
            return "not restarted: the search was over, what failed came after it" if self._search_is_over else ""
        if limit == 0:
            return f"not restarted: {used_up(0)}"
        if tuner.in_vain > limit:
            return f"not restarted: {name_of(number)} has failed {tuner.in_vain} times in a row before it began a trial"
        return None

    def _replace(self, tuner: _Tuner, failure: Failure, now: float) -> None:
        policy = self._run._policy
        policy.used += 1
        delay = min(_FIRST_DELAY * 2 ** (tuner.in_vain - 1), _LONGEST_DELAY) if tuner.in_vain else 0.0
        tuner.due = now + delay
        lost = {"task": failure.name, "kind": "signal" if failure.status < 0 else "exit", "cause": failure.cause}
        code = {"exit_code": failure.exit_code, "log": failure.log_path}
        self._run._events.write("replacement", **lost, **code, number=policy.used, delay=delay)
        when = f" in {delay:g} s" if delay else ""
        self._terminal.message(f"{failure.cause} ({failure.log_path}); started again{when}")

    def _start_again(self, tuner: _Tuner) -> None:
        tuner.due, tuner.begins_trials = None, False
        used = self._run._policy.used
        tuner.processes = [self._group.replace(process, used) for process in tuner.processes]

    def _ending(self) -> Ending:
        if self._interrupt is not None:
            # Who waits for a trial has nothing to save, and just ends by the signal.
            codes = {process.status for process in self._interrupted}
            if PREEMPTED in codes:
                codes.discard(-self._interrupt)
            agreed = codes.pop() if len(codes) == 1 else None
            code = agreed if agreed is not None and agreed > 0 else exit_code(-self._interrupt)
            return Ending(code, interrupt=self._interrupt)
        if self._failure is not None:
            return Ending(self._failure.exit_code or 1, self._failure, decision=self._give_up)
        return Ending(self._code, error=self._error)
