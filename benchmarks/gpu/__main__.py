"""Measures training on one GPU, under each strategy and in plain Keras, and prints the table."""

from __future__ import annotations

import sys

from benchmarks.gpu import training
from benchmarks.parts import Benchmark, Part

_MODELS = {"resnet": "ResNet-50, 224 x 224, mixed_float16", "transformer": "Transformer, 512 tokens, mixed_float16"}
BENCHMARK = Benchmark(
    "benchmarks.gpu",
    __doc__,
    {
        f"{model}-{group}".lower(): Part(f"{title}: {group}", training.of(model, group), training.table)
        for model, title in _MODELS.items()
        for group in training.GROUPS
    },
    pins=False,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
