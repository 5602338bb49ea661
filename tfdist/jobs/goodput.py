"""`tfdist goodput`: what the wall time of a run went into. Each second belongs to one kind.

The chief writes with each line of progress what the time of its process has gone into so far, in sums. What two lines
differ by is booked for the time between them; what they leave over belongs to the state that the run was in.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich.console import RenderableType
from rich.text import Text

from tfdist.jobs.monitor import Source, Watch
from tfdist.jobs.request import SubmitError
from tfdist.jobs.run_state import end_of
from tfdist.jobs.status import in_words, is_number
from tfdist.plain_text import plain_table
from tfdist.supervision import time_spent
from tfdist.supervision.events import Event, EventStream

TRAINING, DATA, SAVING, VALIDATION, REDONE = "training", "data", "saving", "validation", "redone"
RESTART, START, STOPPED, OTHER = "restart", "start", "stopped", "other"
# In the order in which they are shown, with what users read.
KINDS = {
    TRAINING: "new training steps",
    DATA: "waiting for data",
    SAVING: "saving (BackupAndRestore)",
    VALIDATION: "validation",
    REDONE: "steps done again",
    RESTART: "restarts, up to the first step",
    START: "start, up to the first step",
    STOPPED: "not running",
    OTHER: "other",
}
# What an interruption costs.
_COSTS = (STOPPED, RESTART, REDONE)
_LEFT = {"preempted": "preempted", "unsaved": "stopped, and could not save,"}
# The table of interruptions shows so many at most; JSON has all.
_MOST_ROWS = 50
_NOTHING = "no training steps reported: only Keras' fit does, with a strategy or a callback of tfdist"


@dataclass
class Account:
    """What the time of a run went into.

    Attributes:
        begin: in seconds since 1970.
        end: the same.
        seconds: of each kind, from begin to end.
        interruptions: what has kept the training from going on: when, by what cause, the seconds that it has cost (not
            running, until the first step was done, and in steps done again), and how many these steps were.
        has_trained: whether there are steps at all.
    """

    begin: float = 0.0
    end: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    interruptions: list[dict[str, Any]] = field(default_factory=list)
    has_trained: bool = False

    @property
    def shares(self) -> dict[str, float]:
        """The share of each kind; zeros if there is no time at all."""
        return {kind: value / (self.end - self.begin or 1.0) for kind, value in self.seconds.items()}

    def passes(self, now: float, rest: str, parts: Mapping[str, float] | None = None) -> None:
        """Books the time up to now: these seconds of each kind, shortened if they are more, the others as `rest`."""
        parts, passed = parts or {}, max(now - self.end, 0.0)
        self.end += passed
        known = sum(parts.values())
        booked = {kind: seconds * min(passed / known, 1.0) for kind, seconds in parts.items() if seconds}
        booked[rest] = booked.get(rest, 0.0) + max(passed - known, 0.0)
        for kind, seconds in booked.items():
            self.seconds[kind] += seconds
            if self.interruptions and kind in _COSTS:
                self.interruptions[-1][kind] += seconds


class _Line(NamedTuple):
    """A line of progress: who wrote it, in which fit, after how many of its steps, and the sums of its time."""

    process: tuple[str, ...]
    fit: int
    trained: int
    spent: dict[str, float]


def _line(event: Event) -> _Line:
    found = event.get("spent")
    sums = found if isinstance(found, dict) else {}
    kinds = (*time_spent.KINDS, time_spent.WAITING)
    spent = {kind: max(sums[kind], 0.0) if is_number(sums.get(kind)) else 0.0 for kind in kinds}
    process = tuple(str(event.get(part)) for part in ("name", "host", "pid"))
    return _Line(process, max(_whole(event.get("fit")), 1), _whole(event.get("trained")), spent)


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
    if not events:
        return Account()
    book = _Book(events[0]["time"])
    for event in events:
        book.add(event)
    book.account.passes(events[-1]["time"] if until is None else until, book.state)
    return book.account


class _Book:
    """Takes in the events, and books the time between them."""

    def __init__(self, begin: float) -> None:
        self.account = Account(begin, begin)
        # What the time goes into that no line tells of; and after the launcher's next start.
        self.state = self._begins = START
        # Whether the launcher's processes run; None without a launcher.
        self._is_running: bool | None = None
        # The chief's last line in this attempt, and after how many steps its fit has begun.
        self._line: _Line | None = None
        self._base = 0
        # After which step each process has resumed a fit for which it has written no progress yet.
        self._resumed: dict[str, int] = {}
        # The fit, and the step in it, up to which the training has ever been.
        self._furthest = (0, 0)
        # The share of the time of its steps in which each process has waited for data.
        self._waits: dict[str, float] = {}

    def add(self, event: Event) -> None:
        """Takes in one event."""
        name, kind, now = event["name"], event["event"], event["time"]
        if name == "launcher":
            self._launcher(kind, event, now)
        elif self._is_running is False:
            return  # left over by processes that are being ended
        elif kind == "progress":
            line = _line(event)
            self._waits[name] = min(line.spent[time_spent.WAITING] / (line.spent[time_spent.STEPS] or 1.0), 1.0)
            if not event.get("rank"):
                self._progress(line, now)
        elif kind == "resumed":
            self._resumed[name] = _whole(event.get("step"))
        elif kind in _LEFT and self._line is not None and name == self._line.process[0]:
            self._interrupt(f"{_LEFT[kind]} at step {event.get('step')}")
            self._ends(now, SAVING, STOPPED, self._is_running)

    def _launcher(self, kind: str, event: Event, now: float) -> None:
        ending, cause = end_of(event), str(event.get("cause") or event.get("task"))
        if kind == "start":
            if self._is_running:
                # No failure, and no ending: nobody was left to write them.
                self._interrupt("it ended without a word, as when its launcher is killed")
                self.state = STOPPED
            self._ends(now, self.state, self._begins, True)
            self._begins = RESTART
        elif kind == "failure":
            self._furthest = max(self._furthest, (self._furthest[0], _whole(event.get("step"))))
            self._interrupt(cause)
            self._ends(now, START if self.state == START else RESTART, RESTART, False)
        elif kind == "restart":
            self._is_running = False  # they have saved, so that more workers can start
        elif kind in ("replacement", "loss"):
            self._interrupt(cause)  # the others go on
        elif ending is not None:
            if kind == "complete":
                # What logs into the same folder next is another training.
                self._begins, self._furthest = START, (0, 0)
            elif self.state in (START, OTHER):
                self._interrupt(ending)
            self._ends(now, self.state, STOPPED, False)

    def _progress(self, line: _Line, now: float) -> None:
        before = self._line
        if before is not None and before.process != line.process:
            # As when all were started again without a launcher.
            self._interrupt("another process goes on")
            self.state, before = RESTART, None
        spent = {kind: max(value - (before.spent[kind] if before else 0.0), 0.0) for kind, value in line.spent.items()}
        if self._is_running is None and not self.account.has_trained:
            # Without a launcher, what is known begins with the fit.
            begin = max(now - sum(spent[kind] for kind in time_spent.KINDS), 0.0)
            self.account.begin = self.account.end = min(self.account.begin, begin)
        since = self._base + before.trained if before else 0
        if before is None or line.fit != before.fit:
            since = self._base = self._resumed.pop(line.process[0], 0)
        again = self._redone(line.fit, since, self._base + line.trained)
        waiting, new = max(self._waits.values()), spent[time_spent.STEPS] * (1 - again)
        getting_ready = {OTHER: START, STOPPED: RESTART}.get(self.state, self.state)
        parts = {
            REDONE: spent[time_spent.STEPS] * again,
            DATA: new * waiting,
            TRAINING: new * (1 - waiting),
            getting_ready: spent[time_spent.PREPARING] + spent[time_spent.FIRST_STEP],
            SAVING: spent[time_spent.SAVING],
            VALIDATION: spent[time_spent.VALIDATION],
            OTHER: spent[time_spent.BETWEEN],
        }
        self.account.passes(now, self.state, parts)
        self._line, self.state, self.account.has_trained = line, OTHER, True

    def _redone(self, fit: int, since: int, to: int) -> float:
        """The share of some steps that had been done before."""
        known, self._furthest = self._furthest, max(self._furthest, (fit, to))
        if (fit, since) >= known or to <= since:
            return 0.0
        again = min(known[1], to) - since if fit == known[0] else to - since
        for latest in self.account.interruptions[-1:]:
            latest["steps_redone"] += again
        return again / (to - since)

    def _interrupt(self, cause: str) -> None:
        new = {"time": self.account.end, "cause": cause, **dict.fromkeys(_COSTS, 0.0), "steps_redone": 0}
        self.account.interruptions.append(new)

    def _ends(self, now: float, last: str, state: str, is_running: bool | None) -> None:
        """An attempt ends, and with it what its processes have written."""
        self.account.passes(now, last)
        self.state, self._line, self._is_running = state, None, is_running
        self._waits.clear()
        self._resumed.clear()


def _whole(value: object) -> int:
    return int(value) if is_number(value) and value >= 0 else 0  # type: ignore[arg-type, operator]


def read(source: Source) -> tuple[str, Account]:
    """The status of a run, in words, and what its time went into.

    Raises:
        SubmitError: it is a search of `tfdist tune`, whose trials run side by side.
    """
    found = Watch(source)
    if found.run.search is not None:
        raise SubmitError(f"Received: {source.title}, a search of `tfdist tune`. Expected: a training")
    events = EventStream(source.folder).read()
    return found.status, account_of(events, time.time() if found.goes_on and found.run.ending is None else None)


def as_json(title: str, status: str, account: Account) -> dict[str, Any]:
    """The report for programs."""
    return {
        **{"run": title, "status": status, "begin": account.begin, "end": account.end},
        **{"has_trained": account.has_trained, "goodput": account.shares[TRAINING]},
        **{"total_seconds": account.end - account.begin, "seconds": account.seconds, "shares": account.shares},
        "interruptions": [{**one, "lost": _lost(one)} for one in account.interruptions],
    }


def _lost(interruption: Mapping[str, Any]) -> float:
    """Seconds that it has cost in all."""
    return sum(interruption[kind] for kind in _COSTS)


def as_tables(title: str, status: str, account: Account, interruptions: bool) -> list[RenderableType]:
    """The report for people; with the table of what has interrupted the training."""
    shares, total = account.shares, account.end - account.begin
    goodput = f"goodput: {shares[TRAINING]:.1%} of {in_words(total)} went into new training steps"
    rows = [
        *((name, _clock(account.seconds[kind]), f"{shares[kind]:.1%}") for kind, name in KINDS.items()),
        ("total", _clock(total), f"{sum(shares.values()):.1%}"),
    ]
    parts: list[RenderableType] = [
        Text(f"{title}: {status}", "bold"),
        Text(f"  {goodput if account.has_trained else _NOTHING}"),
        plain_table(("time went into", "time", "share"), rows, right=("time", "share")),
    ]
    if interruptions and account.interruptions:
        costs = ("not running", "restart", "done again", "steps", "lost")
        last = map(_interruption, account.interruptions[-_MOST_ROWS:])
        parts.append(plain_table(("interrupted", *costs, "by"), last, right=costs, wraps=("by",)))
    return parts


def _interruption(one: Mapping[str, Any]) -> tuple[str, ...]:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one["time"]))
    return when, *(_clock(one[kind]) for kind in _COSTS), str(one["steps_redone"]), _clock(_lost(one)), one["cause"]


def _clock(seconds: float) -> str:
    """A time as hours, minutes and seconds, with the days before."""
    return str(datetime.timedelta(seconds=round(seconds)))
