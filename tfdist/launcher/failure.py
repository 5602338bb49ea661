"""Failures and hangs of processes, and which one of several processes is to blame.

No clocks and no files are read here.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from tfdist.supervision.exit_codes import UNSAVED
from tfdist.supervision.progress import STARTING, Progress

# What TensorFlow raises in the healthy processes once a peer is gone.
_CONSEQUENCES = ("UnavailableError", "AbortedError", "CancelledError")
# The line that ends a Python traceback: "package.module.SomeError: text".
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*([A-Z]\w*(?:Error|Exception|Interrupt|Exit|Timeout))(?::|$)")

_LINES_SHOWN = 20
_EXCEPTION_WIDTH = 160
_FLOOR = 30.0
# A step may be compiled anew, a file system may be slow for once: a hang is far beyond what has been seen.
_OWN_PHASE_FACTOR = 10.0
_ANY_PHASE_FACTOR = 2.0
# The launcher looks many times a second; after a longer pause it was stopped itself, perhaps the processes with it.
_OWN_PAUSE = 5.0
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
        if self.hang:
            return f"{self.who} {self.hang}"
        if self.lost:
            return f"{self.lost}; it ran {self.name}"
        if self.status < 0:
            return f"{self.who} was killed by {signal_name(-self.status)}"
        if self.status == UNSAVED:
            return str(self)
        exception = self.exception
        if len(exception) > _EXCEPTION_WIDTH:
            exception = exception[:_EXCEPTION_WIDTH] + "…"
        return f"{self.who} failed with exit code {self.status}" + (f" ({exception})" if exception else "")

    def report(self) -> str:
        """What the launcher says at the end of the run."""
        if self.was_shown and self.tail:
            last = " are above"
        else:
            last = ":" + ("".join(f"\n  {line}" for line in self.tail[-_LINES_SHOWN:]) or "\n  (it printed nothing)")
        return f"{self}; its last lines{last}\ntfdist: its complete log: {self.log_path}"

    def __str__(self) -> str:
        if self.hang or self.lost:
            return self.cause
        if self.status == UNSAVED:
            return f"{self.who} was asked to stop, and could not save (exit code {UNSAVED})"
        if self.status >= 0:
            return f"{self.who} failed with exit code {self.status}"
        hint = "; the kernel does that when memory runs out" if self.status == -signal.SIGKILL else ""
        return f"{self.who} was killed by {signal_name(-self.status)} (exit code {self.exit_code}{hint})"


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
        starting: whether its first step is what is waited for.
    """

    name: str
    waited: float
    starting: bool


@dataclass(frozen=True)
class Suspect:
    """Which process a hang is put down to, and in what words, such as "stands still at step 3"."""

    name: str
    text: str


class Watchdog:
    """Watches the processes of one attempt.

    Args:
        hang_timeout: seconds without a report that count as a hang. None: what is unusual for the phase, at least 30
            seconds and far longer than the longest pause that was seen.
        start_timeout: seconds until the first step of a fit is done; also the limit of a phase that is new.
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
        for name, progress in seen.items():
            if progress is not None:
                self._learn(name, progress)
        if self._due is not None and not any(seen.values()):
            waited = now - max(self._due, self._awake_since)
            return Overdue(next(iter(seen)), waited, True) if seen and waited > self._start_timeout else None
        for name, progress in seen.items():
            if progress is not None and not progress.has_ended:
                waited = now - max(progress.time, self._awake_since)
                if waited > self.limit(progress.phase):
                    return Overdue(name, waited, progress.phase == STARTING)
        return None

    def excuse(self, now: float) -> None:
        """Does not count silence until now: there was a reason for it.

        Args:
            now: the time, on the clock of the reports.
        """
        self._awake_since = now

    def limit(self, phase: str) -> float:
        """How long a process may be silent in a phase."""
        if phase == STARTING:
            return self._start_timeout
        if self._hang_timeout is not None:
            return self._hang_timeout
        if phase not in self._longest:
            return self._start_timeout
        usual = _OWN_PHASE_FACTOR * self._longest[phase]
        return max(_FLOOR, usual, _ANY_PHASE_FACTOR * max(self._longest.values()))

    def _learn(self, name: str, progress: Progress) -> None:
        before = self._last.get(name)
        if before is not None and before.reports != progress.reports:
            gap = progress.time - before.time
            self._longest[before.phase] = max(gap, self._longest.get(before.phase, 0.0))
        self._last[name] = progress


def suspect(overdue: Overdue, seen: Mapping[str, Progress | None], states: Mapping[str, str]) -> Suspect:
    """Which process to blame for a hang: those that train in step all stand still as soon as one does.

    Args:
        overdue: the process whose time was up first.
        seen: the last report of every training process that exists.
        states: states, as psutil calls them, of these and of processes that report nothing.

    Example:
        >>> seen = {"worker 0": Progress(5.0, 9, "training", 8), "worker 1": Progress(5.0, 8, "training", 7)}
        >>> suspect(Overdue("worker 0", 30.0, False), seen, {}).text
        'stands still at step 7 while others have reached step 8: no progress for 30 s (--hang-timeout)'
    """
    option = "--start-timeout" if overdue.starting else "--hang-timeout"
    silence = f"no progress for {overdue.waited:.3g} s ({option})"
    for name, state in states.items():
        if state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            return Suspect(name, f"is stopped (process state T): {silence}")
    for name, progress in seen.items():
        if progress is None and overdue.starting:
            return Suspect(name, f"has not begun to train: {silence}")
    reports = {name: progress for name, progress in seen.items() if progress is not None and not progress.has_ended}
    if not reports:
        return Suspect(overdue.name, f"stands still: {silence}")
    last = min(reports, key=lambda name: (reports[name].step, reports[name].time))
    own, others = reports[last], [progress for name, progress in reports.items() if name != last]
    if others and own.step < min(progress.step for progress in others):
        most = max(progress.step for progress in others)
        return Suspect(last, f"stands still at step {own.step} while others have reached step {most}: {silence}")
    if others and own.time + _TELLING_DIFFERENCE < min(progress.time for progress in others):
        return Suspect(last, f"stands still at step {own.step} and was the first to fall silent: {silence}")
    if not others:
        done = [f"{name} has ended its fit at step {p.step}" for name, p in seen.items() if p and p.has_ended]
        ended = f", while {' and '.join(done)}" if done else ""
        return Suspect(last, f"stands still at step {own.step}{ended}: {silence}")
    return Suspect(
        overdue.name,
        f"stands still at step {reports[overdue.name].step if overdue.name in reports else own.step}, as do all "
        f"others, so that the cause may be any of them: {silence}",
    )
