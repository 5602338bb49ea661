"""Measures what memory policies save and cost, beside their peers, and prints the tables."""

from __future__ import annotations

import sys

from benchmarks.memory import activations, host, sharding, tables
from benchmarks.parts import Benchmark, Part

BENCHMARK = Benchmark(
    "benchmarks.memory",
    __doc__,
    {
        "activations": Part("Recomputation, on one core", activations.measure, tables.activations),
        "host": Part("What is left on the device", host.measure, tables.host),
        "sharding": Part("Slots of Adam, split over two replicas", sharding.measure, tables.sharding),
    },
    samples=5,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
