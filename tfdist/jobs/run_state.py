"""The state of a run, which its events tell, and the events in words."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tfdist.jobs.status import LAST_EVENTS, Progress, is_number
from tfdist.supervision.events import Event
from tfdist.supervision.exit_codes import UNSAVED
from tfdist.supervision.identity import Identity
from tfdist.supervision.search_state import SearchState, is_of_search
from tfdist.supervision.search_state import in_one_line as of_search_in_one_line

STARTING = "starting"
RUNNING = "running"
RESTARTING = "restarting"
ENDED = "ended"
_LAUNCHER = "launcher"
# How many of the last events are shown.
_SHOWN = 8
# Fields of an event of progress that are shown as they are.
_SHOWN_FIELDS = ("rank", "host", "pid", "steps_per_second", "data_wait")


@dataclass
class RankState:
    """One process.

    Attributes:
        name: such as "worker 1".
        state: one of those of this module, or how it has ended.
        progress: its last line; None before the first one.
        rank: among the processes that train.
        host: where it runs.
        pid: its number there.
        steps_per_second: lately.
        data_wait: share of the time in which it waited for data, lately.
    """

    name: str
    state: str = STARTING
    progress: Progress | None = None
    rank: int | None = None
    host: str | None = None
    pid: int | None = None
    steps_per_second: float | None = None
    data_wait: float | None = None


@dataclass
class Checkpoint:
    """The last backup: when it was complete, in seconds since 1970, and after how many steps it was taken."""

    time: float
    step: int


@dataclass
class RunState:
    """A run, up to the last event that was added.

    Attributes:
        ranks: its processes, by name.
        restarts: how often processes were started again, alone or all together.
        checkpoint: the last backup.
        started: when it began, in seconds since 1970.
        last: time of the last event.
        ended: when it ended.
        ending: how; None while it runs, as far as the events tell.
        launcher: the launcher's process.
        search: what a search of `tfdist tune` has found; None for other runs.
        notable: time and text of the last events that are no progress.

    Example:
        >>> run = RunState()
        >>> run.add({"time": 5.0, "name": "launcher", "event": "start", "processes": {"worker 0": 4711}})
        >>> run.ranks["worker 0"].state
        'starting'
    """

    ranks: dict[str, RankState] = field(default_factory=dict)
    restarts: int = 0
    checkpoint: Checkpoint | None = None
    started: float | None = None
    last: float | None = None
    ended: float | None = None
    ending: str | None = None
    launcher: Identity | None = None
    search: SearchState | None = None
    notable: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=_SHOWN))

    @property
    def chief(self) -> RankState | None:
        """The process whose progress is shown for the run: the training process with the lowest rank."""
        trained = [one for one in self.ranks.values() if one.progress is not None]
        return min(trained, key=lambda one: one.rank or 0, default=None)

    def add(self, event: Event) -> None:
        """Takes in one event. Unknown and damaged events change nothing."""
        name, kind, time = event.get("name"), event.get("event"), event.get("time")
        if not (isinstance(name, str) and isinstance(kind, str) and isinstance(time, (int, float))):
            return
        self.last = time
        if self.started is None:
            self.started = time
        text = in_one_line(event)
        # All processes report the same when they resume or stop after the same step: it is shown once.
        if text is not None and text not in [known for _, known in list(self.notable)[-1:]]:
            self.notable.append((time, text))
        if kind == "progress":
            self._progress(name, event)
        elif kind == "saved":
            step = event.get("step")
            self.checkpoint = Checkpoint(time, step if isinstance(step, int) else 0)
        elif is_of_search(event):
            self.search = self.search or SearchState()
            self.search.add(event)
        elif name == _LAUNCHER:
            self._launcher(kind, time, event)

    def _progress(self, name: str, event: Event) -> None:
        progress = Progress.of(event)
        if progress is None:
            return
        rank = self.ranks.setdefault(name, RankState(name))
        rank.state = RUNNING if self.ending is None else rank.state
        rank.progress = progress
        for field_name in _SHOWN_FIELDS:
            value = event.get(field_name)
            fits = isinstance(value, str) if field_name == "host" else is_number(value)
            setattr(rank, field_name, value if fits else None)

    def _launcher(self, kind: str, time: float, event: Event) -> None:
        if kind == "start":
            self.started = time if self.ending is not None else self.started
            self.ended = self.ending = None
            self.launcher = _identity(event.get("launcher"))
            self._start(event.get("processes") or {})
        elif kind in ("failure", "loss", "replacement"):
            self._leave(event)
            self.restarts += kind == "replacement"
        elif kind == "restart":
            self.restarts += 1
            for rank in self.ranks.values():
                rank.state = RESTARTING
        elif kind in LAST_EVENTS:
            self.ended, self.ending = time, end_of(event)
            how = f"{ENDED}, exit code 0" if kind == "complete" else ENDED
            for rank in self.ranks.values():
                rank.state = rank.state if rank.state.startswith(ENDED) else how

    def _start(self, processes: Any) -> None:
        if not isinstance(processes, Mapping):
            return
        before, self.ranks = self.ranks, {}
        for name, pid in processes.items():
            self.ranks[name] = RankState(name, pid=pid if isinstance(pid, int) else None)
            if name in before:
                # Shown until the process, started again, reports its own progress.
                self.ranks[name].progress, self.ranks[name].rank = before[name].progress, before[name].rank
                self.ranks[name].host = before[name].host

    def _leave(self, event: Event) -> None:
        rank = self.ranks.get(str(event.get("task")))
        if rank is not None:
            rank.state = RESTARTING if event["event"] == "replacement" else f"{ENDED}, {ending_of_process(event)}"


def _identity(fields_of_it: Any) -> Identity | None:
    try:
        found = Identity(**fields_of_it)
    except TypeError:
        return None
    known = isinstance(found.pid, int) and isinstance(found.start, int) and isinstance(found.boot, str)
    return found if known else None


def in_one_line(event: Event) -> str | None:
    """An event as a line; None for an event that is not worth a line.

    Example:
        >>> in_one_line({"name": "launcher", "event": "restart", "restart": 1, "workers": 2, "delay": 0.0})
        'restart 1 with 2 workers'
    """
    name, get = event.get("name"), event.get
    kind = event.get("event")
    if name == "launcher":
        if kind == "failure":
            return f"{get('cause') or get('task')}{_after_step(event)}"
        if kind == "restart":
            workers = get("workers")
            return f"restart {get('restart')} with {workers} worker{'' if workers == 1 else 's'}"
        if kind == "training-again":
            return f"training again after {_seconds(get('seconds'))}, {get('steps_redone')} steps redone"
        if kind == "replacement":
            return f"{get('cause')}; started again alone"
        if kind == "loss":
            return f"{get('cause')}; not started again"
        return end_of(event)
    if is_of_search(event):
        return of_search_in_one_line(event)
    if kind == "resumed":
        return f"goes on after step {get('step')}, with backup {get('checkpoint')}"
    if kind == "not saved":
        return f"a backup could not be written: {get('error')}"
    if kind == "unsaved":
        return f"stopped after step {get('step')}, and could not save"
    return f"stopped after step {get('step')}, to be started again" if kind == "preempted" else None


def end_of(event: Event) -> str | None:
    """How a run has ended, from the launcher's last event; None for other events.

    Example:
        >>> end_of({"event": "gave-up", "exit_code": 3, "reason": ""}), end_of({"event": "saved"})
        ('failed: exit code 3', None)
    """
    kind, code, reason = event.get("event"), event.get("exit_code"), event.get("reason")
    if kind == "complete":
        return "complete"
    if kind == "gave-up":
        return f"failed: exit code {code}{f', {reason}' if reason else ''}"
    if kind == "interrupted":
        how = ": it could not save" if code == UNSAVED else ""
        return f"interrupted by {event['signal']}{how}" if event.get("signal") else "interrupted"
    return "preempted: saved, to be started again" if kind == "preempted" else None


def ending_of_process(event: Event) -> str:
    """How a process has ended.

    Example:
        >>> ending_of_process({"kind": "exit", "exit_code": 3}), ending_of_process({"kind": "hang", "exit_code": 124})
        ('exit code 3', 'it stood still')
    """
    return "it stood still" if event.get("kind") == "hang" else f"exit code {event.get('exit_code')}"


def _after_step(event: Event) -> str:
    step = event.get("step")
    return f" at step {step}" if step and f"step {step}" not in str(event.get("cause")) else ""


def _seconds(value: Any) -> str:
    return f"{value:.1f} s" if isinstance(value, (int, float)) else "some time"
