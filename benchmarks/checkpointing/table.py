"""The results as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.checkpointing.launchers import LAUNCHERS
from benchmarks.checkpointing.recovery import FAILURES, Failure, Recovery
from benchmarks.checkpointing.saving import INTERVALS, MODES, Sample, Saving, ratios
from benchmarks.data_parallel.measure import Summary

_MISSING = "failed"

Recoveries = Mapping[str, Sequence[tuple[Failure, Recovery]]]


def overhead_table(samples: Sequence[Sample]) -> str:
    """One line for each kind of saving, one column for each interval."""
    found = ratios(samples)
    written = {sample.saving: sample.written for sample in samples}
    lines = [
        _line(["Backup", *(_every(interval) for interval in INTERVALS), "Written at every step"]),
        _line(["---", *("--:" for _ in INTERVALS), "--:"]),
    ]
    for mode, title in MODES.items():
        share = written.get(Saving(mode, 1))
        cells = [_range(found.get(Saving(mode, interval))) for interval in INTERVALS]
        lines.append(_line([title, *cells, "" if share is None else f"{share:.0%}"]))
    without = Summary.of([sample.milliseconds for sample in samples if sample.saving is None])
    text = f"Without backups a step takes {without.median:.1f} ms ({without.lowest:.1f}-{without.highest:.1f})."
    return "\n".join([*lines, "", text])


def recovery_table(recoveries: Recoveries) -> str:
    """One line for each failure, one column for each launcher; an empty list stands for a run that failed.

    Args:
        recoveries: by key of `LAUNCHERS`.
    """
    lines = [
        _line(["Failure", *(LAUNCHERS[name].title for name in recoveries)]),
        _line(["---", *("--:" for _ in recoveries)]),
    ]
    for failure in FAILURES:
        of_failure = [[found for each, found in runs if each == failure] for runs in recoveries.values()]
        lines.append(_line([failure.title, *map(_recovery, of_failure)]))
    return "\n".join(lines)


def _every(interval: int) -> str:
    return "every step" if interval == 1 else f"every {interval} steps"


def _range(values: Sequence[float] | None, decimals: int = 2, unit: str = "") -> str:
    if not values:
        return _MISSING
    median, lowest, highest = (f"{f(values):.{decimals}f}" for f in (statistics.median, min, max))
    return f"{median}{unit} ({lowest}-{highest})"


def _recovery(found: Sequence[Recovery]) -> str:
    if not found:
        return _MISSING
    redone = statistics.median(each.redone for each in found)
    return f"{_range([each.seconds for each in found], 1, ' s')}, {redone:g} step{'' if redone == 1 else 's'}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
