"""What is kept for the backward pass: how many bytes does a step need, and how long does it take?"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from benchmarks.children import Children
from benchmarks.data_parallel.processes import say
from benchmarks.memory.shapes import DEPTH_OF_XLA, DEPTHS, SHAPES
from benchmarks.memory.variants import OFFLOAD, ON_DEVICE, WITH_HOST
from benchmarks.windows import FitWindows, take_turns

ENVIRONMENT = {
    # TensorFlow counts what this allocator gives out; the usual one of CPUs is not counted.
    "TF_CPU_ALLOCATOR_USE_BFC": "1",
    # Several threads compute what is ready in any order: what is there at a time would differ from run to run.
    "TF_NUM_INTEROP_THREADS": "1",
}
_SECONDS = 0.6
_WORDS = 30


def measure(children: Children, samples: int, quick: bool) -> list[dict]:
    """One record for each model, depth and variant, with or without XLA."""
    cases = [(shape, depth, False) for depth in (DEPTHS[:1] if quick else DEPTHS) for shape in SHAPES]
    cases.append((next(iter(SHAPES)), DEPTHS[0] if quick else DEPTH_OF_XLA, True))
    return [record for case in cases for record in _of(children, samples, *case)]


def _of(children: Children, samples: int, shape: str, depth: int, jit_compile: bool) -> Sequence[dict]:
    say(f"activations: {SHAPES[shape].title}, {depth} blocks{', XLA' if jit_compile else ''} ...")
    what = {"shape": shape, "depth": depth, "jit_compile": jit_compile}
    settings = {**what, "variants": ON_DEVICE, "samples": samples, "seconds": _SECONDS}
    # The benchmark's processes see no GPU otherwise.
    gpu = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
    found = children.python(f"{__package__}.activations", settings, children.cores[:1], {**ENVIRONMENT, **gpu})
    for record in found:
        result = record.get("error") or f"{record['peak'] / 1e6:.1f} MB, {min(record['samples_ms']):.1f} ms"
        say(f"  {record['variant']}: {result}")
    return [{**what, **record} for record in found]


def main(settings: dict) -> list[dict]:
    """Measures all variants in turns and returns a record of each."""
    import tensorflow as tf

    from benchmarks.memory.keras_models import compiled
    from benchmarks.pipeline.keras_models import repeated_batch

    shape, xla = SHAPES[settings["shape"]], settings["jit_compile"]
    variants, device = settings["variants"], "CPU:0"
    if tf.config.list_physical_devices("GPU"):
        device = "GPU:0"
        # XLA has one device.
        variants = [*variants, *([] if xla else WITH_HOST)]
    data = repeated_batch(shape)
    records, trials = [], []
    for variant in variants:
        record = {"variant": variant, "device": device}
        records.append(record)
        try:
            model = compiled(variant, shape, settings["depth"], device if variant == OFFLOAD else "", xla)
            record["peak"] = peak_of_step(model, data, device)
            settle = tf.test.experimental.sync_devices
            trials.append((record, FitWindows(model, data, [os.getpid()], settings["seconds"], settle=settle)))
        except Exception as error:  # a peer that fails is a result
            record["error"] = _words(error)
    take_turns([trial for _, trial in trials], settings["samples"])
    for record, trial in trials:
        record.update(trial.record)
    return records


def peak_of_step(model: Any, data: Any, device: str, steps: int = 2) -> int:
    """Bytes that the last of some steps adds to what is in use before it.

    Args:
        model: a compiled model.
        data: a dataset of batches.
        device: whose memory TensorFlow counts.
        steps: how many are made.
    """
    import keras
    from tensorflow.config import experimental

    found = []

    class Measure(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            experimental.reset_memory_stats(device)
            self._before = experimental.get_memory_info(device)["current"]

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            found.append(experimental.get_memory_info(device)["peak"] - self._before)

    model.fit(data, steps_per_epoch=steps, shuffle=False, verbose=0, callbacks=[Measure()])
    return found[-1]


def _words(error: Exception) -> str:
    """The kind of an error and what it says first, on one line."""
    return " ".join([f"{type(error).__name__}:", *str(error).split()[:_WORDS]])
