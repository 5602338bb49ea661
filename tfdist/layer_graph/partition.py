"""Partition of a sequence of calls into consecutive parts that cost about the same."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple


class Cost(NamedTuple):
    """What one call costs for a given number of rows.

    Attributes:
        flops: floating-point operations of the forward computation.
        parameter_bytes: size of the variables that the call is the first to use.
        output_bytes: size of what it returns.
        seconds: measured time of the forward computation; 0 where it was not measured.
        frozen_bytes: the part of `parameter_bytes` that is not trained.

    Example:
        >>> Cost(flops=2e6, parameter_bytes=4000, output_bytes=128).seconds
        0.0
    """

    flops: float
    parameter_bytes: float
    output_bytes: float
    seconds: float = 0.0
    frozen_bytes: float = 0.0


def balance(
    costs: Sequence[float], parts: int, crossing: Sequence[float] = (), forbidden: Collection[int] = ()
) -> tuple[int, ...]:
    """Where to cut calls into parts, so that the most expensive part is as cheap as possible.

    A part costs what its calls cost, and what crosses the cut at its beginning. Among partitions with the same most
    expensive part, the one with the smallest sum of squares is taken: the one whose other parts are the most even.
    Every part gets a call that costs something, unless too few calls do.

    Args:
        costs: cost of each call.
        parts: number of parts.
        crossing: cost of a cut before each call, as long as `costs`; the first is not used. Empty: cuts are free.
        forbidden: positions at which not to cut.

    Returns:
        The position of the first call of each part but the first.

    Raises:
        ValueError: if there are fewer places to cut than cuts, a cost is negative or not finite, or lengths differ.

    Example:
        >>> balance([4, 1, 1, 1, 1], 2)
        (1,)
        >>> balance([1, 1, 1, 1], 2, crossing=[0, 1, 5, 1])
        (3,)
    """
    _check(costs, parts, crossing)
    gaps = _gaps(costs, crossing, forbidden)
    if len(gaps) < parts - 1:
        # Too few calls cost something to give every part one.
        gaps = [position for position in range(1, len(costs)) if position not in forbidden]
    if len(gaps) < parts - 1:
        barred = f" and {len(set(forbidden) & set(range(1, len(costs))))} forbidden cuts" if forbidden else ""
        raise ValueError(
            f"The model has too few layers to cut. Received: {len(costs)} layers{barred}, {parts} stages. "
            f"Expected: at least as many layers as stages, with a place to cut between them (here, at most "
            f"{len(gaps) + 1} stages). Use fewer devices or fewer chunks per device, or nest fewer layers in one layer."
        )
    sums = [0.0, *accumulate(costs)]
    ends = [sums[gap] for gap in gaps] + [sums[-1]]
    # What a part that begins at a gap costs is the sum at its end plus this.
    begins = [0.0] + [(crossing[gap] if crossing else 0.0) - sums[gap] for gap in gaps]
    chosen = _most_even(ends, begins, parts, _smallest_limit(ends, begins, parts))
    return tuple(gaps[i] for i in chosen)


def shares(costs: Sequence[float], cuts: Sequence[int]) -> list[float]:
    """The share of each part in the sum of costs, from 0 to 1.

    Example:
        >>> shares([3, 1, 4], (2,))
        [0.5, 0.5]
    """
    total = sum(costs)
    bounds = [0, *cuts, len(costs)]
    sums = [sum(costs[begin:end]) for begin, end in pairwise(bounds)]
    return [value / total if total else 1 / len(sums) for value in sums]


def _check(costs: Sequence[float], parts: int, crossing: Sequence[float]) -> None:
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
        raise ValueError(f"parts is {parts!r}, but must be a whole number of at least 1: pass 1 or more.")
    if crossing and len(crossing) != len(costs):
        raise ValueError(
            f"crossing has {len(crossing)} values, but there are {len(costs)} costs: give one value per call, or none."
        )
    for name, values in (("costs", costs), ("crossing", crossing)):
        for position, value in enumerate(values):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}[{position}] is {value!r}, but must be a finite number of at least 0.")


def _gaps(costs: Sequence[float], crossing: Sequence[float], forbidden: Collection[int]) -> list[int]:
    """For each two neighbours among the calls that cost something, the cheapest position to cut between them."""
    gaps = []
    costly = [position for position, cost in enumerate(costs) if cost > 0]
    for before, after in pairwise(costly):
        allowed = [position for position in range(before + 1, after + 1) if position not in forbidden]
        if allowed:
            # What costs nothing goes with the call that made its input, unless that sends more.
            gaps.append(min(allowed, key=lambda p: (crossing[p] if crossing else 0.0, -p)))
    return gaps


def _smallest_limit(ends: Sequence[float], begins: Sequence[float], parts: int) -> float:
    """The smallest cost of the most expensive part, by bisection on whether a limit can be kept."""
    low, high = 0.0, max(ends[-1], 1.0)
    while not _fits(ends, begins, parts, high):
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if _fits(ends, begins, parts, middle) else (middle, high)
    return high


def _fits(ends: Sequence[float], begins: Sequence[float], parts: int, limit: float) -> bool:
    """Whether there is a partition in which no part costs more than a limit."""
    reached = [True] + [False] * (len(ends) - 1)
    for part in range(parts):
        following = [False] * (len(ends) + 1)
        longest = -math.inf  # how far a part may go that begins at one of the gaps so far
        for i in range(part, len(ends)):
            if reached[i]:
                longest = max(longest, limit - begins[i])
            following[i + 1] = ends[i] <= longest
        reached = following
    return reached[-1]


def _most_even(ends: Sequence[float], begins: Sequence[float], parts: int, limit: float) -> list[int]:
    """The partition within a limit that has the smallest sum of squares, as indices of gaps."""
    gaps = len(ends) - 1
    # Rounding in the bisection and here differ by the order of additions.
    limit += abs(limit) * 1e-12
    best: list[float] = [(end + begins[0]) ** 2 if end + begins[0] <= limit else math.inf for end in ends]
    came_from: list[list[int]] = []
    for part in range(1, parts):
        sums, choices = [math.inf] * (gaps + 1), [-1] * (gaps + 1)
        least_before = list(accumulate(best, min))
        for i in range(part, gaps + 1) if part < parts - 1 else (gaps,):
            end, least = ends[i], math.inf
            # From short parts to long ones: once a part is too long, all that follow are.
            for j in range(i, part - 1, -1):
                length = end - ends[j - 1]
                if length > limit or least_before[j - 1] + length * length >= least:
                    break
                load = end + begins[j]
                if load <= limit and (total := best[j - 1] + load * load) < least:
                    least, choices[i] = total, j - 1
            sums[i] = least
        best = sums
        came_from.append(choices)
    position, chosen = gaps, []
    for choices in reversed(came_from):
        position = choices[position]
        chosen.append(position)
    return chosen[::-1]
