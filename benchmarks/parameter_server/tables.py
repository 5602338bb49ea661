"""The results as Markdown. Pure functions of the samples."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from benchmarks.markdown import spread, table
from benchmarks.parameter_server.trials import Trial, by_case

_HEADER = (
    "Framework",
    "Workers",
    "ms a step",
    "Speed / plain",
    "Speed / tf_keras",
    "Chief's CPU, ms",
    "Without data",
    "ps' CPU, ms",
    "Workers' CPU, ms",
    "KB a step",
)
_SHOWN_FOR_FAILED = "failed"


def table_of(records: Sequence[Mapping]) -> str:
    """A table for each case of a part."""
    samples = {Trial.from_dict(record["trial"]): record["samples"] for record in records}
    tables = []
    for of_case in by_case(list(samples)):
        lines = [_cells(trial, samples) for trial in of_case]
        tables.append(f"{of_case[0].case.title}:\n\n{table(_HEADER, lines, left=1)}")
    return "\n\n".join(tables)


def _cells(trial: Trial, samples: Mapping[Trial, Sequence[Mapping]]) -> list[str]:
    own = samples.get(trial)
    workers = str(trial.workers or "")
    if not own:
        return [trial.title, workers, _SHOWN_FOR_FAILED, *[""] * (len(_HEADER) - 3)]
    plain = Trial(trial.case, "plain", steps_per_execution=trial.steps_per_execution)
    stock = dataclasses.replace(trial, peer="tf_keras", mode="async", max_inflight=None, worker_input=True)
    without_data = [sample["chief_cpu_ms"] - sample["draw_cpu_ms"] for sample in own]
    return [
        trial.title,
        workers,
        spread([sample["ms"] for sample in own]),
        _speed(own, samples.get(plain)),
        _speed(own, samples.get(stock)) if trial.peer == "tfdist" else "",
        _median([sample["chief_cpu_ms"] for sample in own]),
        _median(without_data),
        _median([sample.get("ps_cpu_ms") for sample in own]),
        _median([sample.get("worker_cpu_ms") for sample in own]),
        _median([_kilobytes(sample.get("bytes")) for sample in own], decimals=1),
    ]


def _speed(own: Sequence[Mapping], reference: Sequence[Mapping] | None) -> str:
    """Steps a second in units of the reference's."""
    if not reference:
        return ""
    mine, other = (statistics.median(sample["ms"] for sample in samples) for samples in (own, reference))
    return f"{other / mine:.2f}"


def _median(values: Sequence[float | None], decimals: int = 2) -> str:
    if any(value is None for value in values):
        return ""
    return f"{statistics.median(values):.{decimals}f}"


def _kilobytes(count: float | None) -> float | None:
    return None if count is None else count / 1e3
