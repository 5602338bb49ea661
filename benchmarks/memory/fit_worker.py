"""A process that trains one model in all variants, and measures the bytes and the time of a step."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.memory.shapes import SHAPES
from benchmarks.memory.variants import OFFLOAD, WITH_HOST
from benchmarks.windows import FitWindows

_WORDS = 30


def main(text: str, path: str) -> None:
    """Measures all variants in turns and writes a record of each."""
    import tensorflow as tf

    from benchmarks.memory.keras_models import compiled
    from benchmarks.pipeline.keras_models import repeated_batch

    settings = json.loads(text)
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
    for _ in range(settings["samples"]):
        for _, trial in trials:
            trial.run()
    for record, trial in trials:
        record.update(trial.record)
    Path(path).write_text(json.dumps(records))


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


if __name__ == "__main__":
    main(*sys.argv[1:])
