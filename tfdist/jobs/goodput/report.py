"""What `tfdist goodput` prints of a run: as JSON, and as tables."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tfdist.jobs.goodput.account import Account, account_of
from tfdist.jobs.goodput.kinds import KINDS, PUBLISHED, STOPPED, TRAINING
from tfdist.jobs.goodput.times import without_the_future
from tfdist.jobs.monitor import Source, lives, status_of
from tfdist.jobs.request import SubmitError
from tfdist.jobs.run_state import RunState
from tfdist.jobs.status import in_words
from tfdist.supervision.events import EventStream

# Of a table with many rows these are shown at most; JSON has all.
_MOST_ROWS = 50
# Seconds. Published figures are of weeks: beside a run of minutes they say nothing.
_COMPARED_FROM = 3600.0
_NOTHING = "no process has told of training steps: only Keras' fit does, with a strategy or a callback of tfdist"


@dataclass(frozen=True)
class Report:
    """A run, and what its time went into.

    Attributes:
        title: name of the run.
        status: its state, in words.
        account: what its time went into.
    """

    title: str
    status: str
    account: Account


def report_of(source: Source, now: float) -> Report:
    """Reads the events of a run.

    Args:
        source: the run.
        now: in seconds since 1970.

    Raises:
        SubmitError: it is a search of `tfdist tune`, whose trials run side by side.
    """
    stream, run = EventStream(source.folder), RunState()
    for event in stream.read():
        run.add(event)
    # Asked before reading the rest: so all that was written before the end is read.
    launcher_lives = lives(run.launcher)
    for event in stream.read():
        run.add(event)
    if run.search is not None:
        raise SubmitError(
            f"Received: {source.title}, a search of `tfdist tune`. Expected: a training. "
            f"`tfdist monitor {source.title}` shows what the trials of a search are worth"
        )
    if source.ask is None:
        status, goes_on = status_of(run, launcher_lives, now)
    else:
        asked = source.ask()
        status, goes_on = str(asked), not asked.is_over
    goes_on = goes_on and run.ending is None
    events = without_the_future(stream.events, now)
    return Report(source.title, status, account_of(events, now if goes_on else None))


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """The share of each kind; nothing has shares if there is no time at all.

    Example:
        >>> shares({"training": 3.0, "other": 1.0}), shares({"training": 0.0})
        ({'training': 0.75, 'other': 0.25}, {'training': 0.0})
    """
    total = sum(seconds.values())
    return {kind: value / total if total > 0 else 0.0 for kind, value in seconds.items()}


def share_while_running(seconds: Mapping[str, float]) -> float:
    """The share of new training steps in the time in which the run was running.

    Example:
        >>> share_while_running({"training": 3.0, "other": 1.0, "stopped": 96.0})
        0.75
    """
    return shares({kind: value for kind, value in seconds.items() if kind != STOPPED}).get(TRAINING, 0.0)


def by_day(account: Account) -> dict[str, dict[str, float]]:
    """The seconds of each kind on each day of the local calendar. What a segment is made of is spread over it evenly.

    Example:
        >>> by_day(Account())
        {}
    """
    days: dict[str, dict[str, float]] = {}
    for segment in account.segments:
        length = segment.end - segment.begin
        for day, part in _days(segment.begin, segment.end):
            known = days.setdefault(day, dict.fromkeys(KINDS, 0.0))
            for kind, value in segment.seconds.items():
                known[kind] += value * part / length
    return days


def _days(begin: float, end: float) -> Iterator[tuple[str, float]]:
    """The days between two times, each with the number of seconds that belong to it."""
    while begin < end:
        day = datetime.datetime.fromtimestamp(begin).date()
        midnight = datetime.datetime.combine(day + datetime.timedelta(days=1), datetime.time()).timestamp()
        # Where clocks are set at midnight, a day may begin after its end.
        until = min(end, max(midnight, begin + 1.0))
        yield day.isoformat(), until - begin
        begin = until


def as_json(report: Report) -> dict[str, Any]:
    """The report for programs."""
    account = report.account
    seconds = account.seconds
    return {
        "run": report.title,
        "status": report.status,
        "begin": account.segments[0].begin if account.segments else None,
        "end": account.segments[-1].end if account.segments else None,
        "has_trained": account.has_trained,
        "total_seconds": account.total,
        "seconds": seconds,
        "shares": shares(seconds),
        "goodput": shares(seconds)[TRAINING],
        "goodput_while_running": share_while_running(seconds),
        "days": {
            day: {"seconds": of_day, "goodput": shares(of_day)[TRAINING]} for day, of_day in by_day(account).items()
        },
        "interruptions": [{**asdict(one), "lost": one.lost} for one in account.interruptions],
        "published": [{**asdict(one), "this_run": _compared(seconds, one.compares)} for one in PUBLISHED],
    }


def as_tables(report: Report, with_days: bool, with_interruptions: bool) -> list[RenderableType]:
    """The report for people.

    Args:
        report: what to show.
        with_days: whether to show each day.
        with_interruptions: whether to show what has interrupted the training.
    """
    account = report.account
    seconds = account.seconds
    parts: list[RenderableType] = [Text(f"{report.title}: {report.status}", "bold")]
    if not account.has_trained:
        parts.append(Text(f"  {_NOTHING}"))
    else:
        running = f"; {share_while_running(seconds):.1%} of the time in which it ran" if seconds[STOPPED] else ""
        goodput = f"{shares(seconds)[TRAINING]:.1%} of {in_words(account.total)}"
        parts.append(Text(f"  goodput: {goodput} went into new training steps{running}"))
    parts.append(_kinds(seconds))
    if with_days:
        parts.append(_days_table(by_day(account)))
    if with_interruptions:
        parts.append(_interruptions(account))
    if account.has_trained and account.total >= _COMPARED_FROM:
        parts.append(_published(seconds))
    return parts


def _kinds(seconds: Mapping[str, float]) -> Table:
    table = _table("time went into", "time", "share")
    of_kinds = shares(seconds)
    for kind, name in KINDS.items():
        table.add_row(name, _clock(seconds[kind]), f"{of_kinds[kind]:.1%}")
    table.add_row("total", _clock(sum(seconds.values())), f"{sum(of_kinds.values()):.1%}")
    return table


def _days_table(days: Mapping[str, Mapping[str, float]]) -> Table:
    shown = {kind: name.partition(",")[0].partition(" (")[0] for kind, name in KINDS.items()}
    table = _table("day", *shown.values())
    for day, of_day in list(days.items())[-_MOST_ROWS:]:
        of_kinds = shares(of_day)
        table.add_row(day, *(f"{of_kinds[kind]:.1%}" for kind in shown))
    return table


def _interruptions(account: Account) -> RenderableType:
    if not account.interruptions:
        return Text("no interruptions")
    table = _table("interrupted", "not running", "restart", "done again", "steps", "lost", "by")
    for one in account.interruptions[-_MOST_ROWS:]:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.time))
        times = [_clock(value) for value in (one.stopped, one.restart, one.redone)]
        table.add_row(when, *times, str(one.steps_redone), _clock(one.lost), Text(one.cause))
    table.columns[-1].justify = "left"
    table.columns[-1].overflow = "fold"
    return table


def _published(seconds: Mapping[str, float]) -> Table:
    table = _table("beside others", "published", "this run", "defined as")
    for one in PUBLISHED:
        this_run = f"{_compared(seconds, one.compares):.1%}"
        table.add_row(one.who, one.figure, this_run, Text(f"{one.definition} ({one.source})"))
    table.columns[-1].justify = "left"
    table.columns[-1].overflow = "fold"
    return table


def _compared(seconds: Mapping[str, float], kinds: tuple[str, ...]) -> float:
    return sum(shares(seconds)[kind] for kind in kinds)


def _clock(seconds: float) -> str:
    """A time as hours, minutes and seconds, with the days before."""
    return str(datetime.timedelta(seconds=round(seconds)))


def _table(first: str, *others: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right")
    return table
