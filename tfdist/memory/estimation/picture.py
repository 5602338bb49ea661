"""Pictures of memory in the course of a training step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfdist.memory.estimation.traced_step import GRADIENTS, OPTIMIZER, OTHER

if TYPE_CHECKING:
    from tfdist.memory.estimation.estimate import DeviceMemory
    from tfdist.memory.estimation.report import MemoryReport

_WIDTH, _HEIGHT = 9.0, 3.6  # in inches; the height of one device
_POINTS = 1500  # more cannot be told apart
_NAMED_BLOCKS = 8
_VISIBLE = 0.002
_MB = 1e6
_COLOURS = {
    "weights": "0.4",
    "optimizer slots": "0.6",
    "batch": "0.8",
    GRADIENTS: "tab:red",
    OPTIMIZER: "tab:orange",
    OTHER: "tab:pink",
}


def save_picture(path: str | os.PathLike[str], report: MemoryReport) -> None:
    """Draws a panel for each device: what is there all the time at the bottom, and the step by blocks on top.

    Args:
        path: file to write; its ending, such as `.png` or `.svg`, says in which format.
        report: what to draw.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "MemoryReport.plot draws with matplotlib, which cannot be imported: pip install 'tfdist[plot]'"
        ) from error

    devices = [device for device in report.devices if device.total]
    colours = colormaps["viridis"].resampled(max(len(report.blocks), 2))
    colour_of = {**_COLOURS, **{block: colours(position) for position, block in enumerate(report.blocks)}}
    labels = ["weights", "optimizer slots", "batch", *report.blocks, GRADIENTS, OPTIMIZER, OTHER]
    # The others are left out of the legend.
    named = {*_COLOURS, *_some(report.blocks)}
    figure = Figure(figsize=(_WIDTH, _HEIGHT * len(devices)), layout="constrained")
    for axes, device, line in zip(
        figure.subplots(len(devices), squeeze=False)[:, 0], devices, _moments(devices), strict=True
    ):
        axes.stackplot(
            range(len(line)),
            [[moment.get(label, 0) / _MB for moment in line] for label in labels],
            labels=[label if label in named else f"_{label}" for label in labels],
            colors=[colour_of[label] for label in labels],
            linewidth=0,
        )
        total = device.total / _MB
        axes.axhline(total, color="black", linewidth=0.6, linestyle="--")
        axes.text(0, total, f" {total:.4g} MB", va="bottom", fontsize=8)
        top = total
        if device.measured is not None:
            measured = (device.total - device.step + device.measured) / _MB
            axes.axhline(measured, color="tab:red", linewidth=0.8, linestyle=":", label="_measured")
            # Away from the line of the estimate.
            side = {"va": "top" if measured < total else "bottom", "ha": "right"}
            axes.text(len(line) - 1, measured, f"measured: {measured:.4g} MB ", fontsize=8, **side)
            top = max(total, measured)
        axes.set(ylabel=f"{device.device}, MB", xlim=(0, max(len(line) - 1, 1)), ylim=(0, 1.12 * top), xticks=[])
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, reverse=True, frameon=False)
    axes.set_xlabel("forward and backward pass, operation by operation")
    figure.suptitle(report.title, fontsize=10)
    figure.savefig(path, dpi=130)


def _moments(devices: Sequence[DeviceMemory]) -> list[list[dict[str, int]]]:
    """For each device, bytes by label in the course of the step: where they change visibly, and not too often."""
    lines = [device.timeline or [{}] for device in devices]
    length = max(map(len, lines))
    lines = [line if len(line) == length else [{}] * length for line in lines]
    changes = [0]
    for i in range(1, length):
        if any(
            _difference(line[i], line[changes[-1]]) > _VISIBLE * device.step
            for line, device in zip(lines, devices, strict=True)
        ):
            changes.append(i)
    stride = -(-len(changes) // _POINTS)
    stretches = [changes[begin : begin + stride] for begin in range(0, len(changes), stride)]
    found = []
    for device, line in zip(devices, lines, strict=True):
        # Of each stretch, the moment with the most: the peak must not be left out.
        most = [max((line[i] for i in stretch), key=_sum) for stretch in stretches]
        # What an operation needs while it runs is in no moment.
        most[most.index(max(most, key=_sum))] = device.at_peak
        resident = {"weights": device.weights, "optimizer slots": device.slots, "batch": device.batch}
        found.append([{**resident, **moment} for moment in most])
    return found


def _difference(now: dict[str, int], before: dict[str, int]) -> int:
    return sum(abs(now.get(label, 0) - before.get(label, 0)) for label in now.keys() | before.keys())


def _sum(moment: dict[str, int]) -> int:
    return sum(moment.values())


def _some(blocks: Sequence[str]) -> Sequence[str]:
    """Those of many that a legend has room for."""
    return blocks[:: -(-len(blocks) // _NAMED_BLOCKS) or 1]
