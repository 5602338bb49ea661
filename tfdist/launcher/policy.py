"""Which one of several processes is to blame for a failure or a hang, and whether the run is started again.

No clocks and no files are read here: what is decided follows from what is passed in.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from tfdist.cluster.foreign_text import listed
from tfdist.supervision.exit_codes import REFUSED, UNSAVED
from tfdist.supervision.progress import FAILED, STARTING, Progress

# What TensorFlow raises in the healthy processes once a peer is gone.
_CONSEQUENCES = ("UnavailableError", "AbortedError", "CancelledError")
# The line that ends a Python traceback: "package.module.SomeError: text".
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*([A-Z]\w*(?:Error|Exception|Interrupt|Exit|Timeout))(?::|$)")

_LINES_SHOWN = 20
_EXCEPTION_WIDTH = 160
_FLOOR = 30.0
# A step may be compiled again, a file system may be slow for once: a hang is far beyond what has been seen.
_OWN_PHASE_FACTOR = 10.0
_ANY_PHASE_FACTOR = 2.0
# The launcher looks many times a second; after a longer pause it was stopped itself, perhaps the processes with it.
_OWN_PAUSE = 5.0
# What a program does between its fits may take as long as what it does before the first step of one.
_AS_AT_THE_START = (STARTING, FAILED)
# Processes that work in step report nearly at the same moment.
_TELLING_DIFFERENCE = 1.0


@dataclass(frozen=True)
class Failure:
    """A process that ended with something else than 0, or that stood still.

    Attributes:
        name: for people, such as "worker 1".
        status: what `subprocess` calls returncode: the exit code, or minus the number of the signal.
        tail: the last lines that it printed, more than are shown: TensorFlow writes long texts behind the name of an
            exception.
        log_path: where all of them are.
        hang: for a process that did not end but stood still, what was observed, such as "stands still at step 3".
        lost: for a process whose host is lost, what became of the host, such as "host b does not answer any more".
        host: where it ran, if not on this machine.
        was_shown: whether its output went to the terminal while it ran.
    """

    name: str
    status: int
    tail: tuple[str, ...] = ()
    log_path: str = ""
    hang: str = ""
    lost: str = ""
    host: str = ""
    was_shown: bool = False

    @property
    def who(self) -> str:
        """The process and its host."""
        return f"{self.name} on {self.host}" if self.host else self.name

    @property
    def exit_code(self) -> int:
        """As a shell reports it: 128 + signal for a killed process."""
        return exit_code(self.status)

    @property
    def is_consequence(self) -> bool:
        """Whether its last exception is one that TensorFlow raises because another process went away."""
        match = _EXCEPTION.match(self.exception)
        return match is not None and match.group(1) in _CONSEQUENCES

    @property
    def exception(self) -> str:
        """The last line that looks like the end of a traceback; empty if there is none."""
        return next((line for line in reversed(self.tail) if _EXCEPTION.match(line)), "")

    @property
    def cause(self) -> str:
        """What happened, in few words.

        Example:
            >>> Failure("worker 1", 1, ("ValueError: no such column",)).cause
            'worker 1 failed with exit code 1 (ValueError: no such column)'
        """
        if not self.exception or self.hang or self.lost or self.status < 0 or self.status == UNSAVED:
            return self._what
        is_long = len(self.exception) > _EXCEPTION_WIDTH
        return f"{self._what} ({self.exception[:_EXCEPTION_WIDTH]}{'…' if is_long else ''})"

    def report(self) -> str:
        """What the launcher says at the end of the run."""
        if self.was_shown and self.tail:
            last = " are above"
        else:
            last = ":" + ("".join(f"\n  {line}" for line in self.tail[-_LINES_SHOWN:]) or "\n  (it printed nothing)")
        return f"{self}; its last lines{last}\ntfdist: its complete log: {self.log_path}"

    def __str__(self) -> str:
        if self.status >= 0:
            return self._what
        hint = "; the kernel does that when memory runs out" if self.status == -signal.SIGKILL else ""
        return f"{self._what} (exit code {self.exit_code}{hint})"

    @property
    def _what(self) -> str:
        """What happened to whom."""
        if self.hang:
            return f"{self.who} {self.hang}"
        if self.lost:
            return f"{self.lost}; it ran {self.name}"
        if self.status < 0:
            return f"{self.who} was killed by {signal_name(-self.status)}"
        if self.status == UNSAVED:
            return f"{self.who} was asked to stop, and could not save (exit code {UNSAVED})"
        return f"{self.who} failed with exit code {self.status}"


def choose(failures: Sequence[Failure]) -> Failure:
    """The failure to name: that of a lost host, or else the first that is not the mere consequence of another.

    Args:
        failures: at least one, in the order in which the processes ended, all within the same moment. If all are
            consequences, the first is named.

    Example:
        >>> str(choose([Failure("worker 0", 1, ("UnavailableError: peer gone",)), Failure("worker 1", 3)]))
        'worker 1 failed with exit code 3'
    """
    lost = (failure for failure in failures if failure.lost)
    return next(lost, next((failure for failure in failures if not failure.is_consequence), failures[0]))


def counted(count: int, what: str, ending: str = "s") -> str:
    """A number of things.

    Example:
        >>> counted(1, "worker"), counted(2, "process", "es")
        ('1 worker', '2 processes')
    """
    return f"{count} {what}{'' if count == 1 else ending}"


def exit_code(status: int) -> int:
    """A `subprocess` returncode as a shell's exit code."""
    return status if status >= 0 else 128 - status


