"""Decides whether a failed run, or a lost worker, is started again, and when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tfdist.launcher.failure import Failure, counted
from tfdist.supervision.exit_codes import REFUSED, UNSAVED
from tfdist.supervision.progress import Progress

_FIRST_DELAY = 1.0
_LONGEST_DELAY = 30.0
# A worker that ends sooner than this, in the place of another one, was started in vain.
_SHORT_LIFE = 30.0


@dataclass(frozen=True)
class Incident:
    """A failure and how far the run had got.

    Attributes:
        failure: the process that is to blame.
        trains: whether that is one of the training processes.
        progress: last report of every training process, by name.
        progressed: whether a training step was done since the processes were started.
        workers: how many training processes there were.
        at: when it happened, on the clock of `time.monotonic`.
    """

    failure: Failure
    trains: bool
    progress: Mapping[str, Progress | None]
    progressed: bool
    workers: int
    at: float

    @property
    def step(self) -> int:
        """The last step of the failed process, or of the run if the process takes no steps of its own."""
        progress = self.progress.get(self.failure.name)
        return progress.step if progress else self.furthest_step

    @property
    def furthest_step(self) -> int:
        """The last step that any process had done."""
        return max((progress.step for progress in self.progress.values() if progress), default=0)

    @property
    def cause(self) -> str:
        """What happened, in a line."""
        return self.failure.cause + (f" at step {self.step}" if self.step and not self.failure.hang else "")


@dataclass(frozen=True)
class Restart:
    """The run goes on.

    Attributes:
        number: of the restart, from 1.
        workers: number of training processes from now on.
        delay: seconds to wait before.
    """

    number: int
    workers: int
    delay: float


@dataclass(frozen=True)
class Replacement:
    """A worker is started again while the others go on.

    Attributes:
        number: among all restarts and replacements, from 1.
        delay: seconds to wait before.
    """

    number: int
    delay: float


@dataclass(frozen=True)
class GiveUp:
    """The run ends; the reason is empty where there is nothing to say about restarts."""

    reason: str


class RestartPolicy:
    """Decides about one failure after another.

    Args:
        limit: how many restarts there may be, those of single workers included.
        min_workers: with how few workers to go on when one was killed or hung; None: always with the same number.

    Attributes:
        limit: how many restarts there may be, those of single workers included.
        used: how many there have been.

    Example:
        >>> incident = Incident(Failure("worker 1", -9), True, {"worker 1": None}, False, 2, 0.0)
        >>> RestartPolicy(3).decide(incident)
        GiveUp(reason='')
    """

    def __init__(self, limit: int, min_workers: int | None = None) -> None:
        self.limit = limit
        self._min_workers = min_workers
        self.used = 0
        self._in_vain = 0
        self._workers_in_vain: dict[str, int] = {}
        self._trains = False
        self._previous: Incident | None = None

    def decide(self, incident: Incident) -> Restart | GiveUp:
        """What to do about a failure."""
        previous, self._previous = self._previous, incident
        self._trains = self._trains or any(incident.progress.values())
        reason = self._against(incident, previous)
        if reason is not None:
            return GiveUp(reason)
        self.used += 1
        self._in_vain = 0 if incident.progressed else self._in_vain + 1
        return Restart(self.used, self._next_workers(incident), _delay(self._in_vain))

    def replace(self, name: str, lived: float) -> Replacement | None:
        """What to do about a worker that can be replaced while the others go on; None if the limit is reached.

        Args:
            name: the worker.
            lived: for how many seconds it had existed.

        Example:
            >>> policy = RestartPolicy(1)
            >>> policy.replace("worker 1", 60.0), policy.replace("worker 1", 60.0)
            (Replacement(number=1, delay=0.0), None)
        """
        if self.used >= self.limit:
            return None
        self.used += 1
        before = self._workers_in_vain.get(name)
        in_vain = 0 if before is None or lived >= _SHORT_LIFE else before + 1
        self._workers_in_vain[name] = in_vain
        return Replacement(self.used, _delay(in_vain))

    def _against(self, incident: Incident, previous: Incident | None) -> str | None:
        if not self._trains or self.limit == 0:
            return ""  # perhaps not a program that trains with Keras at all, and a typo fails again at once
        if incident.failure.status == REFUSED:
            return f"not restarted: exit code {REFUSED} says that it would fail again"
        if not incident.trains and not incident.failure.lost:
            return "not restarted: it is not one of the training processes"
        own = incident.progress.get(incident.failure.name)
        # Who was asked to stop has ended its training as well: where it could not save, it is to be done again.
        has_ended = own is not None and own.has_ended and incident.failure.status != UNSAVED
        if has_ended and incident.failure.status > 0 and not incident.failure.lost:
            return "not restarted: its last fit had ended, what failed came after that"
        # That a host is lost again says nothing about the program.
        is_again = previous is not None and not (previous.failure.lost or incident.failure.lost)
        if previous is not None and is_again and previous.workers == incident.workers:
            if incident.step == previous.step:
                where = f"at step {incident.step}" if incident.step else "before its first step"
                return f"not restarted: it failed {where} for the second time in a row"
            exception = incident.failure.exception
            if exception and exception == previous.failure.exception and not incident.progressed:
                return "not restarted: it failed with the same exception again, before a single step was done"
        if self.used >= self.limit:
            return f"not restarted: {used_up(self.used)}"
        return None

    def _next_workers(self, incident: Incident) -> int:
        gone = incident.failure.status < 0 or incident.failure.hang or incident.failure.lost
        if self._min_workers is None or not gone:
            return incident.workers
        return max(incident.workers - 1, self._min_workers)


def used_up(count: int) -> str:
    """Why nothing is started again any more.

    Example:
        >>> used_up(1), used_up(0)
        ('1 restart used up (--max-restarts)', '--max-restarts is 0')
    """
    return f"{counted(count, 'restart')} used up (--max-restarts)" if count else "--max-restarts is 0"


def _delay(in_vain: int) -> float:
    """How long to wait after so many starts in a row that led to nothing."""
    return min(_FIRST_DELAY * 2 ** (in_vain - 1), _LONGEST_DELAY) if in_vain else 0.0


@dataclass(frozen=True)
class Recovery:
    """A restart that was made and has not yet led to training.

    Attributes:
        incident: why it was made.
        restart: what was decided.
        limit: how many restarts there may be.

    Example:
        >>> Recovery(Incident(Failure("worker 1", -9), True, {}, True, 2, 0.0), Restart(1, 2, 0.0), 3).name
        'restart 1 of 3'
    """

    incident: Incident
    restart: Restart
    limit: int

    @property
    def name(self) -> str:
        """What is done, for people."""
        text = f"restart {self.restart.number} of {self.limit}"
        if self.restart.workers == self.incident.workers:
            return text
        return f"{text} with {counted(self.restart.workers, 'worker')}"

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
        why = "" if self.resumed_step else ": from the beginning, since no backup was resumed"
        return f"training again after {self.seconds:.1f} s, {counted(self.steps_redone, 'step')} redone{why}"
