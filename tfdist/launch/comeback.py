"""The way back after a restart, until all processes train again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tfdist.launch.restarts import Incident, Restart
from tfdist.supervision.progress import Progress


@dataclass(frozen=True)
class Comeback:
    """A restart that was made and has not yet led to training.

    Attributes:
        incident: why it was made.
        restart: what was decided.
        limit: how many restarts there may be.

    Example:
        >>> Comeback(Incident(Failure("worker 1", -9), True, {}, True, 2, 0.0), Restart(1, 2, 0.0), 3).headline
        'worker 1 was killed by SIGKILL; restart 1 of 3'
    """

    incident: Incident
    restart: Restart
    limit: int

    @property
    def headline(self) -> str:
        """What happened and what was done, for people."""
        text = f"{self.incident.cause}; restart {self.restart.number} of {self.limit}"
        if self.restart.workers == self.incident.workers:
            return text
        return f"{text} with {self.restart.workers} worker{'' if self.restart.workers == 1 else 's'}"

    def is_complete(self, progress: Mapping[str, Progress | None]) -> bool:
        """Whether each process that reports, or had reported before, has now done a step of its own."""
        expected = [report for name, report in progress.items() if report or self.incident.progress.get(name)]
        return bool(expected) and all(report is not None and report.has_trained for report in expected)

    def outcome(self, progress: Mapping[str, Progress | None], now: float) -> Outcome:
        """What it took, once it is complete.

        Args:
            progress: the last report of every training process, by name.
            now: the time on the clock of `time.monotonic`.
        """
        resumed = max((report.resumed_step or 0 for report in progress.values() if report), default=0)
        redone = max(self.incident.furthest_step - resumed, 0)
        return Outcome(self.restart.number, round(now - self.incident.at, 3), resumed, redone)


@dataclass(frozen=True)
class Outcome:
    """What a restart took.

    Attributes:
        restart: its number.
        seconds: from the failure until all processes had done a step.
        resumed_step: where the training was taken up again; 0: at its very beginning.
        steps_redone: how many steps had been done before and were lost.

    Example:
        >>> str(Outcome(1, 3.42, 116, 7))
        'training again after 3.4 s, 7 steps redone'
    """

    restart: int
    seconds: float
    resumed_step: int
    steps_redone: int

    def __str__(self) -> str:
        steps = f"{self.steps_redone} step{'' if self.steps_redone == 1 else 's'} redone"
        why = "" if self.resumed_step else ": from the beginning, since no backup was resumed"
        return f"training again after {self.seconds:.1f} s, {steps}{why}"
