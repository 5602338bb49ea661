"""A training step as intervals on devices: simulated, measured, and shown as a picture or in a trace file.

A timeline is a list of `Interval`s. `simulate` predicts one from a schedule; `clock.Clock` measures one. This module
imports neither TensorFlow nor NumPy, so that `tfdist plan` can use it and start at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tfdist.strategies.pipeline.schedule import Instruction, Schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# In inches; the width grows with the number of boxes in a row, until files become unwieldy.
_WIDTHS = (9.0, 30.0)
_WIDTH_OF_BOX = 0.17
_HEIGHT_OF_STAGE = 0.26
# In points, of which an inch has 72.
_FONT_SIZE = 6.0
_WIDTH_OF_CHARACTER = 0.62 * _FONT_SIZE


class Interval(NamedTuple):
    """An instruction on a device, from `begin` to `end`, in seconds.

    Example:
        >>> Interval(0, Instruction("forward", 0, 0), begin=0.0, end=1.5).end
        1.5
    """

    device: int
    instruction: Instruction
    begin: float
    end: float


def simulate(
    schedule: Schedule, forward: Sequence[float], backward: Sequence[float], transfer: float = 0.0
) -> list[Interval]:
    """When each instruction begins and ends, if it begins as soon as its device is free and its inputs are there.

    Args:
        schedule: the schedule.
        forward: seconds of the forward of one micro-batch through each chunk.
        backward: the same for the backward.
        transfer: seconds that a result takes to another device; the devices go on computing meanwhile.

    Raises:
        ValueError: if there is not one time per chunk, a time is negative, or the schedule deadlocks.

    Example:
        >>> from tfdist.strategies.pipeline.schedule import gpipe
        >>> max(interval.end for interval in simulate(gpipe(2, 3), [1, 1], [2, 2]))
        12.0
    """
    times = {"forward": forward, "backward": backward}
    for name, values in times.items():
        if len(values) != schedule.chunks:
            raise ValueError(
                f"{name} has {len(values)} times, but schedule {schedule.name!r} has {schedule.chunks} chunks: "
                "give one time per chunk."
            )
    if (shortest := min(*forward, *backward, transfer)) < 0:
        raise ValueError(f"A time is {shortest} s: forward, backward and transfer must all be 0 or more.")
    free = [0.0] * schedule.devices
    ends: dict[Instruction, float] = {}
    intervals = []
    for device, instruction in schedule.linear_order():
        begin = free[device]
        for required in schedule.requirements(instruction):
            is_elsewhere = schedule.device_of(required.chunk) != device
            begin = max(begin, ends[required] + (transfer if is_elsewhere else 0.0))
        free[device] = ends[instruction] = begin + times[instruction.kind][instruction.chunk]
        intervals.append(Interval(device, instruction, begin, free[device]))
    return intervals


def makespan(intervals: Sequence[Interval]) -> float:
    """Seconds from the first begin to the last end.

    Raises:
        ValueError: if there are no intervals, or they take no time.
    """
    if not intervals:
        raise ValueError("There are no intervals, but at least one is needed: record or simulate a step first.")
    seconds = max(i.end for i in intervals) - min(i.begin for i in intervals)
    if seconds <= 0:
        raise ValueError(f"The intervals take {seconds} s in all, but must take more than 0: check the clock.")
    return seconds


def speed_up(intervals: Sequence[Interval]) -> float:
    """How many devices compute at a time on average: the sum of their busy times by the makespan.

    Raises:
        ValueError: if there are no intervals, or they take no time.

    Example:
        >>> from tfdist.strategies.pipeline.schedule import gpipe
        >>> speed_up(simulate(gpipe(2, 3), [1, 1], [2, 2]))
        1.5
    """
    return sum(_busy(intervals)) / makespan(intervals)


def idle_share(intervals: Sequence[Interval]) -> float:
    """The share of the devices' time in which they compute nothing, from 0 to 1.

    Raises:
        ValueError: if there are no intervals, or they take no time.

    Example:
        >>> from tfdist.strategies.pipeline.schedule import gpipe
        >>> idle_share(simulate(gpipe(2, 3), [1, 1], [2, 2]))
        0.25
    """
    return 1.0 - speed_up(intervals) / len(_busy(intervals))


def _busy(intervals: Sequence[Interval]) -> list[float]:
    """For each device, the seconds in which it computes; measured intervals of a device may overlap."""
    busy = [0.0] * (max((i.device for i in intervals), default=-1) + 1)
    until = [float("-inf")] * len(busy)
    for device, _, begin, end in sorted(intervals, key=lambda interval: interval.begin):
        busy[device] += max(0.0, end - max(begin, until[device]))
        until[device] = max(until[device], end)
    return busy


def save_picture(
    path: str | os.PathLike[str],
    measured: Sequence[Interval] | None,
    predicted: Sequence[Interval],
    title: str | None = None,
) -> None:
    """Draws a measured step above a predicted one: a row for each stage, a numbered box for each micro-batch.

    A micro-batch's forward and backward have one colour, light and dark; it depends on the last digit of its number. A
    letter follows the number where a stage has several chunks. Numbers that do not fit in their boxes are left out.

    Args:
        path: file to write; its ending, such as `.png` or `.svg`, says in which format.
        measured: the measured step; None or empty: only the prediction is drawn.
        predicted: the simulated step.
        title: a title above both.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if nothing is predicted, intervals take no time, or matplotlib does not know the format.
        OSError: if the file cannot be written.

    Example:
        >>> from tfdist.strategies.pipeline.schedule import one_f_one_b
        >>> predicted = simulate(one_f_one_b(2, 4), [0.01, 0.01], [0.02, 0.02])
        >>> save_picture("step.png", None, predicted)
    """
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            "save_picture draws with matplotlib, which cannot be imported: pip install 'matplotlib>=3.7'"
        ) from error
    colours = colormaps["tab20"].colors  # pairs of a dark and a light one
    panels = {"measured": measured, "predicted": predicted} if measured else {"predicted": predicted}
    stages = max((interval.device + 1 for intervals in panels.values() for interval in intervals), default=1)
    width = min(max(_WIDTHS[0], max(map(_boxes, panels.values())) * _WIDTH_OF_BOX), _WIDTHS[1])
    height = len(panels) * (stages * _HEIGHT_OF_STAGE + 0.9) + 0.4
    figure = Figure(figsize=(width, height), layout="constrained")
    for axes, (name, intervals) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels.items(), strict=True):
        _draw_panel(axes, name, intervals, stages, width, colours)
    dark, light = colours[14:16]
    handles = [Patch(color=light, label="forward"), Patch(color=dark, label="backward")]
    figure.legend(handles=handles, loc="outside upper right", ncols=2, frameon=False)
    if title:
        figure.suptitle(title, x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def _boxes(intervals: Sequence[Interval]) -> float:
    """How many boxes as wide as a narrow one would fit beside each other; the narrowest tenth may be outliers."""
    lengths = sorted(interval.end - interval.begin for interval in intervals)
    return makespan(intervals) / max(lengths[len(lengths) // 10], 1e-12)


def _draw_panel(
    axes: Axes, name: str, intervals: Sequence[Interval], stages: int, width: float, colours: Sequence[Any]
) -> None:
    total, zero = makespan(intervals), min(interval.begin for interval in intervals)
    chunks = max(interval.instruction.chunk for interval in intervals) + 1
    points_per_second = 0.92 * width * 72 / total
    begins = [(interval.begin - zero) * 1e3 for interval in intervals]
    lengths = [(interval.end - interval.begin) * 1e3 for interval in intervals]
    rows = [interval.device for interval in intervals]
    of_boxes = [colours[2 * (i.instruction.microbatch % 10) + (i.instruction.kind == "forward")] for i in intervals]
    axes.barh(rows, lengths, 0.86, begins, color=of_boxes, edgecolor="white", linewidth=0.3)
    for row, begin, length, interval in zip(rows, begins, lengths, intervals, strict=True):
        text = label(interval.instruction, stages, chunks)
        if len(text) * _WIDTH_OF_CHARACTER <= length / 1e3 * points_per_second:
            colour = "black" if interval.instruction.kind == "forward" else "white"
            style = {"size": _FONT_SIZE, "ha": "center", "va": "center_baseline"}
            axes.text(begin + length / 2, row, text, color=colour, **style)
    axes.set_title(
        f"{name}: {total * 1e3:.4g} ms, {idle_share(intervals):.1%} idle, speed-up {speed_up(intervals):.2f}",
        loc="left",
        size="medium",
    )
    axes.set_xlim(0, total * 1e3)
    axes.set_ylim(stages - 0.5, -0.5)
    axes.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_facecolor("whitesmoke")
    axes.set_xlabel("ms")


def label(instruction: Instruction, devices: int, chunks: int) -> str:
    """The number of the micro-batch, with a letter for which of its device's chunks it is if there are several.

    Example:
        >>> label(Instruction("forward", 5, 3), devices=4, chunks=8)
        '3b'
    """
    letter = chr(ord("a") + instruction.chunk // devices) if chunks > devices else ""
    return f"{instruction.microbatch}{letter}"


def write_trace(
    path: str | os.PathLike[str], measured: Sequence[Interval] | None, predicted: Sequence[Interval]
) -> None:
    """Writes a measured and a predicted step as Chrome trace events, for https://ui.perfetto.dev and chrome://tracing.

    The file has a process for each of the two steps, with a thread for each stage.

    Both steps begin at 0, so that they can be compared.

    Args:
        path: file to write, usually with the ending `.json`.
        measured: the measured step; None or empty: only the prediction is written.
        predicted: the simulated step.

    Raises:
        OSError: if the file cannot be written.

    Example:
        >>> from tfdist.strategies.pipeline.schedule import gpipe
        >>> predicted = simulate(gpipe(2, 4), [0.01, 0.01], [0.02, 0.02])
        >>> write_trace("step.json", None, predicted)
    """
    events = [*_events(1, "measured", measured or ()), *_events(2, "predicted", predicted)]
    Path(path).write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n", encoding="utf-8")


def _events(process: int, name: str, intervals: Sequence[Interval]) -> list[dict[str, Any]]:
    names = {0: {"process_name": name}} if intervals else {}
    for device in sorted({interval.device for interval in intervals}):
        names.setdefault(device, {})["thread_name"] = f"stage {device}"
    zero = min((interval.begin for interval in intervals), default=0.0)
    return [
        *(
            {"ph": "M", "pid": process, "tid": thread, "name": what, "args": {"name": text}}
            for thread, texts in names.items()
            for what, text in texts.items()
        ),
        *(
            {
                "ph": "X",
                "pid": process,
                "tid": device,
                "name": f"{instruction.kind} {instruction.microbatch}",
                "cat": instruction.kind,
                "ts": (begin - zero) * 1e6,
                "dur": (end - begin) * 1e6,
                "args": {"chunk": instruction.chunk, "microbatch": instruction.microbatch},
            }
            for device, instruction, begin, end in intervals
        ),
    ]