def signal_name(number: int) -> str:
    """ "SIGTERM" for 15; "signal 63" where there is no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True)
class Overdue:
    """A process has not reported for too long.

    Attributes:
        name: the process.
        waited: seconds without a report.
        starting: whether the limit is that of a start.
    """

    name: str
    waited: float
    starting: bool


class Watchdog:
    """Watches the processes of one attempt.

    Args:
        hang_timeout: seconds without a report that count as a hang. None: what is unusual for the phase, at least 30
            seconds and far longer than the longest pause that was seen.
        start_timeout: seconds until the first step of a fit is done; also the limit of a phase that is new, and after
            an exception.
        due: when the first report is expected, if it is known that the program trains; one that may not train at all
            (None) is not watched before its first report.

    Example:
        >>> watchdog = Watchdog(None, 600)
        >>> seen = {"worker 0": Progress(10.0, 1, "starting", 0)}
        >>> watchdog.overdue(seen, 609.0), watchdog.overdue(seen, 611.0).name
        (None, 'worker 0')
    """

    def __init__(self, hang_timeout: float | None, start_timeout: float, due: float | None = None) -> None:
        self._hang_timeout = hang_timeout
        self._start_timeout = start_timeout
        self._due = due
        self._last: dict[str, Progress] = {}
        self._longest: dict[str, float] = {}
        self._looked_at: float | None = None
        self._awake_since = 0.0

    def overdue(self, seen: Mapping[str, Progress | None], now: float) -> Overdue | None:
        """The first process whose time is up, or None.

        Args:
            seen: the last report of every training process that exists, by name.
            now: the time, on the clock of the reports.
        """
        if self._looked_at is not None and now - self._looked_at > _OWN_PAUSE:
            self._awake_since = now
        self._looked_at = now
        self._learn({name: progress for name, progress in seen.items() if progress is not None})
        if self._due is not None and not any(seen.values()):
            waited = now - max(self._due, self._awake_since)
            return Overdue(next(iter(seen)), waited, True) if seen and waited > self._start_timeout else None
        for name, progress in seen.items():
            if progress is not None and not progress.has_ended:
                waited = now - max(progress.time, self._awake_since)
                if waited > self.limit(progress.phase):
                    return Overdue(name, waited, progress.phase in _AS_AT_THE_START)
        return None

    def excuse(self, now: float) -> None:
        """Does not count silence until now: there was a reason for it.

        Args:
            now: the time, on the clock of the reports.
        """
        self._awake_since = now

    def limit(self, phase: str) -> float:
        """How long a process may be silent in a phase."""
        if phase in _AS_AT_THE_START:
            return self._start_timeout
        if self._hang_timeout is not None:
            return self._hang_timeout
        if phase not in self._longest:
            return self._start_timeout
        usual = _OWN_PHASE_FACTOR * self._longest[phase]
        return max(_FLOOR, usual, _ANY_PHASE_FACTOR * max(self._longest.values()))

    def _learn(self, reports: dict[str, Progress]) -> None:
        for name, progress in reports.items():
            before = self._last.get(name)
            # A silence for which there was a reason says nothing about the phase.
            if before is not None and before.reports != progress.reports and before.time >= self._awake_since:
                gap = progress.time - before.time
                self._longest[before.phase] = max(gap, self._longest.get(before.phase, 0.0))
        # Who is replaced begins anew: until the new process has reported, it is not among them.
        self._last = reports


def suspect(overdue: Overdue, seen: Mapping[str, Progress | None], states: Mapping[str, str]) -> tuple[str, str]:
    """Which process to blame for a hang, and in what words: those that train in step all stand still once one does.

    Args:
        overdue: the process whose time was up first, one of those seen.
        seen: the last report of every training process that exists.
        states: states, as psutil calls them, of these and of processes that report nothing.

    Example:
        >>> seen = {"worker 0": Progress(5.0, 9, "training", 8), "worker 1": Progress(5.0, 8, "training", 7)}
        >>> suspect(Overdue("worker 0", 30.0, False), seen, {})[1]
        'stands still at step 7 while others have reached step 8: no progress for 30 s (--hang-timeout)'
    """
    option = "--start-timeout" if overdue.starting else "--hang-timeout"
    silence = f"no progress for {overdue.waited:.3g} s ({option})"
    for name, state in states.items():
        if state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            return name, f"is stopped (process state T): {silence}"
    for name, progress in seen.items():
        if progress is None and overdue.starting:
            return name, f"has not begun to train: {silence}"
    reports = {name: progress for name, progress in seen.items() if progress is not None and not progress.has_ended}
    last = min(reports, key=lambda name: (reports[name].step, reports[name].time))
    own, others = reports[last], [progress for name, progress in reports.items() if name != last]
    if others and own.step < min(progress.step for progress in others):
        most = max(progress.step for progress in others)
        return last, f"stands still at step {own.step} while others have reached step {most}: {silence}"
    if others and own.time + _TELLING_DIFFERENCE < min(progress.time for progress in others):
        first = f"stands still at step {own.step} and was the first to fall silent"
        return last, f"{first}{_parted(reports)}: {silence}"
    if not others:
        done = [f"{name} has ended its fit at step {p.step}" for name, p in seen.items() if p and p.has_ended]
        ended = f", while {' and '.join(done)}" if done else ""
        return last, f"stands still at step {own.step}{ended}: {silence}"
    why = _parted(reports) or ", so that the cause may be any of them"
    return overdue.name, f"stands still at step {reports[overdue.name].step}, as do all others{why}: {silence}"


def _parted(reports: Mapping[str, Progress]) -> str:
    """Which processes wait for all others in a call that these have not come to; empty if that is not known."""
    places: dict[str, list[str]] = {}
    for name, progress in reports.items():
        places.setdefault(progress.waits_to, []).append(name)
    if len(places) < 2:
        return ""
    absent = places.pop("", [])
    waits = [
        f"{listed(names)} wait{'s' if len(names) == 1 else ''} for the others to {what}"
        for what, names in places.items()
    ]
    rest = f", and {listed(absent)} do{'es' if len(absent) == 1 else ''} not come to that" if absent else ""
    return f": {' and '.join(waits)}{rest}. Look for a call that only some processes make, in a callback, say"


_FIRST_DELAY = 1.0
_LONGEST_DELAY = 30.0
# A worker that ends sooner than this, in the place of another one, was started in vain.
_SHORT_LIFE = 30.0
# What grows, and loses the new worker soon, grows later the next time, but not later than this.
_LONGEST_WAIT_TO_GROW = 3600.0


@dataclass(frozen=True)
class Incident:
    """Why the processes have ended, and how far the run had got.

    Attributes:
        failure: the process that is to blame; None: they have saved, so that more workers can start.
        progress: last report of every training process, by name.
        progressed: whether a training step was done since the processes were started.
        workers: how many training processes there were.
        at: when it happened, on the clock of `time.monotonic`.
        asked: whether the process ended as it was asked to save, so that more workers can start, and did not.
    """

    failure: Failure | None
    progress: Mapping[str, Progress | None]
    progressed: bool
    workers: int
    at: float
    asked: bool = False

    @property
    def step(self) -> int:
        """The last step of the failed process, or of the run if the process takes no steps of its own."""
        progress = self.progress.get(self.failure.name) if self.failure else None
        return progress.step if progress else self.furthest_step

    @property
    def furthest_step(self) -> int:
        """The last step that any process had done."""
        return max((progress.step for progress in self.progress.values() if progress), default=0)

    @property
    def cause(self) -> str:
        """What happened, in a line."""
        if self.failure is None:
            return f"saved at step {self.step}"
        return self.failure.cause + (f" at step {self.step}" if self.step and not self.failure.hang else "")


@dataclass(frozen=True)
class Restart:
    """The run goes on.

    Attributes:
        number: of the start, from 1 for the second one.
        workers: number of training processes from now on.
        delay: seconds to wait before.
    """

    number: int
    workers: int
    delay: float


@dataclass(frozen=True)
class GiveUp:
    """The run ends; the reason is empty where there is nothing to say about restarts."""

    reason: str


class RestartPolicy:
    """Decides about one failure after another.

    Args:
        limit: how many restarts there may be, those of single workers included.
        min_workers: with how few workers to go on when one was killed or hung; None: always with the same number.
        regrow_after: seconds until a run that lacks workers is to grow again.

    Attributes:
        limit: how many restarts there may be, those of single workers included.
        used: how many there have been; to grow is none.

    Example:
        >>> incident = Incident(Failure("worker 1", -9), {"worker 1": None}, False, 2, 0.0)
        >>> RestartPolicy(3).decide(incident)
        GiveUp(reason='')
    """

    def __init__(self, limit: int, min_workers: int | None = None, regrow_after: float = math.inf) -> None:
        self.limit = limit
        self._min_workers = min_workers
        self._regrow_after = regrow_after
        self.used = 0
        self._grown = 0
        self._grew_at: float | None = None
        self._grew_in_vain = 0
        self._in_vain = 0
        self._workers_in_vain: dict[str, int] = {}
        self._trains = False
        self._previous: Incident | None = None

    def decide(self, incident: Incident) -> Restart | GiveUp:
        """What to do about a failure."""
        previous, self._previous = self._previous, incident
        self._trains = self._trains or any(incident.progress.values())
        if (reason := self._against(incident, previous)) is not None:
            return GiveUp(reason)
        if incident.asked:  # it does not save when it is asked to, so that it cannot grow
            self._regrow_after = math.inf
            self._grown += 1
            return Restart(self.used + self._grown, incident.workers, 0.0)
        self.used += 1
        self._in_vain = 0 if incident.progressed else self._in_vain + 1
        if self._grew_at is not None:
            self._grew_in_vain = self._grew_in_vain + 1 if incident.at - self._grew_at < self._regrow_after else 0
            self._grew_at = None
        return Restart(self.used + self._grown, self._next_workers(incident), _delay(self._in_vain))

    def may_grow(self, progress: Mapping[str, Progress | None], seconds: float) -> bool:
        """Whether a run that lacks workers is to save, and to start again with more.

        It has to have resumed from a backup before: what saves nothing would begin its training again.

        Args:
            progress: the last report of every training process, by name.
            seconds: since they were started, or since there was last found to be no room for more.

        Example:
            >>> resumed = {"worker 0": Progress(9.0, 3, "training", 120, 117)}
            >>> policy = RestartPolicy(3, min_workers=1, regrow_after=300.0)
            >>> policy.may_grow(resumed, 299.0), policy.may_grow(resumed, 300.0)
            (False, True)
        """
        reports = [report for report in progress.values() if report]
        wait = max(self._regrow_after, min(self._regrow_after * 2**self._grew_in_vain, _LONGEST_WAIT_TO_GROW))
        return seconds >= wait and any(one.resumed_step and one.has_trained and not one.has_ended for one in reports)

    def grow(self, workers: int, now: float) -> Restart:
        """Goes on with so many workers.

        Args:
            workers: how many there are from now on.
            now: the time, on the clock of `time.monotonic`.
        """
        self._grew_at, self._previous = now, None
        self._grown += 1
        return Restart(self.used + self._grown, workers, 0.0)

    def replace(self, name: str, lived: float) -> tuple[int, float] | None:
        """What to do about a worker that can be replaced while the others go on.

        Args:
            name: the worker.
            lived: for how many seconds it had existed.

        Returns:
            The number of the replacement, among all restarts and replacements, and after how many seconds to make it;
            None if the limit is reached.

        Example:
            >>> policy = RestartPolicy(1)
            >>> policy.replace("worker 1", 60.0), policy.replace("worker 1", 60.0)
            ((1, 0.0), None)
        """
        if self.used >= self.limit:
            return None
        self.used += 1
        before = self._workers_in_vain.get(name)
        in_vain = 0 if before is None or lived >= _SHORT_LIFE else before + 1
        self._workers_in_vain[name] = in_vain
        return self.used, _delay(in_vain)

    def _against(self, incident: Incident, previous: Incident | None) -> str | None:
        if not self._trains or self.limit == 0:
            return ""  # perhaps not a program that trains with Keras at all, and a typo fails again at once
        if incident.failure.status == REFUSED:
            return f"not restarted: exit code {REFUSED} says that it would fail again"
        own = incident.progress.get(incident.failure.name)
        # Who was asked to stop has ended its training as well: where it could not save, it is to be done again.
        has_ended = own is not None and own.has_ended and incident.failure.status != UNSAVED
        if has_ended and incident.failure.status > 0 and not incident.failure.lost:
            return "not restarted: its last fit had ended, what failed came after that"
        # That a host is lost again says nothing about the program.
        is_again = previous is not None and not (previous.failure.lost or incident.failure.lost)
        if previous is not None and is_again and previous.workers == incident.workers:
            if incident.step == previous.step:
                where = f"at step {incident.step}" if incident.step else "before its first step"
                return f"not restarted: it failed {where} for the second time in a row"
            exception = incident.failure.exception
            if exception and exception == previous.failure.exception and not incident.progressed:
                return "not restarted: it failed with the same exception again, before a single step was done"
        if self.used >= self.limit and not incident.asked:
            return f"not restarted: {used_up(self.used)}"
        return None

    def _next_workers(self, incident: Incident) -> int:
        gone = incident.failure.status < 0 or incident.failure.hang or incident.failure.lost
        if self._min_workers is None or not gone:
            return incident.workers
        return max(incident.workers - 1, self._min_workers)


def used_up(count: int) -> str:
    """Why nothing is started again any more.

    Example:
        >>> used_up(1), used_up(0)
        ('1 restart used up (--max-restarts)', '--max-restarts is 0')
    """
    return f"{counted(count, 'restart')} used up (--max-restarts)" if count else "--max-restarts is 0"


def _delay(in_vain: int) -> float:
    """How long to wait after so many starts in a row that led to nothing."""
    return min(_FIRST_DELAY * 2 ** (in_vain - 1), _LONGEST_DELAY) if in_vain else 0.0


@dataclass(frozen=True)
class Recovery:
    """A restart that was made and has not yet led to training.

    Attributes:
        incident: why it was made.
        restart: what was decided.
        count: which of the restarts that are counted it is, for people.

    Example:
        >>> incident = Incident(Failure("worker 1", -9), {}, True, 2, 0.0)
        >>> Recovery(incident, Restart(1, 2, 0.0), "1 of 3").name, Recovery(incident, Restart(1, 1, 0.0), "1 of 3").name
        ('restart 1 of 3', 'restart 1 of 3 with 1 worker')
    """

    incident: Incident
    restart: Restart
    count: str

    @property
    def name(self) -> str:
        """What is done, for people."""
        workers = counted(self.restart.workers, "worker")
        if self.incident.failure is None:
            return f"start with {workers}"
        text = f"restart {self.count}"
        return text if self.restart.workers == self.incident.workers else f"{text} with {workers}"

    def is_complete(self, progress: Mapping[str, Progress | None]) -> bool:
        """Whether each process that reports, or had reported before, has now done a step of its own."""
        expected = [report for name, report in progress.items() if report or self.incident.progress.get(name)]
        return bool(expected) and all(report is not None and report.has_trained for report in expected)

    def outcome(self, progress: Mapping[str, Progress | None], now: float) -> Outcome:
        """What it took, once it is complete.

        Args:
            progress: the last report of every training process, by name.
            now: the time on the clock of `time.monotonic`.
        """
        resumed = max((report.resumed_step or 0 for report in progress.values() if report), default=0)
        redone = max(self.incident.furthest_step - resumed, 0)
        return Outcome(self.restart.number, round(now - self.incident.at, 3), resumed, redone)


@dataclass(frozen=True)
class Outcome:
    """What a restart took.

    Attributes:
        restart: its number.
        seconds: from the failure until all processes had done a step.
        resumed_step: where the training was taken up again; 0: at its very beginning.
        steps_redone: how many steps had been done before and were lost.

    Example:
        >>> str(Outcome(1, 3.42, 116, 7))
        'training again after 3.4 s, 7 steps redone'
    """

    restart: int
    seconds: float
    resumed_step: int
    steps_redone: int

    def __str__(self) -> str:
        why = "" if self.resumed_step else ": from the beginning, since no backup was resumed"
        return f"training again after {self.seconds:.1f} s, {counted(self.steps_redone, 'step')} redone{why}"
