"""What is known of a run, for a terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tfdist.monitor.state import ENDED, RESTARTING, RUNNING, STARTING, RankState, RunState
from tfdist.submit.duration import in_words

_UNKNOWN = "-"
# A process that trains writes every ten seconds at least, but for long steps, validation, and very many processes.
_FRESH = 30
# Neither good nor bad.
_EXPECTED = (STARTING, RESTARTING, ENDED, f"{ENDED}, exit code 0")
_COLUMNS = ("epoch", "step", "steps/s", "waits for data", "loss")


def view(run: RunState, title: str, status: str, is_running: bool, now: float, rows: int | None = None) -> Group:
    """The processes of a run, and above and below them what concerns all of them.

    Args:
        run: what its events have told.
        title: what it is called.
        status: in which state it is.
        is_running: whether it goes on.
        now: in seconds since 1970.
        rows: how many processes to show at most; None for all.

    Example:
        >>> from tfdist.plain_text import plain_text
        >>> print(plain_text(view(RunState(), "local-3", "queued", True, now=100.0)))
        local-3: queued
    """
    lines = [_line(f"{title}: {status}", "bold")]
    chief = run.chief
    if chief is not None and chief.progress is not None:
        lines.append(_line(f"  {chief.progress.shown(is_running, now)}"))
    if run.ranks:
        lines.append(_line(f"  {_totals(run, now)}"))
    parts: list[RenderableType] = [*lines]
    if run.ranks:
        parts += _processes(run, is_running, now, rows)
    if run.notable:
        parts += (_line(f"{_clock(when)}  {what}") for when, what in run.notable)
    return Group(*parts)


def _line(text: str, style: str = "") -> Text:
    """One line, however narrow the terminal is: what has several would push the last ones out of it."""
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _totals(run: RunState, now: float) -> str:
    parts = [f"{len(run.ranks)} process{'' if len(run.ranks) == 1 else 'es'}", f"restarts: {run.restarts}"]
    if run.checkpoint is None:
        parts.append("no backup")
    else:
        age = in_words(max(now - run.checkpoint.time, 0))
        parts.append(f"last backup {age} ago, after step {run.checkpoint.step}")
    return ", ".join(parts)


def _processes(run: RunState, is_running: bool, now: float, most: int | None) -> list[RenderableType]:
    ranks = sorted(run.ranks.values(), key=lambda one: (one.rank is None, one.rank or 0))
    chosen = _chosen(ranks, most)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("process", no_wrap=True)
    table.add_column("host", overflow="ellipsis", no_wrap=True)
    for column in ("pid", *_COLUMNS):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for rank in chosen:
        table.add_row(*_cells(rank), _state(rank, is_running, now))
    hidden = len(ranks) - len(chosen)
    return [table, *([Text(f"and {hidden} more")] if hidden else [])]


def _chosen(ranks: Sequence[RankState], most: int | None) -> list[RankState]:
    """Those that do not run come first where there is no room for all."""
    if most is None or len(ranks) <= most:
        return list(ranks)
    order = sorted(range(len(ranks)), key=lambda i: (ranks[i].state == RUNNING, i))
    return [ranks[i] for i in sorted(order[:most])]


def _cells(rank: RankState) -> list[str]:
    cells = [rank.name, rank.host or _UNKNOWN, _UNKNOWN if rank.pid is None else str(rank.pid)]
    progress = rank.progress
    if progress is None:
        return cells + [_UNKNOWN] * len(_COLUMNS)
    return [
        *cells,
        _of(progress.epoch, progress.epochs),
        _of(progress.step, progress.steps),
        _UNKNOWN if rank.steps_per_second is None else f"{rank.steps_per_second:.3g}",
        _UNKNOWN if rank.data_wait is None else f"{rank.data_wait:.0%}",
        _UNKNOWN if progress.loss is None else f"{progress.loss:.4g}",
    ]


def _state(rank: RankState, is_running: bool, now: float) -> Text:
    if not is_running and not rank.state.startswith(ENDED):
        return Text(ENDED)
    if rank.state != RUNNING or rank.progress is None:
        return Text(rank.state, "yellow" if rank.state in _EXPECTED else "red")
    age = now - rank.progress.time
    return Text(f"{RUNNING}, {in_words(age)} ago", "yellow") if age > _FRESH else Text(RUNNING, "green")


def _of(number: int, total: int | None) -> str:
    return f"{number}/{total}" if total else str(number)


def _clock(when: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(when))
