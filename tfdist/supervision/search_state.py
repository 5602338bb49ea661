"""How far a hyper-parameter search of `tfdist tune` is, from the events of its tuners."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tfdist.supervision.events import Event

_NAME_WIDTH = 60


@dataclass
class SearchState:
    """A search, up to the last event that was added.

    Attributes:
        objective: what is optimised.
        max_trials: how many trials there may be; None if nobody says it.
        done: how many trials have ended.
        running: how many are at work.
        best: the best score so far.
        best_trial: the trial that has it.

    Example:
        >>> search = SearchState()
        >>> search.add({"time": 1.0, "name": "tuner 0", "event": "search", "objective": "val_loss", "max_trials": 8})
        >>> counts = {"done": 1, "running": 2, "best": 0.25, "best_trial": "0"}
        >>> search.add({"time": 2.0, "name": "tuner 1", "event": "trial", "trial": "2", "counts": counts})
        >>> search.shown()
        '1 of 8 trials done, 2 running; best val_loss 0.25 (trial 0)'
    """

    objective: str = "score"
    max_trials: int | None = None
    done: int = 0
    running: int = 0
    best: float | None = None
    best_trial: str = ""

    def add(self, event: Event) -> None:
        """Takes in an event of a search. What is damaged changes nothing."""
        if event["event"] == "search":
            self.objective = str(event.get("objective"))[:_NAME_WIDTH]
            self.max_trials = _count(event.get("max_trials"))
            self.done, self.running, self.best, self.best_trial = 0, 0, None, ""
        counts = event.get("counts")
        if not isinstance(counts, dict):
            return
        done, running = _count(counts.get("done")), _count(counts.get("running"))
        self.done = self.done if done is None else done
        self.running = self.running if running is None else running
        best = counts.get("best")
        if isinstance(best, (int, float)) and not isinstance(best, bool) and math.isfinite(best):
            self.best, self.best_trial = float(best), str(counts.get("best_trial"))[:_NAME_WIDTH]

    def shown(self) -> str:
        """As a line."""
        total = f"{self.done} of {self.max_trials}" if self.max_trials else str(self.done)
        best = "" if self.best is None else f"; best {self.objective} {self.best:.6g} (trial {self.best_trial})"
        return f"{total} trial{'' if (self.max_trials or self.done) == 1 else 's'} done, {self.running} running{best}"


def is_of_search(event: Event) -> bool:
    """Whether an event is one of a search.

    Example:
        >>> is_of_search({"event": "trial-ended"}), is_of_search({"event": "progress"})
        (True, False)
    """
    return event["event"] in ("search", "searched") or event["event"].startswith("trial")


def in_one_line(event: Event) -> str | None:
    """An event of a search as a line; None for an event that is not worth a line.

    Example:
        >>> ended = {"event": "trial-ended", "name": "tuner 1", "trial": "3", "status": "COMPLETED", "score": 0.25}
        >>> in_one_line(ended), in_one_line({**ended, "status": "FAILED", "score": None, "error": "a\\nno luck"})
        ('trial 3: score 0.25', 'trial 3 failed: no luck')
    """
    kind, trial, score = event["event"], event.get("trial"), event.get("score")
    if kind == "trial-again":
        return f"{event['name']} takes up trial {trial} again"
    if kind != "trial-ended":
        return None
    if event.get("status") == "COMPLETED":
        return f"trial {trial}: score {score:.6g}" if isinstance(score, (int, float)) else f"trial {trial} ended"
    error = str(event.get("error") or "").strip().splitlines()
    return f"trial {trial} {str(event.get('status')).lower()}" + (f": {error[-1]}" if error else "")


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
