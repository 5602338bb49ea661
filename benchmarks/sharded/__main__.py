"""Measures fully sharded training of tfdist and of PyTorch, beside plain data parallelism, and prints the tables."""

from __future__ import annotations

import sys

from benchmarks.parts import Benchmark, Part
from benchmarks.sharded import tables, trials

BENCHMARK = Benchmark(
    "benchmarks.sharded",
    __doc__,
    {
        "steps": Part("Steps, two processes with a core each", trials.steps, tables.steps),
        "bytes": Part("What a process sends", trials.sent, tables.sent),
        "memory": Part("Memory of a process", trials.memory, tables.memory),
        "tokens": Part("Steps, with 8 sequences a process", trials.steps_of_more_tokens, tables.steps, is_usual=False),
    },
    samples=1,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
