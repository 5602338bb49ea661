"""Measures the time to the first step, and what XLA brings to later ones, and prints the tables."""

from __future__ import annotations

import sys

from benchmarks.compiling import first_step, tables, xla_steps
from benchmarks.parts import Benchmark, Part

BENCHMARK = Benchmark(
    "benchmarks.compiling",
    __doc__,
    {
        "first_step": Part("The first step", first_step.measure, tables.first_step),
        "xla": Part("Steps with XLA and without", xla_steps.measure, tables.xla),
    },
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
