"""Tables and their cells as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence


def table(header: Sequence[str], lines: Iterable[Sequence[str]], left: int) -> str:
    """A table whose columns but the first `left` ones are aligned to the right.

    Example:
        >>> print(table(["Name", "ms"], [["a", "1.5"]], left=1))
        | Name | ms |
        | --- | --: |
        | a | 1.5 |
    """
    rule = ["---" if i < left else "--:" for i in range(len(header))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *lines))


def spread(values: Sequence[float], decimals: int = 2) -> str:
    """Median, lowest and highest of samples.

    Example:
        >>> spread([3.0, 1.0, 2.0], decimals=1)
        '2.0 (1.0-3.0)'
    """
    median, lowest, highest = (f"{f(values):.{decimals}f}" for f in (statistics.median, min, max))
    return f"{median} ({lowest}-{highest})"
