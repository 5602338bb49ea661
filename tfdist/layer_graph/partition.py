"""Partition of a sequence of calls into consecutive parts that cost about the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np


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
        costs: cost of each call, 0 or more.
        parts: number of parts, 1 or more.
        crossing: cost of a cut before each call, as long as `costs`; the first is not used. Empty: cuts are free.
        forbidden: positions at which not to cut.

    Returns:
        The position of the first call of each part but the first.

    Raises:
        ValueError: if there are fewer places to cut than cuts.

    Example:
        >>> balance([4, 1, 1, 1, 1], 2)
        (1,)
        >>> balance([1, 1, 1, 1], 2, crossing=[0, 1, 5, 1])
        (3,)
    """
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
    bounds = [0, *gaps, len(costs)]
    sums = np.array([0.0, *accumulate(costs)])[bounds]
    # By the numbers of the bounds at which it begins and ends: what a part costs. No part ends before it has begun.
    loads = sums - sums[:, None]
    if crossing:
        loads[1:-1] += np.array(crossing)[gaps, None]
    loads[np.tri(len(bounds), dtype=bool)] = np.inf
    limit, _ = _best(loads, parts, np.maximum)
    # Rounding here differs by the order of additions.
    even = np.where(loads <= limit * (1 + 1e-12), loads**2, np.inf)
    return tuple(bounds[i] for i in _best(even, parts, np.add)[1])


def _best(loads: np.ndarray, parts: int, combined: Callable[..., np.ndarray]) -> tuple[float, list[int]]:
    """The partition whose loads combine to the least: that number, and the bounds at which its parts begin."""
    least, began = loads[0], []
    for _ in range(parts - 1):
        # For each end of one more part, and each bound at which it may begin.
        found = combined(least, loads.T)
        began.append(found.argmin(1))
        least = found.min(1)
    cuts, bound = [], len(loads) - 1
    for begins in reversed(began):
        bound = int(begins[bound])
        cuts.append(bound)
    return float(least[-1]), cuts[::-1]


def _gaps(costs: Sequence[float], crossing: Sequence[float], forbidden: Collection[int]) -> list[int]:
    """For each two neighbours among the calls that cost something, the cheapest position to cut between them."""
    gaps = []
    costly = [position for position, cost in enumerate(costs) if cost > 0]
    for before, after in pairwise(costly):
        if allowed := [position for position in range(before + 1, after + 1) if position not in forbidden]:
            # What costs nothing goes with the call that made its input, unless that sends more.
            gaps.append(min(allowed, key=lambda p: (crossing[p] if crossing else 0.0, -p)))
    return gaps
