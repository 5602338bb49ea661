"""The state of a run, or of a search of `tfdist tune`, which its events tell, and the events in words."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tfdist.jobs.status import Progress, is_number
from tfdist.json_schema import check
from tfdist.supervision.events import Event
from tfdist.supervision.exit_codes import UNSAVED
from tfdist.supervision.identity import Identity

STARTING = "starting"
RUNNING = "running"
RESTARTING = "restarting"
ENDED = "ended"
_LAUNCHER = "launcher"
# How many of the last events are shown.
_SHOWN = 8


@dataclass
class RankState:
    """One process.

    Attributes:
        name: such as "worker 1".
        state: one of those of this module, or how it has ended.
        pid: its number, as far as the launcher tells.
        progress: its last line; None before the first one.
        last: the event of that.
    """

    name: str
    state: str = STARTING
    pid: int | None = None
    progress: Progress | None = None
    last: Event = field(default_factory=dict)

    @property
    def rank(self) -> float:
        """Its rank among the processes that train; infinite for others."""
        rank = self.last.get("rank")
        return rank if isinstance(rank, int) else math.inf


@dataclass
class RunState:
    """A run, up to the last event that was added.

    Attributes:
        ranks: its processes, by name.
        restarts: how often processes were started again, alone or all together.
        saved: the event of the last backup.
        started: when it began, in seconds since 1970.
        last: time of the last event.
        ended: when it ended.
        ending: how; None while it runs, as far as the events tell.
        launcher: the launcher's process.
        search: the event of a search's begin with the last counts of its trials; None for other runs.
        notable: time and text of the last events that are no progress.

    Example:
        >>> run = RunState()
        >>> run.add({"time": 5.0, "name": "launcher", "event": "start", "processes": {"worker 0": 4711}})
        >>> run.ranks["worker 0"].state
        'starting'
    """

    ranks: dict[str, RankState] = field(default_factory=dict)
    restarts: int = 0
    saved: Event | None = None
    started: float | None = None
    last: float | None = None
    ended: float | None = None
    ending: str | None = None
    launcher: Identity | None = None
    search: Event | None = None
    notable: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=_SHOWN))

    @property
    def chief(self) -> RankState | None:
        """The process whose progress is shown for the run: the training process with the lowest rank."""
        trained = [one for one in self.ranks.values() if one.progress is not None]
        return min(trained, key=lambda one: one.rank, default=None)

    def add(self, event: Event) -> None:
        """Takes in one event of `events_in`. Unknown and damaged ones change nothing."""
        name, kind, time = event["name"], event["event"], event["time"]
        self.last = time
        if self.started is None:
            self.started = time
        text = in_one_line(event)
        # All processes report the same when they resume or stop after the same step: it is shown once.
        if text is not None and text not in [known for _, known in list(self.notable)[-1:]]:
            self.notable.append((time, text))
        if kind == "progress":
            if (progress := Progress.of(event)) is not None:
                rank = self.ranks.setdefault(name, RankState(name))
                rank.state = RUNNING if self.ending is None else rank.state
                rank.progress, rank.last = progress, event
        elif kind == "saved":
            self.saved = event
        elif kind in ("search", "searched") or kind.startswith("trial"):
            begun, counts = event if kind == "search" else self.search or {}, event.get("counts")
            self.search = {**begun, **counts} if isinstance(counts, dict) else begun
        elif name == _LAUNCHER:
            self._launcher(kind, time, event)

    def _launcher(self, kind: str, time: float, event: Event) -> None:
        if kind == "start":
            self.started = time if self.ending is not None else self.started
            self.ended = self.ending = None
            self.launcher = _identity(event.get("launcher"))
            self._start(event.get("processes"))
        elif kind in ("failure", "loss", "replacement"):
            self.restarts += kind == "replacement"
            rank = self.ranks.get(str(event.get("task")))
            if rank is not None:
                how = "it stood still" if event.get("kind") == "hang" else f"exit code {event.get('exit_code')}"
                rank.state = RESTARTING if kind == "replacement" else f"{ENDED}, {how}"
        elif kind == "restart":
            self.restarts += 1
            for rank in self.ranks.values():
                rank.state = RESTARTING
        elif (ending := end_of(event)) is not None:
            self.ended, self.ending = time, ending
            how = f"{ENDED}, exit code 0" if kind == "complete" else ENDED
            for rank in self.ranks.values():
                rank.state = rank.state if rank.state.startswith(ENDED) else how

    def _start(self, processes: Any) -> None:
        before, self.ranks = self.ranks, {}
        for name, pid in processes.items() if isinstance(processes, Mapping) else ():
            # Its progress is shown until the process, started again, reports its own.
            known = before.get(name, RankState(name))
            last = {part: known.last.get(part) for part in ("rank", "host")}
            self.ranks[name] = RankState(name, STARTING, pid if isinstance(pid, int) else None, known.progress, last)


def _identity(fields_of_it: Any) -> Identity | None:
    try:
        check(fields_of_it, {"pid": int, "start": int, "boot": str})
    except ValueError:
        return None
    return Identity(**fields_of_it)


def search_in_words(search: Event) -> str:
    """How far a search is.

    Example:
        >>> counts = {"done": 1, "running": 2, "best": 0.25, "best_trial": "0"}
        >>> search_in_words({"max_trials": 8, "objective": "loss", **counts})
        '1 of 8 trials done, 2 running; best loss 0.25 (trial 0)'
    """
    best, most, done = search.get("best"), search.get("max_trials"), search.get("done", 0)
    score = f"; best {search.get('objective')} {best:.6g} (trial {search.get('best_trial')})" if is_number(best) else ""
    return f"{f'{done} of {most}' if most else done} trials done, {search.get('running', 0)} running{score}"


_LINES = {
    "failure": "{cause}",
    "restart": "restart {restart} with {workers} workers",
    "training-again": "training again after {seconds:.1f} s, {steps_redone} steps redone",
    "replacement": "{cause}; started again alone",
    "loss": "{cause}; not started again",
    "resumed": "goes on after step {step}{backup}",
    "not saved": "a backup could not be written: {error}",
    "unsaved": "stopped after step {step}, and could not save",
    "preempted": "stopped after step {step}, to be started again",
    "trial-again": "{name} takes up trial {trial} again",
    "trial-ended": "trial {trial} {status}: score {score}",
}


def in_one_line(event: Event) -> str | None:
    """An event as a line; None for an event that is not worth a line, or damaged.

    Example:
        >>> in_one_line({"name": "launcher", "event": "restart", "restart": 1, "workers": 2, "delay": 0.0})
        'restart 1 with 2 workers'
    """
    ending = end_of(event) if event["name"] == _LAUNCHER else None
    backup = event.get("checkpoint")
    try:
        more = {"backup": f", with backup {backup}" if backup else ""}
        return ending or _LINES[event["event"]].format_map({**event, **more})
    except (KeyError, TypeError, ValueError):
        return None


def end_of(event: Event) -> str | None:
    """How a run has ended, from the launcher's last event; None for other events.

    Example:
        >>> end_of({"event": "gave-up", "exit_code": 3, "reason": ""}), end_of({"event": "saved"})
        ('failed: exit code 3', None)
    """
    kind, code, reason = event["event"], event.get("exit_code"), event.get("reason")
    if kind == "gave-up":
        return f"failed: exit code {code}{f', {reason}' if reason else ''}"
    if kind == "interrupted":
        how = ": it could not save" if code == UNSAVED else ""
        return f"interrupted by {event['signal']}{how}" if event.get("signal") else "interrupted"
    return {"complete": "complete", "preempted": "preempted: saved, to be started again"}.get(kind)
