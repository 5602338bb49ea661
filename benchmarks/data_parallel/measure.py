"""From moments in time to the numbers of the table."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


class StepClock:
    """Takes the time of windows of steps in the middle of a training that runs on.

    Args:
        warmup: steps before the first window.
        windows: number of windows.
        steps: steps of each window.
        now: the clock, in seconds.

    Example:
        >>> moments = iter([0.0, 0.5, 0.75])
        >>> clock = StepClock(warmup=10, windows=2, steps=100, now=lambda: next(moments))
        >>> for done in range(1, 300):
        ...     clock.tick(done)
        >>> clock.milliseconds()
        [5.0, 2.5]
    """

    def __init__(self, warmup: int, windows: int, steps: int, now: Callable[[], float] = time.perf_counter) -> None:
        self._boundaries = frozenset(range(warmup, warmup + windows * steps + 1, steps))
        self._steps = steps
        self._now = now
        self._moments: list[float] = []

    def tick(self, done: int) -> None:
        """Says that `done` steps of the training are over."""
        if done in self._boundaries:
            self._moments.append(self._now())

    def milliseconds(self) -> list[float]:
        """Milliseconds a step of each window.

        Raises:
            RuntimeError: if the training ended before the last window.
        """
        if len(self._moments) != len(self._boundaries):
            raise RuntimeError(
                f"{len(self._moments)} of {len(self._boundaries)} boundaries of windows were seen; expected all of "
                "them. Train for at least warmup + windows * steps steps and report every one of them."
            )
        pairs = zip(self._moments, self._moments[1:], strict=False)
        return [1000.0 * (after - before) / self._steps for before, after in pairs]


def result(clock: StepClock, loss: float, accuracy: float) -> dict:
    """What the process with rank 0 returns of a training.

    Args:
        clock: has seen the whole training.
        loss: mean loss of the training, a check that all frameworks train the same.
        accuracy: its mean accuracy.
    """
    cores = sorted(os.sched_getaffinity(0))
    return {"samples_ms": clock.milliseconds(), "loss": loss, "accuracy": accuracy, "cores": cores}


@dataclass(frozen=True)
class Summary:
    """Median and range of samples, in milliseconds.

    Its `drift` is the median of the later half of each training's windows over that of the earlier half: about 1 if the
    training had settled before it was measured.
    """

    median: float
    lowest: float
    highest: float
    drift: float

    @classmethod
    def of(cls, rounds: Sequence[Sequence[float]]) -> Summary:
        """Summary of all windows of all rounds.

        Example:
            >>> Summary.of([[4.0, 1.0], [2.0, 3.0]])
            Summary(median=2.5, lowest=1.0, highest=4.0, drift=0.875)
        """
        samples = [sample for windows in rounds for sample in windows]
        drifts = [_median_of(windows, later=True) / _median_of(windows, later=False) for windows in rounds]
        return cls(statistics.median(samples), min(samples), max(samples), statistics.median(drifts))


def _median_of(windows: Sequence[float], later: bool) -> float:
    # With an odd number both halves have the middle one.
    half = (len(windows) + 1) // 2
    return statistics.median(windows[-half:] if later else windows[:half])


def efficiency(one: Summary, two: Summary) -> float:
    """Weak scaling: time of one process over time of two, each with the same rows a process; 1 is ideal."""
    return one.median / two.median


def relative_time(own: Summary, reference: Summary) -> float:
    """How long a step takes in units of the reference; above 1 is slower."""
    return own.median / reference.median
