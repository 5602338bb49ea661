"""How a step gets faster with more devices, and where that stops. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tfdist.planning.prediction import Prediction

# Twice as many devices should make a step at least that much faster to be worth it.
_WORTH = 1.5


@dataclasses.dataclass(frozen=True)
class Scaling:
    """The best row for each number of devices, and one device.

    Attributes:
        one: one device; it may not fit.
        best: by number of devices, from few to many; `None` where nothing fits.
    """

    one: Prediction
    best: dict[int, Prediction | None]

    @property
    def pays_up_to(self) -> int:
        """The largest number of devices that still pays: twice as many make a step at least 1.5 times as fast.

        Example:
            >>> seconds = {2: 1.0, 4: 0.6, 8: 0.5}
            >>> rows = {n: Prediction("", "", {}, "", n, t, t, 0.0, 1.0, 2.0) for n, t in seconds.items()}
            >>> Scaling(rows[2], rows).pays_up_to
            4
        """
        found = 1
        previous = (1, self.one.seconds) if self.one.fits else None
        for count, row in self.best.items():
            if row is None:
                continue
            if previous is not None and _per_doubling(previous, (count, row.seconds)) < _WORTH:
                break
            found, previous = count, (count, row.seconds)
        return found


def scaling(predicted: Sequence[Prediction], devices: Sequence[int]) -> Scaling:
    """The best exact strategy for each number of devices; the global batch is the same.

    Args:
        predicted: rows of a plan for these numbers.
        devices: numbers of devices.
    """
    one, *_ = predicted
    best: dict[int, Prediction | None] = {}
    for count in sorted(set(devices)):
        rows = [row for row in predicted if row.is_exact and row.devices == count and row.fits]
        best[count] = min(rows, key=lambda row: row.seconds, default=None)
    return Scaling(one, best)


def doublings(first: int, last: int) -> list[int]:
    """Numbers of devices from the first to the last one, each twice the one before.

    Example:
        >>> doublings(8, 40)
        [8, 16, 32, 40]
    """
    found = [first]
    while found[-1] * 2 < last:
        found.append(found[-1] * 2)
    return found if last <= first else [*found, last]


def _per_doubling(before: tuple[int, float], after: tuple[int, float]) -> float:
    (few, slow), (many, fast) = before, after
    if many <= few:
        return _WORTH
    return (slow / fast) ** (1 / math.log2(many / few))
