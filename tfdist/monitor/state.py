"""What a run does, as its events tell it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tfdist.monitor.wording import end_of, ending_of_process, in_one_line
from tfdist.submit.progress import Progress
from tfdist.supervision.identity import Identity

Event = Mapping[str, Any]

STARTING = "starting"
RUNNING = "running"
RESTARTING = "restarting"
ENDED = "ended"
_LAUNCHER = "launcher"
# Of the launcher: after one of these it writes nothing more.
_ENDS = ("complete", "gave-up", "interrupted", "preempted")
_SHOWN = 8
_TOLD = ("rank", "host", "pid", "steps_per_second", "data_wait")


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
    notable: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=_SHOWN))

    @property
    def chief(self) -> RankState | None:
        """Whose progress is that of the run."""
        trained = [one for one in self.ranks.values() if one.progress is not None]
        return min(trained, key=lambda one: one.rank or 0, default=None)

    def add(self, event: Event) -> None:
        """Goes on by one event. What is not known, or damaged, changes nothing."""
        name, kind, time = event.get("name"), event.get("event"), event.get("time")
        if not (isinstance(name, str) and isinstance(kind, str) and isinstance(time, (int, float))):
            return
        self.last = time
        if self.started is None:
            self.started = time
        text = in_one_line(event)
        # All processes say that they go on, or stop, after the same step.
        if text is not None and text not in [known for _, known in list(self.notable)[-1:]]:
            self.notable.append((time, text))
        if kind == "progress":
            self._progress(name, event)
        elif kind == "saved":
            self.checkpoint = Checkpoint(time, event.get("step", 0))
        elif name == _LAUNCHER:
            self._launcher(kind, time, event)

    def _progress(self, name: str, event: Event) -> None:
        progress = Progress.of(event)
        if progress is None:
            return
        rank = self.ranks.setdefault(name, RankState(name))
        rank.state = RUNNING if self.ending is None else rank.state
        rank.progress = progress
        for what in _TOLD:
            setattr(rank, what, event.get(what))

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
        elif kind in _ENDS:
            self.ended, self.ending = time, end_of(event)
            how = f"{ENDED}, exit code 0" if kind == "complete" else ENDED
            for rank in self.ranks.values():
                rank.state = rank.state if rank.state.startswith(ENDED) else how

    def _start(self, processes: Any) -> None:
        if not isinstance(processes, Mapping):
            return
        before, self.ranks = self.ranks, {}
        for name, pid in processes.items():
            self.ranks[name] = RankState(name, pid=pid)
            if name in before:
                # It goes on from there, or from the last backup.
                self.ranks[name].progress, self.ranks[name].rank = before[name].progress, before[name].rank
                self.ranks[name].host = before[name].host

    def _leave(self, event: Event) -> None:
        rank = self.ranks.get(event.get("task", ""))
        if rank is not None:
            rank.state = RESTARTING if event["event"] == "replacement" else f"{ENDED}, {ending_of_process(event)}"


def _identity(fields_of_it: Any) -> Identity | None:
    try:
        return Identity(**fields_of_it)
    except TypeError:
        return None
