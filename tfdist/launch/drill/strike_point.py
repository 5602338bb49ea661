"""When the faults strike, worked out from an undisturbed run. Pure functions only."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tfdist.supervision.event_stream import Event, of_kind

# A backup to fall back on, one that is disturbed, and one after that.
FEWEST_SAVES = 3

_PART_OF_TRAINING = 0.4
_HANG_FACTOR = 3.0
_SHORTEST_HANG = 8.0
_LONGEST_HANG = 30.0


@dataclass(frozen=True)
class Rhythm:
    """How an undisturbed run saves.

    Attributes:
        saves: how many backups there were before the last step.
        steps: the last step.
        pause: seconds between two backups, usually.
        longest_pause: seconds between two backups at most.
    """

    saves: int
    steps: int
    pause: float
    longest_pause: float

    def strike_after(self, saves_before: int, saves_left: int) -> int:
        """The number of the backup after which to strike: in the middle of the training, rather early.

        Args:
            saves_before: how many backups a fault needs before it strikes.
            saves_left: how many it needs afterwards.

        Example:
            >>> Rhythm(saves=10, steps=100, pause=1.0, longest_pause=1.0).strike_after(1, 0)
            4
        """
        wanted = max(math.ceil(_PART_OF_TRAINING * self.saves), saves_before)
        return max(min(wanted, self.saves - saves_left), 1)

    @property
    def hang_timeout(self) -> float | None:
        """Seconds after which this script hangs for certain; None: as long as `tfdist run` waits without being told.

        Whatever a process does, it has done it between two backups, and reported several times meanwhile.
        """
        seconds = max(_HANG_FACTOR * self.longest_pause, _SHORTEST_HANG)
        return round(seconds, 1) if seconds < _LONGEST_HANG else None


def rhythm(events: Sequence[Event]) -> Rhythm:
    """How the run with these events has saved.

    Example:
        >>> rhythm([{"event": "saved", "step": step, "time": float(step)} for step in (10, 20, 30, 30)])
        Rhythm(saves=2, steps=30, pause=10.0, longest_pause=10.0)
    """
    saved = of_kind(events, "saved")
    steps = saved[-1]["step"] if saved else 0
    # The last step is saved twice, and a fault that strikes then might come too late.
    times = [event["time"] for event in saved]
    while saved and saved[-1]["step"] == steps:
        saved.pop()
    pauses = [later - earlier for earlier, later in itertools.pairwise(times[: len(saved) + 1])]
    return Rhythm(len(saved), steps, statistics.median(pauses) if pauses else 0.0, max(pauses, default=0.0))
