"""The results as Markdown. Pure functions of the records."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.checkpointing.recovery import FAILURES, SAVE_EVERY
from benchmarks.checkpointing.recovery_trial import HANG_TIMEOUT, LAUNCHERS
from benchmarks.checkpointing.saving import INTERVALS, MODES, Sample, Saving, ratios
from benchmarks.checkpointing.training import BATCH, MODEL, state_bytes
from benchmarks.data_parallel.models import count_parameters
from benchmarks.markdown import spread, table

_MISSING = "failed"


def overhead(records: Sequence[Sequence]) -> str:
    """One line for each kind of saving, one column for each interval."""
    samples = [Sample(saving and Saving(*saving), times, written) for saving, times, written in records]
    found = ratios(samples)
    written = {sample.saving: sample.written for sample in samples}
    lines = []
    for mode, title in MODES.items():
        share = written.get(Saving(mode, 1))
        ranges = [found.get(Saving(mode, interval)) for interval in INTERVALS]
        cells = [spread(values) if values else _MISSING for values in ranges]
        lines.append([title, *cells, "" if share is None else f"{share:.0%}"])
    header = ["every step" if interval == 1 else f"every {interval} steps" for interval in INTERVALS]
    without = spread([time for sample in samples if sample.saving is None for time in sample.milliseconds], 1)
    parameters = count_parameters(MODEL)
    return (
        f"{table(['Backup', *header, 'Written at every step'], lines, left=1)}\n\n"
        f"Without backups a step takes {without} ms: {MODEL.title} with {parameters:,} parameters, "
        f"{state_bytes(parameters) / 1e6:.1f} MB with Adam's slots, global batch {BATCH}."
    )


def recovery(records: Sequence[Mapping]) -> str:
    """One line for each failure, one column for each launcher."""
    names = [name for name in LAUNCHERS if any(record["launcher"] == name for record in records)]
    lines = []
    for title in (failure.title for failure in FAILURES):
        of_failure = [record for record in records if record["failure"] == title]
        lines.append([title, *(_recovery([one for one in of_failure if one["launcher"] == name]) for name in names)])
    text = f"A backup every {SAVE_EVERY} steps; {HANG_TIMEOUT} s until a process counts as hung."
    return f"{table(['Failure', *(LAUNCHERS[name].title for name in names)], lines, left=1)}\n\n{text}"


def _recovery(found: Sequence[Mapping]) -> str:
    if not found:
        return _MISSING
    redone = statistics.median(each["redone"] for each in found)
    median, _, rest = spread([each["seconds"] for each in found], 1).partition(" ")
    return f"{median} s {rest}, {redone:g} step{'' if redone == 1 else 's'}"
