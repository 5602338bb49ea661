"""How much memory does each stage take during a step, beyond what it has between steps?"""

from __future__ import annotations

import time

from benchmarks.children import Children
from benchmarks.data_parallel.processes import say
from benchmarks.process_files import announce, announced, peak, reset_peak, resident

STAGES = 4
MICROBATCHES = 8
LAYERS = 16
WIDTH = 512
# Of a micro-batch: an activation is as large as a layer's weights, and a micro-batch keeps several for each layer.
ROWS = 512
# glibc gives blocks from this size on back to the system as soon as they are freed: what a process has is what it uses.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "0",
    "MALLOC_ARENA_MAX": "2",
    # With oneDNN, TensorFlow has an allocator that keeps what is freed.
    "TF_ENABLE_ONEDNN_OPTS": "0",
}

VARIANTS: dict[str, dict] = {
    "gpipe": {"schedule": "gpipe", "memory": "none"},
    "1f1b": {"schedule": "1f1b", "memory": "none"},
    '1f1b, weight_gradients="batched"': {"schedule": "1f1b", "memory": "none", "weight_gradients": "batched"},
    'gpipe, memory="recompute"': {"schedule": "gpipe", "memory": "recompute"},
    '1f1b, memory="recompute"': {"schedule": "1f1b", "memory": "recompute"},
}
_STEPS = 2
_REST = 0.5


def measure(children: Children, samples: int, quick: bool) -> list[dict]:
    """One record for each variant, with a list of the stages' bytes for each sample."""
    records = []
    for title, arguments in VARIANTS.items():
        say(f"memory: {title} ...")
        settings = {"arguments": arguments, "samples": 1 if quick else samples}
        found = children.stages(f"{__package__}.memory", settings, STAGES, ENVIRONMENT)
        records.append({"variant": title, **found})
        say(f"  at most {', '.join(f'{max(each) / 1e6:.1f}' for each in zip(*found['peaks'], strict=True))} MB")
    return records


def main(settings: dict) -> dict:
    """Measures one variant; returns, in bytes for each stage, what it has between steps and how much more in them."""
    import keras
    import tensorflow as tf

    import tfdist

    announce(settings["folder"], tfdist.discover().rank)
    strategy = tfdist.PipelineStrategy(num_microbatches=MICROBATCHES, **settings["arguments"])
    with strategy.scope():
        layers = [keras.layers.Dense(WIDTH, "gelu") for _ in range(LAYERS)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers])
        model.compile("sgd", "mse", jit_compile=False)
    strategy._prepare(model)
    pids = announced(settings["folder"], STAGES)
    batch = tf.random.uniform([MICROBATCHES * ROWS, WIDTH])
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
    return {"at_start": at_start, "idle": idle, "peaks": peaks}
