"""Which row of a plan to take, and why. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfdist.planning.prediction import Prediction

# Predictions are hardly better than that: of what is about as fast, the first row is taken, which is the simplest.
_ABOUT = 1.2


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """What to use.

    Attributes:
        best: the row; `None` if nothing fits.
        reason: in words.
    """

    best: Prediction | None
    reason: str


def recommend(rows: Sequence[Prediction], one: Prediction | None = None, how_to_start: bool = True) -> Recommendation:
    """The fastest row that fits and computes what one process does; of those that are about as fast, the first one.

    Args:
        rows: from simple to complicated.
        one: the row of one device; by default the first one.
        how_to_start: whether to say how the script is started.

    Raises:
        ValueError: if there are none.

    Example:
        >>> one = Prediction("one device", "", {}, "python train.py", 1, 2.0, 2.0, 0.0, 5.0, 8.0)
        >>> two = Prediction("Mirrored", "MirroredStrategy", {}, "python train.py", 2, 1.1, 1.0, 0.1, 5.0, 8.0)
        >>> recommend([one, two]).best.name
        'Mirrored'
    """
    if not rows:
        raise ValueError("Received: a plan without rows. Expected: at least one, for one device.")
    exact = [row for row in rows if row.is_exact]
    fitting = [row for row in exact if row.fits]
    if not fitting:
        least = min(exact, key=lambda row: row.memory / row.available)
        return Recommendation(
            None,
            f"Nothing fits. {least.name} needs the least: {least.memory / 1e9:.3g} GB of {least.available / 1e9:.3g} "
            "GB on a device. Take a smaller batch, more devices, or such with more memory.",
        )
    fastest = min(row.seconds for row in fitting)
    best = next(row for row in fitting if row.seconds <= _ABOUT * fastest)
    return Recommendation(best, " ".join(_reasons(best, rows, fitting, one or rows[0], how_to_start)))


def _reasons(
    best: Prediction, rows: Sequence[Prediction], fitting: Sequence[Prediction], one: Prediction, how_to_start: bool
) -> list[str]:
    how = f": {best.code}" if best.code else ""
    start = f", started by `{best.start}`" if how_to_start else ""
    gigabytes = f"{best.memory / 1e9:.3g} of {best.available / 1e9:.3g} GB"
    said = [f"Take {best.name}{how}{start}: {_time(best)} a step, {gigabytes} on a device."]
    if best is not one and one.fits and one.seconds < best.seconds:
        said.append(f"One process alone, with all that they share, would need {_time(one)}.")
    elif best is not one and one.fits:
        said.append(f"That is {one.seconds / best.seconds:.2f} times as fast as one device.")
    elif best is not one:
        said.append(f"One device would need {one.memory / 1e9:.3g} GB.")
    several = [row for row in fitting if row.devices > 1]
    if best.devices == 1 and several:
        other = min(several, key=lambda row: row.seconds)
        why = f": {100 * other.communication / other.seconds:.0f} % of that would be waiting for each other"
        said.append(
            f"More devices do not pay: {other.name} on {other.devices} would take {_time(other)}"
            + (why if other.communication > 0.2 * other.seconds else "")
            + "."
        )
    else:
        others = [row for row in fitting if row.devices == best.devices and row.strategy != best.strategy]
        if others:
            other = min(others, key=lambda row: row.seconds)
            said.append(f"The next best on as many devices is {other.name} with {_time(other)}.")
    faster = [row for row in rows if row.is_exact and not row.fits and row.seconds * _ABOUT < best.seconds]
    if faster:
        other = min(faster, key=lambda row: row.seconds)
        said.append(f"{other.name} would be faster ({_time(other)}), but needs {other.memory / 1e9:.3g} GB.")
    return said


def _time(row: Prediction) -> str:
    return f"{1e3 * row.seconds:.3g} ms"
