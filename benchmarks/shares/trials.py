"""What is measured: steps with equal workers, and with one that is half as fast, by shares."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.children import Children
from benchmarks.data_parallel.models import MODELS
from benchmarks.data_parallel.processes import say
from benchmarks.markdown import spread, table

# By their name in the table: which part of the time the second worker computes, and the shares.
CASES: dict[str, tuple[float, Any]] = {
    "both as fast": (1.0, None),
    "one half as fast, equal shares": (0.5, None),
    "one half as fast, `batch_shares=[2, 1]`": (0.5, [2, 1]),
    'one half as fast, `batch_shares="auto"`': (0.5, "auto"),
}
_ALIKE, *_UNLIKE = CASES
# Two workers of which one is half as fast do three quarters of what two equal ones do.
_IDEAL = 0.75
_BATCH = 256


def measure(children: Children, samples: int, quick: bool) -> list[dict]:
    """One record for each model and case, with windows of all samples, which take turns."""
    models = ["mlp"] if quick else list(MODELS)
    records = [{"model": model, "case": case, "trials": []} for model, case in itertools.product(models, CASES)]
    for sample in range(1 if quick else samples):
        for record in records:
            speed, shares = CASES[record["case"]]
            say(f"{record['model']}, {record['case']}, sample {sample + 1} ...")
            settings = {"model": record["model"], "speed": speed, "shares": shares, "batch": _BATCH}
            settings |= {"warmup": 2 if quick else 5, "windows": 2 if quick else 6, "steps": 5 if quick else 20}
            record["trials"].append(children.workers(f"{__package__}.worker", settings, {}))
    return records


def table_of(records: Sequence[Mapping]) -> str:
    """A line for each record: time of a step, and its throughput beside what two workers of these speeds could do."""
    header = ["Model", "Workers", "Step, ms", "Of the ideal", "Rows of the slow one", "Drift"]
    return table(header, _lines(records), left=2)


def _lines(records: Sequence[Mapping]) -> Iterator[list[str]]:
    alike = {
        record["model"]: [statistics.median(trial["ms"]) for trial in record["trials"]]
        for record in records
        if record["case"] == _ALIKE
    }
    for record in records:
        steps = [statistics.median(trial["ms"]) for trial in record["trials"]]
        ideal = 1.0 if record["case"] == _ALIKE else _IDEAL
        reached = [equal / (step * ideal) for equal, step in zip(alike[record["model"]], steps, strict=True)]
        half = len(record["trials"][0]["ms"]) // 2
        drift = statistics.median(
            statistics.median(trial["ms"][half:]) / statistics.median(trial["ms"][:half]) for trial in record["trials"]
        )
        rows = statistics.median(trial["rows"] for trial in record["trials"])
        title, windows = MODELS[record["model"]].title, [one for trial in record["trials"] for one in trial["ms"]]
        yield [title, record["case"], spread(windows, 0), spread(reached), f"{rows:.0%}", f"{drift:.2f}"]
