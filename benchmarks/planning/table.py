"""Predictions beside what was measured, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.markdown import spread, table
from tfdist.planning.hardware import Hardware

_HEADER = ("Model", "Strategy", "Predicted, ms", "Measured, ms", "Error", "Predicted rank", "Measured rank")


def errors(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Predicted by measured seconds, less one.

    Example:
        >>> errors([{"seconds": 0.012, "measured_ms": 10.0}])
        [0.2]
    """
    return [round(1e3 * row["seconds"] / row["measured_ms"] - 1, 4) for row in rows]


def ranks(values: Sequence[float]) -> list[int]:
    """The place of each value, from 1 for the smallest.

    Example:
        >>> ranks([3.0, 1.0, 2.0])
        [3, 1, 2]
    """
    order = sorted(values)
    return [order.index(value) + 1 for value in values]


def render(found: Mapping[str, Sequence[Mapping[str, Any]]], hardware: Hardware) -> str:
    """A row for each strategy of each model, and a summary.

    Args:
        found: by model, predicted rows with `samples_ms` and `measured_ms`.
        hardware: what was measured of it.
    """
    lines, all_errors, behind = [], [], []
    for model, rows in found.items():
        of_model = errors(rows)
        predicted, measured = ranks([row["seconds"] for row in rows]), ranks([row["measured_ms"] for row in rows])
        for row, error, one, other in zip(rows, of_model, predicted, measured, strict=True):
            name = f"**{row['name']}**" if row["best"] else row["name"]
            times = f"{1e3 * row['seconds']:.1f}", spread(row["samples_ms"], 1)
            lines.append([model, name, *times, f"{error:+.0%}", str(one), str(other)])
        all_errors += of_model
        fastest = min(row["measured_ms"] for row in rows)
        behind += [row["measured_ms"] / fastest - 1 for row in rows if row["best"]]
    one, both = hardware.device(1), hardware.device(2)
    on_one = sum(row["name"] == "one device" for rows in found.values() for row in rows if row["best"])
    summary = [
        f"{sum(abs(error) <= 0.25 for error in all_errors)} of {len(all_errors)} predictions are within 25 %. The "
        f"recommendation is one device for {on_one} of {len(found)} models, and the fastest for "
        f"{sum(each == 0 for each in behind)}; at worst it takes {max(behind, default=0.0):.0%} longer than that.",
        f"Measured of the machine: {one.flops / 1e9:.0f} GFLOP/s, {one.bandwidth / 1e9:.1f} GB/s and "
        f"{1e6 * one.operation:.1f} us an operation in one process; {both.flops / 1e9:.0f}, {both.bandwidth / 1e9:.1f} "
        f"and {1e6 * both.operation:.1f} in each of two; {1e3 * hardware.inside.latency:.2f} ms and "
        f"{hardware.inside.bandwidth / 1e9:.2f} GB/s between them.",
    ]
    return "\n\n".join([table(_HEADER, lines, left=2), *summary])
