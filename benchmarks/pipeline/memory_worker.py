"""A stage whose memory is measured; the first one drives and measures them all."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from benchmarks.pipeline import memory
from benchmarks.process_files import announce, announced, peak, reset_peak, resident

_STEPS = 2
_REST = 0.5


def main(text: str, path: str) -> None:
    """Measures one variant and writes, in bytes for each stage, what it has between steps and how much more in them."""
    import keras
    import tensorflow as tf

    import tfdist

    settings = json.loads(text)
    announce(settings["folder"], tfdist.discover().rank)
    strategy = tfdist.PipelineStrategy(num_microbatches=memory.MICROBATCHES, **settings["arguments"])
    with strategy.scope():
        layers = [keras.layers.Dense(memory.WIDTH, "gelu") for _ in range(memory.LAYERS)]
        model = keras.Sequential([keras.Input((memory.WIDTH,)), *layers])
        model.compile("sgd", "mse", jit_compile=False)
    strategy._prepare(model)
    pids = announced(settings["folder"], memory.STAGES)
    batch = tf.random.uniform([memory.MICROBATCHES * memory.ROWS, memory.WIDTH])
    dataset = tf.data.Dataset.from_tensors((batch, batch)).repeat()
    at_start = [resident(pid) for pid in pids]
    idle, peaks = [], []
    for sample in range(1 + settings["samples"]):
        time.sleep(_REST)
        before = [resident(pid) for pid in pids]
        for pid in pids:
            reset_peak(pid)
        model.fit(dataset, steps_per_epoch=_STEPS, shuffle=False, verbose=0)
        # The first time the step is traced, and libraries are loaded.
        if sample > 0:
            idle.append(before)
            peaks.append([peak(pid) - rest for pid, rest in zip(pids, before, strict=True)])
    Path(path).write_text(json.dumps({"at_start": at_start, "idle": idle, "peaks": peaks}))


if __name__ == "__main__":
    main(*sys.argv[1:])
