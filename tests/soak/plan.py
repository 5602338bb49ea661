"""Which faults strike a soak, and when: drawn from a seed, so that a run can be repeated."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

# How often each is drawn, in relation to the others.
WEIGHTS = {
    "kill-worker": 4,
    "kill-chief": 4,
    "kill-both": 3,
    "kill-launcher": 3,
    "stop-worker": 2,
    "stop-chief": 2,
    "hang-worker": 2,
    "preempt": 3,
    "preempt-worker": 1,
    "preempt-chief": 1,
    "corrupt": 2,
    "truncate": 2,
    "disk-full": 2,
}
# These can strike whatever the processes are doing; the others need a training.
AT_ANY_TIME = ("kill-worker", "kill-chief", "kill-both", "kill-launcher", "preempt")
_EARLY = 0.15
_SHORTEST, _LONGEST = 0.2, 4.0


@dataclass(frozen=True)
class Strike:
    """A fault.

    Attributes:
        kind: a key of `WEIGHTS`.
        wait: seconds until it strikes.
        early: whether these count from the fault before, and not from when the training goes on.
        synchronous: whether a launcher that is started after it writes backups before the next step.
    """

    kind: str
    wait: float
    early: bool
    synchronous: bool

    def __str__(self) -> str:
        since = "the fault before" if self.early else "training"
        return f"{self.kind}, {self.wait} s after {since}"


def strikes(seed: int, can_fill: bool = True) -> Iterator[Strike]:
    """All faults of a seed, without end.

    Args:
        seed: of all that is random.
        can_fill: whether there is a disk that can be full; without one, that fault is left out.

    Example:
        >>> first, second = strikes(1), strikes(1)
        >>> next(first) == next(second)
        True
    """
    chance = random.Random(seed)
    while True:
        (kind,) = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))
        early = chance.random() < _EARLY
        wait = round(chance.uniform(_SHORTEST, _LONGEST), 2)
        synchronous = chance.random() < 0.5
        if kind == "disk-full" and not can_fill:
            continue
        yield Strike(kind, wait, early and kind in AT_ANY_TIME, synchronous)
