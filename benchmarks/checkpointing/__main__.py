"""Measures what backups cost and how soon a failed training goes on, and prints the tables."""

from __future__ import annotations

import sys

from benchmarks.checkpointing import recovery_trial, saving, table
from benchmarks.parts import Benchmark, Part

BENCHMARK = Benchmark(
    "benchmarks.checkpointing",
    __doc__,
    {
        "overhead": Part("Steps with backups", saving.measure, table.overhead),
        "recovery": Part("Training again after a failure", recovery_trial.measure, table.recovery),
    },
    samples=2,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
