"""Trains on two workers, one of which is half as fast, with equal and with unequal shares of each batch."""

from __future__ import annotations

import sys

from benchmarks.parts import Benchmark, Part
from benchmarks.shares import trials

BENCHMARK = Benchmark(
    "benchmarks.shares",
    __doc__,
    {"steps": Part("Two workers with a core each", trials.measure, trials.table_of)},
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
