"""How long does `fit` take to its first step, most of which is tracing?"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.children import Children
from benchmarks.data_parallel.processes import say
from benchmarks.logical_cpus import logical_cpus

MODEL = "ResNet50"
ROWS = 8
# Strategy and number of logical devices.
CASES = (
    ("none", 1),
    ("stock", 2),
    ("tfdist", 2),
    ("tfdist, local", 2),
    ("stock", 4),
    ("tfdist", 4),
    ("tfdist, local", 4),
)


def measure(children: Children, samples: int, quick: bool) -> list[dict]:
    """One record for each case; each sample is a process of its own, and the cases take turns."""
    records = [{"strategy": strategy, "devices": devices, "seconds": []} for strategy, devices in CASES]
    for sample in range(1 if quick else samples):
        for record in records:
            say(f"first step: {record['strategy']}, {record['devices']} devices, sample {sample + 1} ...")
            settings = {"strategy": record["strategy"], "devices": record["devices"]}
            seconds = children.python(f"{__package__}.first_step", settings, cores=children.cores[:1])
            record["seconds"].append(seconds)
    return records


def main(settings: dict) -> float:
    """Measures one case in this process and returns the seconds."""
    from benchmarks.compiling.models import compiled, repeated_batch

    strategy = _strategy(settings["strategy"], logical_cpus(settings["devices"]))
    # What TensorFlow does once in a process is in none.
    for name in ("CNN", MODEL):
        with strategy.scope():
            model = compiled(name)
        data = repeated_batch(model, ROWS)
        began = time.perf_counter()
        model.fit(data, steps_per_epoch=1, shuffle=False, verbose=0)
        seconds = time.perf_counter() - began
    return seconds


def _strategy(name: str, devices: list[str]) -> Any:
    import tensorflow as tf

    import tfdist

    if name == "none":
        return tf.distribute.get_strategy()
    if name == "stock":
        return tf.distribute.MirroredStrategy(devices)
    return tfdist.MirroredStrategy(devices, batch_norm="local" if name.endswith("local") else "global")
