"""`tfdist monitor`: finds a run, reads its event log, and shows it on a terminal until it is over."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tfdist.jobs.engine import engine_of
from tfdist.jobs.record import Records
from tfdist.jobs.request import SubmitError
from tfdist.jobs.run_state import ENDED, RESTARTING, RUNNING, STARTING, RankState, RunState
from tfdist.jobs.status import FRESH, Status, in_words, of_total
from tfdist.log_folders import NAME as LOGS
from tfdist.plain_text import plain_text
from tfdist.supervision.events import FILE_NAME, EventStream
from tfdist.supervision.identity import Identity

_KUBERNETES = "kubernetes"
# Seconds. Processes that train write every ten seconds, except in long steps and validations.
_SILENCE = 1800.0
_UNKNOWN = "-"
# These states are no failures: they are not shown in red.
_EXPECTED = (STARTING, RESTARTING, ENDED, f"{ENDED}, exit code 0")
_COLUMNS = ("epoch", "step", "steps/s", "waits for data", "loss")
_INTERVAL = 0.5
# Seconds between two questions to the scheduler: Slurm's controller is shared by all users.
_ASK_EVERY = 3.0
_WIDTH = 120
# Lines around the rows of the processes.
_AROUND = 16


@dataclass(frozen=True)
class Source:
    """A run.

    Attributes:
        title: its name for users.
        folder: of its event log.
        ask: asks the scheduler for the state of a job; None for a run that is no job.
    """

    title: str
    folder: Path
    ask: Callable[[], Status] | None = None


def find(what: str | None, here: Path, env: Mapping[str, str]) -> Source:
    """The run that a user names.

    Args:
        what: the folder of a run's logs, a folder with those of several runs, of which the newest is taken, or the id
            of a job; None for the newest run in the folder tfdist-logs.
        here: the current folder.
        env: the environment, which may set the folder of the jobs.

    Raises:
        SubmitError: there is no such run, or its events are not in a file.
    """
    folder = here / (what or LOGS)
    if what is None or folder.is_dir():
        if (folder / FILE_NAME).is_file():
            return Source(what or LOGS, folder)
        logs = list(folder.glob(f"*/{FILE_NAME}"))
        if not logs:
            raise SubmitError(
                f"Received: {folder}, in which no run has logged. Expected: the folder that `tfdist run` names at its "
                "start, or the id of a job of `tfdist submit`. Pass one of them, or change into the run's folder"
            )
        newest = max(logs, key=lambda path: path.stat().st_mtime).parent
        return Source(str(Path(what or LOGS, newest.name)), newest)
    records = Records.of_user(env)
    record = records.load(what)
    if record.scheduler == _KUBERNETES:
        raise SubmitError(
            f"Received: {what}, a job of Kubernetes, whose events are in the output of its pods. Expected: a job of "
            f"another scheduler, or a folder of logs. `tfdist status {what}` tells how far it is"
        )
    engine = engine_of(record.scheduler, records)
    return Source(what, record.event_log.parent, lambda: engine.status(records.load(what)))


def status_of(run: RunState, launcher_lives: bool, now: float) -> tuple[str, bool]:
    """The state of a run that is no job, and whether it goes on.

    Args:
        run: from its events.
        launcher_lives: whether its launcher was alive before the events were read.
        now: in seconds since 1970.

    Example:
        >>> status_of(RunState(started=10.0, ended=60.0, ending="complete"), False, now=100.0)
        ('complete after 50 s', False)
    """
    if run.ending is not None and run.started is not None and run.ended is not None:
        how, separator, why = run.ending.partition(":")
        return f"{how} after {in_words(run.ended - run.started)}{separator}{why}", False
    if not launcher_lives:
        return "lost: its launcher is gone, and has not said how the run ended", False
    if run.started is None or run.last is None:
        return "no process was started yet", True
    if run.launcher is None and now - run.last > _SILENCE:
        return f"silent for {in_words(now - run.last)}, and it has no launcher that would say whether it goes on", False
    return f"running for {in_words(max(now - run.started, 0))}", True


def lives(launcher: Identity | None) -> bool:
    """Whether a launcher is alive. One on another machine is assumed to be."""
    if launcher is None:
        return True
    own = Identity.of(os.getpid())
    return own is None or own.boot != launcher.boot or launcher.is_alive


class Watch:
    """Follows a run.

    Args:
        source: the run.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._stream = EventStream(source.folder, keep=False)
        self._run = RunState()
        self._status, self._goes_on, self._ask_at = "", True, 0.0

    def look(self, rows: int | None = None) -> tuple[Group, bool]:
        """The view of the run now, and whether the run goes on.

        Args:
            rows: how many processes to show at most.
        """
        # Asked before reading: so all that was written before the end is read.
        launcher_lives = lives(self._run.launcher)
        if self._source.ask is not None and time.monotonic() >= self._ask_at:
            self._ask(self._source.ask)
            self._ask_at = time.monotonic() + _ASK_EVERY
        for event in self._stream.read():
            self._run.add(event)
        now = time.time()
        if self._source.ask is None:
            self._status, self._goes_on = status_of(self._run, launcher_lives, now)
        return view(self._run, self._source.title, self._status, self._goes_on, now, rows), self._goes_on

    def _ask(self, ask: Callable[[], Status]) -> None:
        try:
            status = ask()
        except SubmitError:
            # The scheduler may be busy for a moment; the last known status stays.
            if not self._status:
                raise
            return
        self._status, self._goes_on = str(status), not status.is_over


