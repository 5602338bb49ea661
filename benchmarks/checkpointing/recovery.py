"""Failures, and what a log of steps says about the recovery from them."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.checkpointing.step_log import Step

RANKS = 2
SAVE_EVERY = 8
# Between two saves: on average half of the steps between them are lost.
_FAILS_AT = SAVE_EVERY // 2


class Failure(NamedTuple):
    """What is done to a process.

    Attributes:
        title: what the table calls it.
        rank: of the process.
        number: the signal that it gets.
    """

    title: str
    rank: int
    number: signal.Signals


KILLS = (Failure("worker killed", 1, signal.SIGKILL), Failure("chief killed", 0, signal.SIGKILL))
STOP = Failure("worker stopped (SIGSTOP)", 1, signal.SIGSTOP)
FAILURES = (*KILLS, STOP)


def failures_of_run(repeats: int) -> list[Failure]:
    """What happens during one run, in turns.

    Example:
        >>> [failure.rank for failure in failures_of_run(repeats=2)]
        [1, 0, 1, 0, 1]
    """
    return [*KILLS * repeats, STOP]


class Recovery(NamedTuple):
    """How a run got over a failure.

    Attributes:
        seconds: from the failure until every rank has done a step again.
        redone: steps that were done before the failure and had to be done again.
    """

    seconds: float
    redone: int


def last_of(steps: Sequence[Step], rank: int) -> Step | None:
    """The last step of a rank; None if it has not done any."""
    return next((step for step in reversed(steps) if step.rank == rank), None)


def victim(steps: Sequence[Step], rank: int, not_before: float) -> Step | None:
    """The last step of a rank if this is a moment for it to fail: all have done the same step, between two saves.

    Args:
        steps: the log.
        rank: that is to fail.
        not_before: the time from which on it may.
    """
    last = [last_of(steps, rank) for rank in range(RANKS)]
    numbers = {step.step for step in last if step is not None and step.time >= not_before}
    together = None not in last and len(numbers) == 1
    return last[rank] if together and numbers.pop() % SAVE_EVERY == _FAILS_AT else None


def recovery(steps: Sequence[Step], failed_at: float, ranks: int = RANKS) -> Recovery | None:
    """The recovery from a failure at a time; None as long as not every rank has trained again in a new process.

    Example:
        >>> before = [Step(1.0, 0, 9, 40), Step(1.0, 1, 9, 41)]
        >>> after = [Step(4.0, 0, 9, 50), Step(4.5, 1, 9, 51)]
        >>> recovery(before + after, failed_at=1.5), recovery(before, failed_at=1.5)
        (Recovery(seconds=3.0, redone=1), None)
    """
    old = {step.pid for step in steps if step.time <= failed_at}
    first: dict[int, Step] = {}
    for step in steps:
        if step.pid not in old:
            first.setdefault(step.rank, step)
    if len(first) < ranks:
        return None
    furthest = max((step.step for step in steps if step.pid in old), default=0)
    resumed = min(step.step for step in first.values()) - 1
    return Recovery(max(step.time for step in first.values()) - failed_at, max(furthest - resumed, 0))
