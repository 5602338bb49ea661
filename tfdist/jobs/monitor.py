"""`tfdist monitor`: finds a run, reads its event log, and shows it on a terminal until it is over."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from tfdist.folders import NAME as LOGS
from tfdist.jobs.engine import job_of
from tfdist.jobs.request import SubmitError
from tfdist.jobs.run_state import ENDED, RESTARTING, RUNNING, STARTING, RankState, RunState, search_in_words
from tfdist.jobs.status import FRESH, Status, in_words, is_number, of_total
from tfdist.plain_text import plain_table
from tfdist.supervision.events import FILE_NAME, EventStream
from tfdist.supervision.identity import Identity, own_place

# Seconds. Processes that train write every ten seconds, except in long steps and validations.
_SILENCE = 1800.0
# These states are no failures: they are not shown in red.
_EXPECTED = (STARTING, RESTARTING, ENDED, f"{ENDED}, exit code 0")
_NUMBERS = ("pid", "epoch", "step", "steps/s", "waits for data", "loss")
_INTERVAL = 0.5
# Seconds between two questions to the scheduler: Slurm's controller is shared by all users.
_ASK_EVERY = 3.0
_WIDTH = 120


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
                "start, or the id of a job of `tfdist submit`"
            )
        newest = max(logs, key=lambda path: path.stat().st_mtime).parent
        return Source(str(Path(what or LOGS, newest.name)), newest)
    record, engine = job_of(what, env)
    if record.scheduler == "kubernetes":
        raise SubmitError(
            f"Received: {what}, a job of Kubernetes, whose events are in the output of its pods. Expected: another "
            f"job, or `tfdist status {what}`"
        )
    return Source(what, record.event_log.parent, lambda: engine.status(engine.records.load(what)))


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
    """Whether a launcher is alive. One on another machine, or in another container, is assumed to be."""
    return launcher is None or launcher.boot != own_place() or launcher.is_alive


class Watch:
    """Follows a run.

    Args:
        source: the run.

    Attributes:
        run: its state, from its events.
        status: its state, in words.
        goes_on: whether it does.
    """

    def __init__(self, source: Source) -> None:
        self.run, self.status, self.goes_on = RunState(), "", True
        self._source, self._ask_at = source, 0.0
        self._stream = EventStream(source.folder)
        self.look()
        self.look()  # now it is known which launcher may live

    def look(self) -> None:
        """Reads what is new."""
        # Asked before reading: so all that was written before the end is read.
        launcher_lives = lives(self.run.launcher)
        if self._source.ask is not None and time.monotonic() >= self._ask_at:
            self._ask(self._source.ask)
            self._ask_at = time.monotonic() + _ASK_EVERY
        for event in self._stream.read():
            self.run.add(event)
        if self._source.ask is None:
            self.status, self.goes_on = status_of(self.run, launcher_lives, time.time())

    def view(self) -> Group:
        """The view of the run."""
        return view(self.run, self._source.title, self.status, self.goes_on, time.time())

    def _ask(self, ask: Callable[[], Status]) -> None:
        try:
            status = ask()
        except SubmitError:
            # The scheduler may be busy for a moment; the last known status stays.
            if not self.status:
                raise
            return
        self.status, self.goes_on = str(status), not status.is_over


def watch(source: Source, console: Console) -> None:
    """Shows a run until it is over, or until Ctrl-C. What does not fit on the terminal is left out."""
    followed = Watch(source)
    with Live(followed.view(), console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while followed.goes_on:
            time.sleep(_INTERVAL)
            followed.look()
            live.update(followed.view(), refresh=True)


def width() -> int:
    """How many characters a line may have: those of the terminal, if there is one."""
    return shutil.get_terminal_size((_WIDTH, 0)).columns


def view(run: RunState, title: str, status: str, is_running: bool, now: float) -> Group:
    """The state of a run, its last events, and a table of its processes.

    Args:
        run: from its events.
        title: name of the run.
        status: its state, in words.
        is_running: whether it goes on.
        now: in seconds since 1970.

    Example:
        >>> from tfdist.plain_text import plain_text
        >>> print(plain_text(view(RunState(), "local-3", "queued", True, now=100.0)))
        local-3: queued
    """
    lines = [(f"{title}: {status}", "bold")]
    if run.search is not None:
        lines.append((f"  {search_in_words(run.search)}", ""))
    elif run.chief is not None and run.chief.progress is not None:
        lines.append((f"  {run.chief.progress.shown(is_running, now)}", ""))
    if run.ranks:
        lines.append((f"  {_totals(run, now)}", ""))
    lines += [(f"{time.strftime('%H:%M:%S', time.localtime(when))}  {what}", "") for when, what in run.notable]
    # However narrow the terminal is, each is one line.
    texts = (Text(text, style, no_wrap=True, overflow="ellipsis") for text, style in lines)
    ranks = sorted(run.ranks.values(), key=lambda one: one.rank)
    rows = ((*_cells(rank), _state(rank, is_running, now)) for rank in ranks)
    table = plain_table(("process", "host", *_NUMBERS, "state"), rows, right=_NUMBERS)
    return Group(*texts, *([table] if ranks else []))


def _totals(run: RunState, now: float) -> str:
    backup = "no backup"
    if run.saved is not None:
        # Once a fit has ended, there may be none any more.
        age = "" if run.ending else f" {in_words(max(now - run.saved['time'], 0))} ago,"
        backup = f"last backup{age} after step {run.saved.get('step')}"
    processes = f"{len(run.ranks)} process{'' if len(run.ranks) == 1 else 'es'}"
    alone = run.chief.last.get("steps_alone") if run.chief is not None else None
    exchanged = f", last exchange {alone:.0f} steps ago" if is_number(alone) else ""
    return f"{processes}, restarts: {run.restarts}, {backup}{exchanged}"


def _cells(rank: RankState) -> tuple[str, ...]:
    last, progress = rank.last, rank.progress

    def number(value: object, form: str) -> str:
        return format(value, form) if is_number(value) else "-"

    return (
        rank.name,
        str(last.get("host") or "-"),
        number(last.get("pid", rank.pid), ".0f"),
        of_total(progress.epoch, progress.epochs) if progress else "-",
        of_total(progress.step, progress.steps) if progress else "-",
        number(last.get("steps_per_second"), ".3g"),
        number(last.get("data_wait"), ".0%"),
        number(progress and progress.loss, ".4g"),
    )


def _state(rank: RankState, is_running: bool, now: float) -> Text:
    if not is_running and not rank.state.startswith(ENDED):
        return Text(ENDED)
    if rank.state != RUNNING or rank.progress is None:
        return Text(rank.state, "yellow" if rank.state in _EXPECTED else "red")
    age = now - rank.progress.time
    return Text(f"{RUNNING}, {in_words(age)} ago", "yellow") if age > FRESH else Text(RUNNING, "green")