def snapshot(source: Source) -> str:
    """The view of a run now, as plain text."""
    watch = Watch(source)
    # The first look finds the launcher in the events, the second one asks whether it is alive.
    watch.look()
    shown, _ = watch.look()
    return plain_text(shown, width=width())


def width() -> int:
    """How many characters a line may have: those of the terminal, if there is one."""
    return shutil.get_terminal_size((_WIDTH, 0)).columns


def watch(source: Source, console: Console) -> None:
    """Shows a run on a terminal until it is over."""
    followed = Watch(source)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            shown, goes_on = followed.look(max(console.size.height - _AROUND, 1))
            live.update(shown, refresh=True)
            if not goes_on:
                return
            time.sleep(_INTERVAL)


def view(run: RunState, title: str, status: str, is_running: bool, now: float, rows: int | None = None) -> Group:
    """A table of the processes of a run, with the state of the run above and its last events below.

    Args:
        run: from its events.
        title: name of the run.
        status: its state, in words.
        is_running: whether it goes on.
        now: in seconds since 1970.
        rows: how many processes to show at most; None for all.

    Example:
        >>> from tfdist.plain_text import plain_text
        >>> print(plain_text(view(RunState(), "local-3", "queued", True, now=100.0)))
        local-3: queued
    """
    lines = [_line(f"{title}: {status}", "bold")]
    if run.search is not None:
        lines.append(_line(f"  {run.search.shown()}"))
    chief = run.chief if run.search is None else None
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
    """A text of one line, however narrow the terminal is: more lines would push the last ones out of the screen."""
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _totals(run: RunState, now: float) -> str:
    parts = [f"{len(run.ranks)} process{'' if len(run.ranks) == 1 else 'es'}", f"restarts: {run.restarts}"]
    if run.checkpoint is None:
        parts.append("no backup")
    else:
        # Once a fit has ended, there may be none any more.
        age = "" if run.ending else f" {in_words(max(now - run.checkpoint.time, 0))} ago,"
        parts.append(f"last backup{age} after step {run.checkpoint.step}")
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
    """The processes to show. If there is no room for all, those that are not running go first."""
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
        of_total(progress.epoch, progress.epochs),
        of_total(progress.step, progress.steps),
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
    return Text(f"{RUNNING}, {in_words(age)} ago", "yellow") if age > FRESH else Text(RUNNING, "green")


def _clock(when: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(when))
