"""Draws schedules as text, as schedule.py and docs/pipeline.md show them."""

from __future__ import annotations

from tfdist.strategies.pipeline.schedule import Instruction, Schedule, idle_share, simulate


def draw(schedule: Schedule, width: int = 100) -> str:
    """A picture of a schedule: a row for each stage, a column for each instruction of the same length.

    `F` is a forward and `B` a backward, with the number of the micro-batch; a letter follows where a stage has several
    chunks. Rows that are too long continue below.

    Args:
        schedule: the schedule.
        width: number of characters that fit on a line.

    Example:
        >>> print(draw(make_schedule("gpipe", 2, 2)))
        gpipe: 2 stages, 2 micro-batches, 33% idle
        stage 0 |F0 F1       B0 B1
        stage 1 |   F0 F1 B0 B1
    """
    unit = [1.0] * schedule.chunks
    intervals = simulate(schedule, unit, unit)
    rows: list[dict[int, str]] = [{} for _ in range(schedule.devices)]
    for device, instruction, begin, _ in intervals:
        rows[device][round(begin)] = instruction.kind[0].upper() + label(instruction, schedule.devices, schedule.chunks)
    columns = round(max(interval.end for interval in intervals))
    size = max(len(text) for row in rows for text in row.values()) + 1
    heads = [f"stage {device} |" for device in range(schedule.devices)]
    head = max(map(len, heads))
    per_line = max(1, (width - head + 1) // size)
    lines = [_title(schedule, idle_share(intervals))]
    for first in range(0, columns, per_line):
        lines += [""] if first else []
        for name, row in zip(heads, rows, strict=True):
            cells = (row.get(column, "").ljust(size) for column in range(first, min(first + per_line, columns)))
            lines.append((name.rjust(head) + "".join(cells)).rstrip())
    return "\n".join(lines)


def label(instruction: Instruction, devices: int, chunks: int) -> str:
    """The number of the micro-batch, with a letter for which of its device's chunks it is if there are several."""
    letter = chr(ord("a") + instruction.chunk // devices) if chunks > devices else ""
    return f"{instruction.microbatch}{letter}"


def _title(schedule: Schedule, idle: float) -> str:
    stages = f"{schedule.devices} stage{'s' if schedule.devices > 1 else ''}"
    if schedule.chunks_per_device > 1:
        stages += f" of {schedule.chunks_per_device} chunks"
    microbatches = f"{schedule.microbatches} micro-batch{'es' if schedule.microbatches > 1 else ''}"
    return f"{schedule.name}: {stages}, {microbatches}, {idle:.0%} idle"
