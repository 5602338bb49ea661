"""How good models become that workers train by themselves for some steps, beside synchronous training."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence

from benchmarks.children import Children
from benchmarks.data_parallel.processes import say
from benchmarks.markdown import table

TASKS = {"digits": "digits, CNN", "language": "bytes of text, Transformer"}
# After how many steps the workers exchange; 0: synchronous training.
PERIODS = (0, 20, 50, 200, 500)


def measure(children: Children, samples: int, quick: bool) -> list[dict]:
    """One record for each task, number of workers and period, with a trial for each seed."""
    tasks, counts, periods = (["digits"], [2], [0, 20]) if quick else (list(TASKS), [2, 4], PERIODS)
    records = []
    for task, count, period in itertools.product(tasks, counts, periods):
        record = {"task": task, "workers": count, "period": period, "trials": []}
        for seed in range(1 if quick else samples):
            say(f"{task}, {count} workers, exchange after {period} steps, seed {seed + 1} ...")
            settings = {"task": task, "sync_every": period, "seed": seed + 1, "steps": 60 if quick else 1000}
            record["trials"].append(children.workers(f"{__package__}.loss_worker", settings, {}, count))
        records.append(record)
    return records


def table_of(records: Sequence[Mapping]) -> str:
    """A line for each record; loss and accuracy are those of data that were held out, at the end."""
    header = ["Task", "Workers", "Exchange after", "Loss", "of the synchronous one", "Accuracy", "points more"]
    synchronous = {(one["task"], one["workers"]): _medians(one) for one in records if one["period"] == 0}
    lines = []
    for record in records:
        (loss, accuracy), (loss_of_all, accuracy_of_all) = (
            _medians(record),
            synchronous[record["task"], record["workers"]],
        )
        period = f"{record['period']} steps" if record["period"] else "each step"
        figures = [
            f"{loss:.4f}",
            f"{loss / loss_of_all:.3f}",
            f"{accuracy:.2%}",
            f"{100 * (accuracy - accuracy_of_all):+.2f}",
        ]
        lines.append([TASKS[record["task"]], str(record["workers"]), period, *figures])
    return table(header, lines, left=1)


def _medians(record: Mapping) -> tuple[float, float]:
    return tuple(statistics.median(trial[name] for trial in record["trials"]) for name in ("loss", "accuracy"))
