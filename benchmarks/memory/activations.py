"""What is kept for the backward pass: how many bytes does a step need, and how long does it take?"""

from __future__ import annotations

import os
from collections.abc import Sequence

from benchmarks.children import Children
from benchmarks.data_parallel.processes import say
from benchmarks.memory.shapes import DEPTH_OF_XLA, DEPTHS, SHAPES
from benchmarks.memory.variants import ON_DEVICE

ENVIRONMENT = {
    # TensorFlow counts what this allocator gives out; the usual one of CPUs is not counted.
    "TF_CPU_ALLOCATOR_USE_BFC": "1",
    # Several threads compute what is ready in any order: what is there at a time would differ from run to run.
    "TF_NUM_INTEROP_THREADS": "1",
}
_SECONDS = 0.6


def measure(children: Children, samples: int, quick: bool) -> list[dict]:
    """One record for each model, depth and variant, with or without XLA."""
    records = []
    for depth in DEPTHS[:1] if quick else DEPTHS:
        for shape in SHAPES:
            records += _of(children, samples, shape, depth, False)
    records += _of(children, samples, next(iter(SHAPES)), DEPTHS[0] if quick else DEPTH_OF_XLA, True)
    return records


def _of(children: Children, samples: int, shape: str, depth: int, jit_compile: bool) -> Sequence[dict]:
    say(f"activations: {SHAPES[shape].title}, {depth} blocks{', XLA' if jit_compile else ''} ...")
    what = {"shape": shape, "depth": depth, "jit_compile": jit_compile}
    settings = {**what, "variants": ON_DEVICE, "samples": samples, "seconds": _SECONDS}
    # The benchmark's processes see no GPU otherwise.
    gpu = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
    found = children.python(f"{__package__}.fit_worker", settings, children.cores[:1], {**ENVIRONMENT, **gpu})
    for record in found:
        result = record.get("error") or f"{record['peak'] / 1e6:.1f} MB, {min(record['samples_ms']):.1f} ms"
        say(f"  {record['variant']}: {result}")
    return [{**what, **record} for record in found]
