"""Pictures of pipelined steps: what was measured above what was predicted."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfdist.strategies.pipeline.drawing import label
from tfdist.strategies.pipeline.simulation import Interval, idle_share, makespan, speed_up

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# In inches; the width grows with the number of boxes in a row, until files become unwieldy.
_WIDTHS = (9.0, 30.0)
_WIDTH_OF_BOX = 0.17
_HEIGHT_OF_STAGE = 0.26
_POINTS_PER_INCH = 72
_FONT_SIZES = (4.5, 8.0)
_WIDTH_OF_CHARACTER = 0.62  # of the font size
_MARGIN = 0.4  # in characters, beside a number
_TOLERANCE = 1.001  # for rounding
_GREY = 7  # in the sequence "tab10"
_SHARE_OF_WHITE = 0.6  # in the colour of a forward
_SHARE_OF_BLACK = 0.3  # in the colour of a backward


def save_picture(
    path: str | os.PathLike[str],
    measured: Sequence[Interval] | None,
    predicted: Sequence[Interval],
    title: str | None = None,
) -> None:
    """Draws a measured and a predicted step: a row for each stage, a numbered box for each micro-batch.

    A micro-batch's forward and backward have one colour, light and dark; it depends on the last digit of its number. A
    letter follows the number where a stage has several chunks. Numbers that do not fit in their boxes are left out.

    Args:
        path: file to write; its ending, such as `.png` or `.svg`, says in which format.
        measured: what was measured; None or empty: only the prediction is drawn.
        predicted: what was simulated.
        title: title above all.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if nothing is predicted, intervals take no time, or matplotlib does not know the format.
        OSError: if the file cannot be written.

    Example:
        >>> from tfdist.strategies.pipeline.schedule import one_f_one_b
        >>> from tfdist.strategies.pipeline.simulation import simulate
        >>> save_picture("step.png", None, simulate(one_f_one_b(2, 4), [0.01, 0.01], [0.02, 0.02]))
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            "save_picture draws with matplotlib, which cannot be imported: pip install 'tfdist[plot]'"
        ) from error
    panels = {"measured": measured, "predicted": predicted} if measured else {"predicted": predicted}
    stages = max((interval.device + 1 for intervals in panels.values() for interval in intervals), default=1)
    width = min(max(_WIDTHS[0], max(map(_slots, panels.values())) * _WIDTH_OF_BOX), _WIDTHS[1])
    height = len(panels) * (stages * _HEIGHT_OF_STAGE + 0.9) + 0.4
    figure = Figure(figsize=(width, height), layout="constrained")
    for axes, (name, intervals) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels.items(), strict=True):
        _draw_panel(axes, name, intervals, stages, width)
    forward, backward = (Patch(color=_colour(kind, _GREY), label=kind) for kind in ("forward", "backward"))
    figure.legend(handles=[forward, backward], loc="outside upper right", ncols=2, frameon=False)
    if title:
        figure.suptitle(title, x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def _slots(intervals: Sequence[Interval]) -> float:
    """How many boxes as wide as a narrow one would fit beside each other."""
    return makespan(intervals) / max(_short_length(intervals), 1e-12)


def _short_length(intervals: Sequence[Interval]) -> float:
    """The length that nine tenths of the intervals exceed; the shortest may be an outlier."""
    lengths = sorted(interval.end - interval.begin for interval in intervals)
    return lengths[len(lengths) // 10]


def _draw_panel(axes: Axes, name: str, intervals: Sequence[Interval], stages: int, width: float) -> None:
    total = makespan(intervals)
    zero = min(interval.begin for interval in intervals)
    points_per_second = 0.92 * width * _POINTS_PER_INCH / total
    for kind in ("forward", "backward"):
        of_kind = [interval for interval in intervals if interval.instruction.kind == kind]
        for stage in range(stages):
            row = [interval for interval in of_kind if interval.device == stage]
            axes.broken_barh(
                [((i.begin - zero) * 1e3, (i.end - i.begin) * 1e3) for i in row],
                (stage - 0.43, 0.86),
                facecolors=[_colour(kind, i.instruction.microbatch) for i in row],
                edgecolor="white",
                linewidth=0.3,
            )
        if of_kind:
            _write_numbers(axes, of_kind, zero, stages, points_per_second)
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


def _write_numbers(
    axes: Axes, intervals: Sequence[Interval], zero: float, stages: int, points_per_second: float
) -> None:
    """Writes numbers into the boxes of one kind, in one size."""
    chunks = max(interval.instruction.chunk for interval in intervals) + 1
    texts = [label(interval.instruction, stages, chunks) for interval in intervals]
    longest = max(map(len, texts))
    fitting = _short_length(intervals) * points_per_second / (longest + _MARGIN) / _WIDTH_OF_CHARACTER
    size = min(max(_FONT_SIZES[0], fitting), _FONT_SIZES[1])
    colour = "black" if intervals[0].instruction.kind == "forward" else "white"
    for text, (device, _, begin, end) in zip(texts, intervals, strict=True):
        if (len(text) + _MARGIN) * _WIDTH_OF_CHARACTER * size <= (end - begin) * points_per_second * _TOLERANCE:
            middle = ((begin + end) / 2 - zero) * 1e3
            axes.text(middle, device, text, size=size, color=colour, ha="center", va="center_baseline")


def _colour(kind: str, microbatch: int) -> tuple[float, float, float]:
    from matplotlib import color_sequences
    from matplotlib.colors import to_rgb

    hues = color_sequences["tab10"]
    base = to_rgb(hues[microbatch % len(hues)])
    other, share = (1.0, _SHARE_OF_WHITE) if kind == "forward" else (0.0, _SHARE_OF_BLACK)
    red, green, blue = ((1 - share) * part + share * other for part in base)
    return red, green, blue
