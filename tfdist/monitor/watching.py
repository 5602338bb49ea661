"""Shows a run until it is over."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable

from rich.console import Console, Group
from rich.live import Live

from tfdist.monitor.source import Source, lives, status_of
from tfdist.monitor.state import RunState
from tfdist.monitor.view import view
from tfdist.plain_text import plain_text
from tfdist.submit.errors import SubmitError
from tfdist.submit.status import Status
from tfdist.supervision.event_stream import EventStream

_INTERVAL = 0.5
# A question to Slurm is one to its controller, which all users share.
_ASK_EVERY = 3.0
_WIDTH = 120
# What stands around the rows of processes, in lines.
_AROUND = 16


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
        """What is to be shown now, and whether the run goes on.

        Args:
            rows: how many processes to show at most.
        """
        # Asked before reading: what was written before the end is read after it.
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
            # An engine that is busy for a moment; what was known before stays.
            if not self._status:
                raise
            return
        self._status, self._goes_on = str(status), not status.is_over


def snapshot(source: Source) -> str:
    """What is to be seen of a run now, as plain text."""
    watch = Watch(source)
    watch.look()
    # Who the launcher is, the first look has told.
    shown, _ = watch.look()
    return plain_text(shown, width=shutil.get_terminal_size((_WIDTH, 0)).columns)


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
