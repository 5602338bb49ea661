"""Trains on two workers that rarely exchange: how fast it is over slow networks, and how good the models become."""

from __future__ import annotations

import sys

from benchmarks.local_steps import loss, speed
from benchmarks.parts import Benchmark, Part

BENCHMARK = Benchmark(
    "benchmarks.local_steps",
    __doc__,
    {
        "speed": Part("Steps over slow networks", speed.measure, speed.table_of),
        "loss": Part("Validation loss", loss.measure, loss.table_of),
    },
    samples=1,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
