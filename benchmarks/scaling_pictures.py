"""Draws from the benchmarks' results how speed grows with stages and processes.

    python -m benchmarks.scaling_pictures

It measures nothing, but reads benchmarks/pipeline/results.json and the tables of benchmarks/data_parallel/README.md.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.pipeline.schedule_efficiency import SCHEDULES, chunks_of, ideal_speed_up
from tools.performance_tables import table_below

_HERE = Path(__file__).parent
PICTURES = _HERE.parent / "docs" / "pictures"
# By the line of the table: its variants are measured for other questions.
_FRAMEWORKS = ("tfdist", "tfdist, --transport horovod", "tf_keras, tf.distribute", "PyTorch DDP (gloo)")
_CELL = re.compile(r"(?P<median>[\d.]+) \((?P<lowest>[\d.]+)-(?P<highest>[\d.]+)\)")
_WIDTH, _HEIGHT = 3.6, 3.6
_SHIFT = 0.03


class Point(NamedTuple):
    """The speed-up with so many devices: the median, and what the slowest and the fastest sample give."""

    count: int
    median: float
    lowest: float
    highest: float


class Curve(NamedTuple):
    """Points to be joined; measured ones are marked, and ideal ones are a line."""

    name: str
    points: list[Point]
    measured: bool = True


class Picture(NamedTuple):
    """Panels beside each other, by their titles."""

    panels: dict[str, list[Curve]]
    count: str
    speed_up: str


def of_pipelines(records: Sequence[Mapping]) -> Picture:
    """A panel for each number of micro-batches, a curve for each schedule, over the number of stages.

    Args:
        records: of the part "schedules" in benchmarks/pipeline/results.json.
    """
    samples = {(r["devices"], r["microbatches"], r["schedule"]): r["samples_ms"] for r in records}
    panels = {}
    for microbatches in sorted({key[1] for key in samples}):
        counts = sorted({devices for devices, of, _ in samples if of == microbatches})
        curves = [
            Curve(name, [_ideal(count, microbatches, schedule) for count in [1, *counts]], measured=False)
            for name, schedule in {"ideal of gpipe and 1f1b": "gpipe", "ideal of interleaved": "interleaved"}.items()
        ]
        for schedule in SCHEDULES:
            points = [
                _point(count, samples[count, microbatches, "none"], samples[count, microbatches, schedule])
                for count in counts
            ]
            curves.append(Curve(schedule, points))
        panels[f"{microbatches} micro-batches"] = curves
    return Picture(panels, "stages, a device each", "speed-up over one device")


def of_data_parallelism(page: str) -> Picture:
    """A panel for each model, a curve for each framework: 1 process, and 2 with as many rows each.

    Args:
        page: text of benchmarks/data_parallel/README.md.
    """
    panels = {}
    for model in ("CNN", "MLP"):
        rows = [line.strip("| ").split(" | ") for line in table_below(page, f"{model}, ").splitlines()[2:]]
        curves = []
        for name, one, two, *_ in rows:
            if name in _FRAMEWORKS and (alone := _CELL.match(one)) and (both := _CELL.match(two)):
                slow_to_fast = [float(both[which]) for which in ("median", "highest", "lowest")]
                points = [2 * float(alone["median"]) / each for each in slow_to_fast]
                curves.append(Curve(name, [Point(1, 1.0, 1.0, 1.0), Point(2, *points)]))
        panels[model] = curves
    return Picture(panels, "processes, a core each", "rows a second, over one process")


def save(path: Path, picture: Picture) -> None:
    """Draws a picture; what is drawn stands in the file as its description, so that a test can compare it.

    Args:
        path: an SVG file to write.
        picture: what is drawn.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    panels = picture.panels
    figure = Figure(figsize=(_WIDTH * len(panels), _HEIGHT), layout="constrained")
    every = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, curves) in zip(every, panels.items(), strict=True):
        counts = sorted({point.count for curve in curves for point in curve.points})
        axes.plot(counts, counts, color="0.75", linestyle="--", label="linear")
        _draw_ideal(axes, [curve for curve in curves if not curve.measured])
        _draw_measured(axes, [curve for curve in curves if curve.measured])
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(picture.count)
    every[0].set_ylabel(picture.speed_up)
    handles, labels = every[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    with rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(path, metadata={"Description": json.dumps(picture.panels), "Date": None})


def pictures() -> dict[str, Picture]:
    """All pictures, by the names of their files in docs/pictures."""
    records = json.loads((_HERE / "pipeline" / "results.json").read_text())["schedules"]["records"]
    return {
        "scaling_pipeline.svg": of_pipelines(records),
        "scaling_data_parallel.svg": of_data_parallelism((_HERE / "data_parallel" / "README.md").read_text()),
    }


def _draw_ideal(axes: Any, curves: Sequence[Curve]) -> None:
    for number, curve in enumerate(curves):
        x, y, *_ = zip(*curve.points, strict=True)
        axes.plot(x, y, color=f"{0.6 - 0.3 * number:.1f}", linestyle=":", label=curve.name)


def _draw_measured(axes: Any, curves: Sequence[Curve]) -> None:
    for number, curve in enumerate(curves):
        # A little beside each other: of equal ones only the last would be seen. On the scale of the axis.
        shift = 1 + _SHIFT * (number - (len(curves) - 1) / 2)
        x = [point.count * (shift if point.count > 1 else 1) for point in curve.points]
        errors = [[p.median - p.lowest for p in curve.points], [p.highest - p.median for p in curve.points]]
        y = [point.median for point in curve.points]
        axes.errorbar(x, y, errors, marker="o", markersize=4, capsize=2, label=curve.name)


def _point(count: int, alone: Sequence[float], together: Sequence[float]) -> Point:
    one = statistics.median(alone)
    return Point(count, *(one / of(together) for of in (statistics.median, max, min)))


def _ideal(count: int, microbatches: int, schedule: str) -> Point:
    value = ideal_speed_up(count, microbatches, chunks_of(schedule))
    return Point(count, value, value, value)


if __name__ == "__main__":
    for name, picture in pictures().items():
        save(PICTURES / name, picture)
        print(PICTURES / name)
