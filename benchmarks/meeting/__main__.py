"""Measures what it takes that many simulated processes meet, and prints the table."""

from __future__ import annotations

import sys

from benchmarks.meeting import ranks
from benchmarks.parts import Benchmark, Part

BENCHMARK = Benchmark(
    "benchmarks.meeting",
    __doc__,
    {"ranks": Part("Barrier and rendezvous", ranks.measure, ranks.table_of)},
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
