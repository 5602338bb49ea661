"""How long does a training step take with XLA and without, in one process and under a strategy?"""

from __future__ import annotations

import os

from benchmarks.children import Children
from benchmarks.data_parallel.processes import say
from benchmarks.logical_cpus import logical_cpus

MODELS = ("CNN", "Transformer block")
ROWS = 32
DEVICES = 2


def measure(children: Children, samples: int, quick: bool) -> list[dict]:
    """One record for each model, number of devices, and with XLA or without; all take turns in one process."""
    records = []
    for model in MODELS:
        say(f"steps: {model} ...")
        settings = {"model": model, "samples": 2 if quick else 4 * samples}
        records += children.python(f"{__package__}.xla_steps", settings, cores=children.cores[:1])
    return records


def main(settings: dict) -> list[dict]:
    """Measures the variants of one model in turns and returns a record of each."""
    import tensorflow as tf

    import tfdist
    from benchmarks.compiling.models import compiled, repeated_batch
    from benchmarks.windows import FitWindows, take_turns

    strategies = {1: tf.distribute.get_strategy(), DEVICES: tfdist.MirroredStrategy(logical_cpus(DEVICES))}
    trials = {}
    for devices, strategy in strategies.items():
        for jit_compile in (False, True):
            with strategy.scope():
                model = compiled(settings["model"], jit_compile)
            trials[devices, jit_compile] = FitWindows(model, repeated_batch(model, ROWS), [os.getpid()])
    take_turns(trials.values(), settings["samples"])
    return [
        {"model": settings["model"], "devices": devices, "jit_compile": jit_compile, **trial.record}
        for (devices, jit_compile), trial in trials.items()
    ]
