"""Measures training on one GPU, under each strategy and in plain Keras, and prints the table."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.gpu import training
from benchmarks.parts import Benchmark, Part

BENCHMARK = Benchmark(
    "benchmarks.gpu",
    __doc__,
    Path(__file__).parent,
    {
        "resnet": Part("ResNet-50, images of 224 x 224, mixed_float16", training.of("resnet"), training.table),
        "transformer": Part("Transformer, 512 tokens a row, mixed_float16", training.of("transformer"), training.table),
    },
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
