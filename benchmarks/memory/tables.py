"""The results as Markdown. Pure functions of the records."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.markdown import spread, table
from benchmarks.memory.shapes import SHAPES, SHARDED
from benchmarks.memory.variants import PLAIN


def activations(records: Sequence[Mapping]) -> str:
    """A table for each model, with a line for each depth and variant."""
    parts = []
    header = ["Blocks", "Variant", "Peak, MB", "/ plain", "ms a step", "Time / plain"]
    for key in dict.fromkeys((r["shape"], r["jit_compile"], r["device"]) for r in records):
        shape, xla, device = key
        of_key = [r for r in records if (r["shape"], r["jit_compile"], r["device"]) == key]
        plain = {r["depth"]: r for r in of_key if r["variant"] == PLAIN}
        lines = [[str(r["depth"]), r["variant"], *_activation_cells(r, plain[r["depth"]])] for r in of_key]
        title = f"{SHAPES[shape].title}{', with XLA' if xla else ''}, on {device}"
        parts.append(f"{title}:\n\n{table(header, lines, left=2)}")
    return "\n\n".join(parts)


def host(records: Sequence[Mapping]) -> str:
    """A line for each variant, with the device's bytes and the host's by depth."""
    depths = sorted({r["depth"] for r in records})
    found = {(r["variant"], r["depth"]): r for r in records}
    header = ["Variant", *(f"{place}, {depth} blocks" for place in ("Device", "Host") for depth in depths)]
    lines = [
        [variant, *(_megabytes(found[variant, depth][place]) for place in ("device", "host") for depth in depths)]
        for variant in dict.fromkeys(r["variant"] for r in records)
    ]
    (shape,) = {r["shape"] for r in records}
    return f"{SHAPES[shape].title}. MB at the peak of a step, weights included:\n\n{table(header, lines, left=1)}"


def sharding(records: Sequence[Mapping]) -> str:
    """A line for each model and strategy."""
    header = ["Model", "Strategy", "Adam, ms", "Sharded, ms", "Time / Adam", "Slots, MB", "Sharded, MB", "/ Adam"]
    found = {(r["shape"], r["strategy"], r["sharded"]): r for r in records}
    lines = []
    for shape, strategy in dict.fromkeys(key[:2] for key in found):
        whole, sharded = found[shape, strategy, False], found[shape, strategy, True]
        sizes = [record["slot_bytes"] for record in (whole, sharded)]
        lines.append(
            [
                SHARDED[shape].title,
                strategy,
                spread(whole["samples_ms"], 1),
                spread(sharded["samples_ms"], 1),
                spread(_ratios(sharded, whole)),
                *map(_megabytes, sizes),
                f"{sizes[1] / sizes[0]:.2f}",
            ]
        )
    return table(header, lines, left=2)


def _activation_cells(record: Mapping, plain: Mapping) -> list[str]:
    if "error" in record:
        return [f"failed: {record['error']}", "", "", ""]
    is_known = "error" not in plain
    return [
        _megabytes(record["peak"]),
        f"{record['peak'] / plain['peak']:.2f}" if is_known else "",
        f"{statistics.median(record['samples_ms']):.1f}",
        spread(_ratios(record, plain)) if is_known else "",
    ]


def _ratios(record: Mapping, plain: Mapping) -> list[float]:
    """Of samples that were measured right after each other."""
    return [mine / other for mine, other in zip(record["samples_ms"], plain["samples_ms"], strict=True)]


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f}"
