"""The results as Markdown. Pure functions of the records."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.markdown import spread, table

_TITLES = {"none": "Keras, no strategy", "stock": "TensorFlow's MirroredStrategy", "tfdist": "tfdist.MirroredStrategy"}


def first_step(records: Sequence[Mapping]) -> str:
    """A line for each strategy and number of devices, with its share of TensorFlow's own strategy."""
    stock = {r["devices"]: statistics.median(r["seconds"]) for r in records if r["strategy"] == "stock"}
    lines = []
    for record in records:
        name, _, local = record["strategy"].partition(", ")
        title = _TITLES[name] + (', batch_norm="local"' if local else "")
        base = stock.get(record["devices"])
        ratio = "" if base is None else f"{statistics.median(record['seconds']) / base:.2f}"
        lines.append([title, str(record["devices"]), spread(record["seconds"], 1), ratio])
    return table(["Strategy", "Devices", "First step, s", "/ TensorFlow's"], lines, left=1)


def xla(records: Sequence[Mapping]) -> str:
    """A line for each model and number of devices: without XLA, with it, and the ratio."""
    found = {(r["model"], r["devices"], r["jit_compile"]): r["samples_ms"] for r in records}
    lines = []
    for model, devices in dict.fromkeys((r["model"], r["devices"]) for r in records):
        plain, compiled = found[model, devices, False], found[model, devices, True]
        ratio = statistics.median(compiled) / statistics.median(plain)
        lines.append([model, str(devices), spread(plain, 1), spread(compiled, 1), f"{ratio:.2f}"])
    return table(["Model", "Devices", "Without, ms", "With XLA, ms", "Ratio"], lines, left=1)
