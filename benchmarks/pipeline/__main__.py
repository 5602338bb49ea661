"""Measures schedules, speed, memory and tracing of pipelines, and prints the tables."""

from __future__ import annotations

import sys

from benchmarks.parts import Benchmark, Part
from benchmarks.pipeline import memory, real_compute, schedule_efficiency, tables, trace_cost

BENCHMARK = Benchmark(
    "benchmarks.pipeline",
    __doc__,
    {
        "schedules": Part(
            "Schedules: speed-up, and its share of the ideal", schedule_efficiency.measure, tables.schedules
        ),
        "compute": Part("Two stages with a core each", real_compute.measure, tables.compute),
        "memory": Part("Memory of each stage during a step", memory.measure, tables.memory),
        "tracing": Part("Tracing", trace_cost.measure, tables.tracing),
    },
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
