"""Trying to connect, at one place after the other, until a deadline."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5


class UnreachedError(Exception):
    """An attempt that failed; the text says why."""


def keep_trying(
    attempts: Mapping[str, Callable[[float], T]],
    deadline: float,
    problems: dict[str, str],
    waiting: Callable[[], object] = lambda: None,
) -> T:
    """Makes attempts in turn until one of them succeeds; each is made at least once.

    Args:
        attempts: By the place at which they are made. Each is given the seconds that are left, a tenth at least, and
            raises an `UnreachedError` or an OSError if it fails.
        deadline: Until when to try, on `time.monotonic`'s clock.
        problems: Is filled with why the last attempt at each place has failed.
        waiting: Is called after each round.

    Raises:
        UnreachedError: If none has succeeded.
    """
    pause = _FIRST_PAUSE
    while True:
        for place, attempt in attempts.items():
            if place in problems and time.monotonic() >= deadline:
                break
            try:
                return attempt(max(0.1, deadline - time.monotonic()))
            except (UnreachedError, OSError) as problem:
                problems[place] = str(problem)
        left = deadline - time.monotonic()
        if left <= 0:
            raise UnreachedError
        waiting()
        # A generator of its own: the program's random numbers stay those that it would get alone.
        time.sleep(min(pause * random.SystemRandom().uniform(0.5, 1.0), left))
        pause = min(2 * pause, _LONGEST_PAUSE)
