"""A picture of how a step gets faster with more devices."""

from __future__ import annotations

import os

from tfdist.planning.scaling import Scaling

_SIZE = (7.0, 4.5)


def points(scaling: Scaling) -> dict[str, list[tuple[int, float]]]:
    """Speed-ups over one device, by kind of strategy: what is drawn."""
    found: dict[str, list[tuple[int, float]]] = {}
    for count, row in scaling.best.items():
        if row is not None:
            found.setdefault(row.family, []).append((count, scaling.one.seconds / row.seconds))
    return found


def save_picture(path: str | os.PathLike[str], scaling: Scaling, title: str) -> None:
    """Draws the speed-up of the best strategy over the number of devices, beside the ideal one.

    Args:
        path: file to write; its ending, such as `.png` or `.svg`, says in which format.
        scaling: what is drawn.
        title: above it.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("A picture is drawn with matplotlib: pip install 'tfdist[plot]'") from error
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    counts = sorted(scaling.best)
    axes.plot(counts, counts, color="0.7", linestyle="--", label="ideal")
    every = sorted(point for series in points(scaling).values() for point in series)
    axes.plot(*zip(*every, strict=True), color="0.5", linewidth=1, zorder=1) if every else None
    for kind, series in points(scaling).items():
        axes.plot(*zip(*series, strict=True), marker="o", linestyle="", label=kind)
    limit = scaling.pays_up_to
    axes.axvline(limit, color="0.4", linewidth=1, linestyle=":")
    axes.annotate(f"pays up to {limit}", (limit, 1), textcoords="offset points", xytext=(4, 2), color="0.3")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("devices")
    axes.set_ylabel("speed-up over one device (the batch stays the same)")
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
