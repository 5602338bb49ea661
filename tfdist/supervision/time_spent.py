"""What the time of the fits of this process goes into: `tfdist goodput` adds it up."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator

# From the call of `fit` to its first step: callbacks begin, a backup is read, the first batch is made.
PREPARING = "preparing"
# The first execution of the training function, in which it is traced and compiled.
FIRST_STEP = "first_step"
# All others, with what callbacks do between them.
STEPS = "steps"
# The part of these in which the process has waited for data.
WAITING = "waiting_for_data"
# `tfdist.callbacks.BackupAndRestore` holds the training up.
SAVING = "saving"
VALIDATION = "validation"
# Other callbacks at the end of an epoch, and at the beginning of the next one.
BETWEEN = "between_epochs"
KINDS = (PREPARING, FIRST_STEP, STEPS, SAVING, VALIDATION, BETWEEN)


class TimeSpent:
    """Adds up what the time goes into. At each moment that is one kind, or, outside of fits, none.

    Args:
        clock: tells the time, in seconds.

    Attributes:
        fits: how many fits have begun.
        waited: seconds of `STEPS` in which the process has waited for data.

    Example:
        >>> now = iter([0.0, 2.0, 3.0, 3.5, 5.0, 5.0])
        >>> spent = TimeSpent(lambda: next(now))
        >>> spent.fit_begins()
        >>> spent.goes_into(STEPS)
        'preparing'
        >>> with spent.during(SAVING):
        ...     pass
        >>> spent.goes_into(None)
        'steps'
        >>> {kind: seconds for kind, seconds in spent.read().items() if seconds}
        {'preparing': 2.0, 'steps': 2.5, 'saving': 0.5}
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.fits = 0
        self.waited = 0.0
        self._clock = clock
        self._totals = dict.fromkeys(KINDS, 0.0)
        self._kind: str | None = None
        self._since = 0.0
        # Keras calls some callbacks in threads of its own.
        self._lock = threading.RLock()

    def fit_begins(self) -> None:
        """Says that a fit begins."""
        self.fits += 1
        self.goes_into(PREPARING)

    def goes_into(self, kind: str | None) -> str | None:
        """Says what the time goes into from now on (None: nothing of a fit); returns what it went into before."""
        with self._lock:
            now, before = self._clock(), self._kind
            if before is not None:
                self._totals[before] += now - self._since
            self._since, self._kind = now, kind
            return before

    @contextlib.contextmanager
    def during(self, kind: str) -> Iterator[None]:
        """Within it, the time goes into this kind."""
        before = self.goes_into(kind)
        try:
            yield
        finally:
            self.goes_into(before)

    def read(self) -> dict[str, float]:
        """The seconds of each kind so far."""
        with self._lock:
            self.goes_into(self._kind)
            return {kind: round(seconds, 3) for kind, seconds in {**self._totals, WAITING: self.waited}.items()}


@functools.cache
def time_spent() -> TimeSpent:
    """The sums of this process."""
    return TimeSpent()
