"""Measures parameter servers and their peers in turns and prints the tables."""

from __future__ import annotations

import sys

from benchmarks.parameter_server import measuring, tables
from benchmarks.parameter_server.trials import PARTS
from benchmarks.parts import Benchmark, Part

BENCHMARK = Benchmark(
    "benchmarks.parameter_server",
    __doc__,
    {part: Part(title, measuring.of(part), tables.table_of) for part, (title, _) in PARTS.items()},
    samples=5,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
