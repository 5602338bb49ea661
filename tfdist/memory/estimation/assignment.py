"""Which of several things is done with each block, so that a step fits into a limit at the least added time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

# What is kept is counted in so many parts of the limit.
_PARTS = 1024


class Option(NamedTuple):
    """What may be done with a block.

    Attributes:
        mode: its name.
        kept: bytes that stay on the device from the block's forward to its backward pass.
        needed: bytes that the block needs in its backward pass, `kept` included.
        seconds: what it adds to a step.
    """

    mode: str
    kept: float
    needed: float
    seconds: float


def assign(blocks: Sequence[Sequence[Option]], limit: float) -> list[Option] | None:
    """The options that add the least time, of those with which the step fits into the limit.

    The backward pass goes from the last block to the first one: when a block goes back, the blocks before it keep what
    they keep, and it needs what it needs; those after it have given everything back.

        kept by block 0 | kept by block 1 | needed by block 2 |        <= limit, for every block

    This is a knapsack with a capacity for each block, and is solved by dynamic programming over what is kept so far.

    Args:
        blocks: the options of each block, in the order of the forward pass.
        limit: in bytes.

    Returns:
        An option for each block; `None` if nothing fits.

    Example:
        >>> blocks = [[Option("none", 8, 8, 0.0), Option("recompute", 1, 8, 1.0)]] * 2
        >>> [option.mode for option in assign(blocks, 16)], [option.mode for option in assign(blocks, 10)]
        (['none', 'none'], ['recompute', 'none'])
    """
    if limit <= 0:
        return None
    # By what is kept, in parts of the limit: the least time, and how to get there.
    best: dict[int, tuple[float, list[Option]]] = {0: (0.0, [])}
    for options in blocks:
        following: dict[int, tuple[float, list[Option]]] = {}
        for parts, (seconds, chosen) in best.items():
            for option in options:
                if parts * limit / _PARTS + option.needed > limit:
                    continue
                now = parts + math.ceil(option.kept / limit * _PARTS)
                if now not in following or seconds + option.seconds < following[now][0]:
                    following[now] = seconds + option.seconds, [*chosen, option]
        best = following
    return min(best.values(), key=lambda found: found[0])[1] if best else None


def peak(options: Sequence[Option]) -> float:
    """Bytes at the peak of the backward pass, if these are taken.

    Example:
        >>> peak([Option("recompute", 1, 8, 1.0), Option("none", 8, 8, 0.0)])
        9.0
    """
    kept, found = 0.0, 0.0
    for option in options:
        found = max(found, kept + option.needed)
        kept += option.kept
    return found
