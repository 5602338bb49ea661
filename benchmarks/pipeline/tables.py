"""The results as Markdown. Pure functions of the records."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.markdown import spread, table
from benchmarks.pipeline.schedule_efficiency import SCHEDULES, chunks_of, ideal_speed_up
from benchmarks.pipeline.shapes import SHAPES

_TITLES = {"tfdist": "tfdist", "torch": "PyTorch"}


def schedules(records: Sequence[Mapping]) -> str:
    """A line for each number of devices and micro-batches: the schedules' speed-ups and shares of the ideal."""
    found = {(r["devices"], r["microbatches"], r["schedule"]): statistics.median(r["samples_ms"]) for r in records}
    lines = [[str(k), str(m), *_schedule_cells(found, k, m)] for k, m in dict.fromkeys(key[:2] for key in found)]
    header = ["K", "M", "1 device", "Ideal", *SCHEDULES[:2], "Ideal, interleaved", SCHEDULES[2]]
    return table(header, lines, left=0)


def compute(records: Sequence[Mapping]) -> str:
    """A table for each model, with a line for each framework and variant."""
    parts = []
    header = ["Framework", "M", "1 core, ms", "2 cores, ms", "Speed-up", "Ideal", "Computing a step, ms", "/ 1 core's"]
    for shape in dict.fromkeys(record["shape"] for record in records):
        of_shape = [record for record in records if record["shape"] == shape]
        one = {record["framework"]: record for record in of_shape if record["stages"] == 1}
        lines = [_compute_cells(r, one[r["framework"]]) for r in of_shape if r["stages"] > 1]
        parts.append(f"{SHAPES[shape].title}:\n\n{table(header, lines, left=1)}")
    return "\n\n".join(parts)


def memory(records: Sequence[Mapping]) -> str:
    """A line for each variant with the stages' peaks, in MB and in units of those of the first variant."""
    peaks = [[statistics.median(stage) for stage in zip(*r["peaks"], strict=True)] for r in records]
    header = ["Variant", *(f"Stage {i}, MB" for i in range(len(peaks[0]))), "/ the first line's"]
    lines = []
    for record, own in zip(records, peaks, strict=True):
        relative = ", ".join(f"{mine / first:.2f}" for mine, first in zip(own, peaks[0], strict=True))
        lines.append([record["variant"], *(f"{size / 1e6:.0f}" for size in own), relative])
    return table(header, lines, left=1)


def tracing(records: Sequence[Mapping]) -> str:
    """A line for each number of devices and micro-batches."""
    lines = [[str(r["devices"]), str(r["microbatches"]), spread(r["seconds"]), f"{r['nodes']:,}"] for r in records]
    return table(["K", "M", "First step, s", "Nodes"], lines, left=0)


def _schedule_cells(found: Mapping[tuple, float], devices: int, microbatches: int) -> Iterable[str]:
    one = found[devices, microbatches, "none"]
    yield f"{one / 1e3:.2f} s"
    for schedule in SCHEDULES:
        ideal = ideal_speed_up(devices, microbatches, chunks_of(schedule))
        if schedule in (SCHEDULES[0], "interleaved"):
            yield f"{ideal:.2f}"
        speed_up = one / found[devices, microbatches, schedule]
        yield f"{speed_up:.2f} ({speed_up / ideal:.1%})"


def _compute_cells(record: Mapping, one: Mapping) -> list[str]:
    microbatches = record["variant"]["microbatches"]
    options = [f', {name}="{value}"' for name, value in record["variant"].items() if name != "microbatches"]
    alone = statistics.median(one["samples_ms"])
    cpu = [statistics.median(each) for each in zip(*record["cpu_ms"], strict=True)]
    cpu_alone = statistics.median(each for (each,) in one["cpu_ms"])
    return [
        "".join([_TITLES[record["framework"]], *options]),
        str(microbatches),
        spread(one["samples_ms"], 1),
        spread(record["samples_ms"], 1),
        spread([alone / each for each in record["samples_ms"]]),
        f"{ideal_speed_up(record['stages'], microbatches):.2f}",
        f"{' + '.join(f'{each:.0f}' for each in cpu)}",
        f"{sum(cpu) / cpu_alone:.2f}",
    ]
