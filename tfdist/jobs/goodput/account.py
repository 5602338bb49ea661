"""Where the wall time of a run went: each second between its first and its last event belongs to one kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfdist.jobs.goodput.kinds import DATA, KINDS, OTHER, REDONE, RESTART, SAVING, START, STOPPED, TRAINING, VALIDATION
from tfdist.jobs.goodput.lines import Line, share_of_waiting
from tfdist.jobs.goodput.times import corrected_times, tells_of_chief
from tfdist.jobs.run_state import end_of
from tfdist.jobs.status import is_number
from tfdist.supervision import time_spent
from tfdist.supervision.events import Event

_LAUNCHER = "launcher"
_VANISHED = "it ended without a word, as when its launcher is killed"
_REGROUPED = "processes have come or gone"
_ANOTHER = "another process goes on"
_LEFT = {"preempted": "preempted", "unsaved": "stopped, and could not save,"}
_COMPLETE = "complete"
# Seconds. Without a launcher, a damaged first line could else say that a fit has begun before there were computers.
_LONGEST_FIT = 366 * 86400.0


@dataclass(frozen=True)
class Segment:
    """A stretch of time, and what it went into.

    Attributes:
        begin: in seconds since 1970.
        end: likewise.
        seconds: of each kind; together as long as the segment.
    """

    begin: float
    end: float
    seconds: Mapping[str, float]


@dataclass
class Interruption:
    """Something that has kept the training from going on, and what that has cost.

    Attributes:
        time: when, in seconds since 1970.
        cause: in words.
        stopped: seconds until the run was started again.
        restart: seconds until the first step after it was done.
        redone: seconds of steps that had been done before.
        steps_redone: how many these were.
    """

    time: float
    cause: str
    stopped: float = 0.0
    restart: float = 0.0
    redone: float = 0.0
    steps_redone: int = 0

    @property
    def lost(self) -> float:
        """Seconds in all."""
        return self.stopped + self.restart + self.redone


@dataclass
class Account:
    """What the time of a run went into.

    Attributes:
        segments: one after the other, without gaps.
        interruptions: in their order.
        has_trained: whether a process has told of training steps.
    """

    segments: list[Segment] = field(default_factory=list)
    interruptions: list[Interruption] = field(default_factory=list)
    has_trained: bool = False

    @property
    def seconds(self) -> dict[str, float]:
        """Of each kind, in the order of `KINDS`."""
        return {kind: sum(segment.seconds.get(kind, 0.0) for segment in self.segments) for kind in KINDS}

    @property
    def total(self) -> float:
        """Seconds from the beginning to the end."""
        return self.segments[-1].end - self.segments[0].begin if self.segments else 0.0


def account_of(events: Sequence[Event], until: float | None = None) -> Account:
    """What the time of a run went into.

    Args:
        events: all of its log, in their order; damaged ones count as far as they can be understood.
        until: the present, in seconds since 1970, for a run that goes on; None: the last event is its end.

    Example:
        >>> start = {"time": 0.0, "name": "launcher", "event": "start"}
        >>> first = {"time": 9.0, "name": "worker 0", "event": "progress", "spent": {"first_step": 2.0}}
        >>> last = {**first, "time": 19.0, "trained": 100, "spent": {"first_step": 2.0, "steps": 9.0}}
        >>> {kind: seconds for kind, seconds in account_of([start, first, last]).seconds.items() if seconds}
        {'training': 9.0, 'start': 9.0, 'other': 1.0}
    """
    book = _Book()
    now = 0.0
    for event, now in zip(events, corrected_times(events), strict=True):
        book.add(event, now)
    if events:
        # The clock may have been set since.
        book.passes(now if until is None else max(until, now))
    return book.account


class _Book:
    """Takes in the events, and books the time between them."""

    def __init__(self) -> None:
        self.account = Account()
        self._now: float | None = None
        # What time goes into of which the chief does not tell: START or RESTART up to the first step, then OTHER; or
        # STOPPED.
        self._state = START
        # Whether a launcher has started the processes, and has not said that this is over; whether there is one at all.
        self._is_running = self._is_launched = False
        self._is_complete = False
        # The chief's last line in this attempt, and after how many steps its fit has begun.
        self._line: Line | None = None
        self._base = 0
        # After which step each process has resumed a fit of which it has told nothing yet.
        self._resumed: dict[str, int] = {}
        # The fit, and the step in it, up to which the training has ever been.
        self._furthest = (0, 0)
        # Of this attempt, without its first step.
        self._step_seconds, self._steps = 0.0, 0
        # The last line of each other process, and the share of its time in which it waits for data.
        self._others: dict[str, tuple[Line, float]] = {}
        # The interruption of which the launcher has said how many steps are done again.
        self._counted: Interruption | None = None

    def add(self, event: Event, now: float) -> None:
        """Takes in one event."""
        name, kind = event["name"], event["event"]
        if self._now is None:
            self._now = now
        if name == _LAUNCHER:
            self._launcher(kind, event, now)
        elif self._is_launched and not self._is_running:
            return  # what is left of processes that are being ended
        elif tells_of_chief(event):
            self._progress(event, now)
        elif kind == "progress":
            line = Line.of(event)
            before = self._others.get(name)
            self._others[name] = line, share_of_waiting(line.since(before[0] if before else None))
        elif kind == "resumed":
            self._resumed[name] = event["step"] if _is_count(event.get("step")) else 0
        elif kind in ("preempted", "unsaved") and self._line is not None and name == self._line.process[0]:
            self._steps_until(event.get("step"), now)
            self._interrupt(f"{_LEFT[kind]} at step {event.get('step')}")
            self._book(now, {}, SAVING)
            is_running = self._is_running
            self._leave(STOPPED)
            self._is_running = is_running

    def passes(self, now: float) -> None:
        """Time passes of which nothing else is known."""
        self._book(now, {}, self._state)

    def _launcher(self, kind: str, event: Event, now: float) -> None:
        if kind == "start":
            self._start(now)
        elif kind == "failure":
            self._steps_until(event.get("step"), now)
            self._interrupt(_cause(event))
            self._book(now, {}, START if self._state == START else RESTART)
            self._leave(RESTART)
        elif kind in ("replacement", "loss"):
            # The others go on.
            self._interrupt(_cause(event))
        elif kind == "training-again" and self.account.interruptions and _is_count(event.get("steps_redone")):
            self._counted = self.account.interruptions[-1]
            self._counted.steps_redone = event["steps_redone"]
        elif (ending := end_of(event)) is not None:
            # Of a chief that has said why it leaves, nothing more is known.
            self._book(now, {}, OTHER if self._state == STOPPED and self._is_running else self._state)
            if ending != _COMPLETE and self._state in (START, OTHER):
                self._interrupt(ending)
            self._is_complete = ending == _COMPLETE
            self._leave(STOPPED)

    def _start(self, now: float) -> None:
        if self._is_running:
            # No failure, and no ending: nobody was left to write them.
            self._interrupt(_VANISHED)
            self._state = STOPPED
        is_first = not self.account.segments or self._is_complete
        self._book(now, {}, self._state)
        if self._is_complete:
            # Another training, which logs into the same folder.
            self._furthest, self._is_complete = (0, 0), False
        self._leave(START if is_first else RESTART)
        self._is_running = self._is_launched = True

    def _progress(self, event: Event, now: float) -> None:
        line, before = Line.of(event), self._line
        spent, goes_on = line.since(before), line.follows(before)
        if not self.account.segments:
            # Without a launcher, what is known begins with the fit.
            known = sum(spent.get(kind, 0.0) for kind in time_spent.KINDS)
            self._now = min(self._begin(now), max(now - min(known, _LONGEST_FIT), 0.0))
        if not line.spent and goes_on:
            spent = {time_spent.STEPS: now - self._begin(now)}
        is_called_again = (
            before is not None
            and goes_on
            and line.fit == before.fit
            and (line.trained < before.trained or spent.get(time_spent.PREPARING, 0.0) > 0)
        )
        if before is not None and (is_called_again or not goes_on):
            # As when processes come and go, or all were started again without a launcher.
            self._interrupt(_REGROUPED if goes_on else _ANOTHER)
            self._state = RESTART
        getting_ready = START if self._state == OTHER else RESTART if self._state == STOPPED else self._state
        is_new = before is None or not goes_on or is_called_again or line.fit != before.fit
        if is_new:
            self._base = self._resumed.pop(line.process[0], 0)
        since, to = self._base + (0 if is_new or before is None else before.trained), self._base + line.trained
        waiting = max([share_of_waiting(spent), *(share for _, share in self._others.values())])
        seconds = spent.get(time_spent.STEPS, 0.0)
        if not spent.get(time_spent.FIRST_STEP):
            self._step_seconds, self._steps = self._step_seconds + seconds, self._steps + max(to - since, 0)
        parts = self._split(line.fit, since, to, seconds, waiting)
        parts[getting_ready] = spent.get(time_spent.PREPARING, 0.0) + spent.get(time_spent.FIRST_STEP, 0.0)
        parts[SAVING] = spent.get(time_spent.SAVING, 0.0)
        parts[VALIDATION] = spent.get(time_spent.VALIDATION, 0.0)
        parts[OTHER] = spent.get(time_spent.BETWEEN, 0.0)
        self._book(now, parts, self._state)
        self._line, self._state = line, OTHER
        self.account.has_trained = True

    def _split(self, fit: int, since: int, to: int, seconds: float, waiting: float = 0.0) -> dict[str, float]:
        """What the time of some steps went into: those up to the furthest one are done again."""
        mark, known = (fit, to), self._furthest
        again = float(mark < known)
        if fit == known[0] and to > since:
            again = min(max((known[1] - since) / (to - since), 0.0), 1.0)
        self._furthest = max(known, mark)
        if again and self.account.interruptions and self.account.interruptions[-1] is not self._counted:
            self.account.interruptions[-1].steps_redone += round(again * max(to - since, 0))
        new = seconds * (1 - again)
        return {REDONE: seconds * again, DATA: new * waiting, TRAINING: new * (1 - waiting)}

    def _steps_until(self, step: Any, now: float) -> None:
        """Books what the chief has done since its last line, as far as others know how many steps these were."""
        since = self._base + self._line.trained if self._line is not None else 0
        if self._line is None or not _is_count(step) or step <= since:
            return
        each = self._step_seconds / self._steps if self._steps else 0.0
        seconds = min((step - since) * each, now - self._begin(now))
        self._book(self._begin(now) + seconds, self._split(self._line.fit, since, step, seconds), OTHER)

    def _begin(self, now: float) -> float:
        """Since when the time is not booked yet."""
        return now if self._now is None else self._now

    def _interrupt(self, cause: str) -> None:
        self.account.interruptions.append(Interruption(self._now or 0.0, cause))

    def _leave(self, state: str) -> None:
        """Whatever the processes have told is over."""
        self._state, self._line, self._is_running = state, None, False
        self._step_seconds, self._steps = 0.0, 0
        self._others.clear()
        self._resumed.clear()

    def _book(self, now: float, parts: Mapping[str, float], rest: str) -> None:
        """Books the time up to now.

        Args:
            now: until when.
            parts: seconds of each kind. If they are more than have passed, each is made shorter.
            rest: what the time goes into that they leave over.
        """
        begin = self._begin(now)
        passed, told = max(now - begin, 0.0), sum(parts.values())
        shorter = passed / told if told > passed else 1.0
        known = {kind: seconds * shorter for kind, seconds in parts.items()}
        known[rest] = known.get(rest, 0.0) + max(passed - told, 0.0)
        self.account.segments.append(Segment(begin, begin + passed, known))
        if self.account.interruptions:
            latest = self.account.interruptions[-1]
            latest.stopped += known.get(STOPPED, 0.0)
            latest.restart += known.get(RESTART, 0.0)
            latest.redone += known.get(REDONE, 0.0)
        self._now = begin + passed


def _cause(event: Event) -> str:
    return str(event.get("cause") or event.get("task"))


def _is_count(value: object) -> bool:
    return is_number(value) and isinstance(value, int) and value >= 0
