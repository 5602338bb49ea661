"""The table of faults as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks import markdown
from benchmarks.faults.rows import PLAIN, ROWS, RUN

HEADER = ["Fault", "Started by", "Detected after", "Training again after", "Steps redone", "State at the end"]
_STARTERS = {RUN: "`tfdist run`", PLAIN: "a scheduler"}
# A fault that a job cannot have, and why.
NOT_THERE = {
    ("kill-launcher", PLAIN): "not possible: there is no launcher",
    ("kill-server", PLAIN): "not tried",
    ("kill-sharded", PLAIN): "not tried",
    ("kill-local-steps", PLAIN): "not tried",
    ("shrink", PLAIN): "not possible: there is no launcher",
    ("grow", PLAIN): "not possible: there is no launcher",
    ("cut-start", RUN): "not possible: all processes are on one machine",
    ("cut", RUN): "not possible: all processes are on one machine",
    ("port", RUN): "not possible: the launcher takes free ports",
}


def table(records: Sequence[Mapping]) -> str:
    """All faults of the table, under both who start the processes.

    Args:
        records: what `Machine.measure` returns.
    """
    found = {(record["name"], record["under"]): record for record in records}
    lines = []
    for row in ROWS:
        for under in (RUN, PLAIN):
            cells = [row.title, _STARTERS[under]]
            record = found.get((row.name, under))
            if record is None:
                lines.append([*cells, "", "", "", NOT_THERE.get((row.name, under), "not measured")])
                continue
            times = [_median(record["detected"], " s", 1), _median(record["again"], " s", 1)]
            lines.append([*cells, *times, _median(record["redone"], "", 0), record["result"]])
    return markdown.table(HEADER, lines, left=2)


def _median(values: Sequence[float | None], unit: str, decimals: int) -> str:
    """The median, with the lowest and the highest of several.

    Example:
        >>> _median([1.25], " s", 1), _median([1.0, 3.0, 2.0], " s", 1), _median([None], " s", 1)
        ('1.2 s', '2.0 s (1.0-3.0)', '-')
    """
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    text = f"{statistics.median(known):.{decimals}f}{unit}"
    return f"{text} ({min(known):.{decimals}f}-{max(known):.{decimals}f})" if len(known) > 1 else text
