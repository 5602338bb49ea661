"""Trains two models with compressed gradients, beside uncompressed ones, and prints how accurate they become."""

from __future__ import annotations

import sys

from benchmarks.compression import accuracy
from benchmarks.parts import Benchmark, Part

BENCHMARK = Benchmark(
    "benchmarks.compression",
    __doc__,
    {
        "images": Part("Fashion-MNIST: classes of test images", accuracy.of("images"), accuracy.table),
        "text": Part("Language model: next bytes of held-out text", accuracy.of("text"), accuracy.table),
    },
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
