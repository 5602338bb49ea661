"""Accuracy after training with each method, over some seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from benchmarks import markdown
from benchmarks.children import Children
from benchmarks.data_parallel.processes import say

# By what is written into a script.
METHODS = (
    "None",
    "'bf16'",
    "PowerSGD(8, start_step=100)",
    "PowerSGD(2, start_step=100)",
    "TopK(0.016, start_step=100)",
    "TopK(0.005, start_step=100)",
    "TopK(0.005, momentum_correction=True, start_step=100)",
)


def of(problem: str) -> Callable[[Children, int, bool], list[dict]]:
    """What measures a problem: one record for each method, with a sample for each seed."""

    def measure(children: Children, samples: int, quick: bool) -> list[dict]:
        records = []
        for method in METHODS:
            if problem == "text" and "momentum_correction" in method:
                continue  # it is for SGD; the language model is trained by AdamW
            found = []
            for seed in range(1, samples + 1):
                settings = {"problem": problem, "method": method, "seed": seed, "quick": quick}
                found.append(children.python(f"{__package__}.worker", settings, children.cores))
                say(f"{problem}, {method}, seed {seed}: {found[-1]['accuracy']:.2f} %, {found[-1]['seconds']:.0f} s")
            accuracies = [one["accuracy"] for one in found]
            records.append({"method": method, "sent": found[0]["sent"], "accuracies": accuracies})
        return records

    return measure


def table(records: Sequence[Mapping]) -> str:
    """Each method beside none, whose accuracy differs between seeds, too."""
    plain = records[0]
    # Gradients whose shapes are not known while tracing are not counted.
    is_counted = plain["sent"] > 0
    header = ["compression", "sent a step, kB", "of all", "accuracy, %", "difference, points"]
    rows = []
    for record in records:
        difference = statistics.median(record["accuracies"]) - statistics.median(plain["accuracies"])
        rows.append(
            [
                f"`{record['method']}`",
                f"{record['sent'] / 1e3:,.0f}" if is_counted else "",
                f"1/{plain['sent'] / record['sent']:.0f}" if is_counted else "",
                markdown.spread(record["accuracies"]),
                f"{difference:+.2f}" if record is not plain else "",
            ]
        )
    return markdown.table(header, rows, left=1)
