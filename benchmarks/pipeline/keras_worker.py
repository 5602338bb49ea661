"""A process with Keras: the whole model without a strategy, or a stage of PipelineStrategy. The first one measures."""

from __future__ import annotations

import os

from benchmarks.pipeline.real_compute import STAGES
from benchmarks.pipeline.shapes import SHAPES
from benchmarks.process_files import announce, announced
from benchmarks.windows import FitWindows, take_turns


def main(settings: dict) -> list[dict]:
    """Measures all variants in turns and returns a record of each."""
    import tensorflow as tf

    import tfdist
    from benchmarks.pipeline.keras_models import compiled, repeated_batch

    cluster = tfdist.discover()
    if cluster.num_workers > 1:
        announce(settings["folder"], cluster.rank)
    shape = SHAPES[settings["shape"]]
    trials = []
    for variant in settings["variants"]:
        options = {"num_microbatches" if name == "microbatches" else name: value for name, value in variant.items()}
        strategy = tfdist.PipelineStrategy(**options) if variant else tf.distribute.get_strategy()
        # Servers do not come here.
        pids = announced(settings["folder"], STAGES) if variant else [os.getpid()]
        with strategy.scope():
            model = compiled(shape)
        trials.append(FitWindows(model, repeated_batch(shape), pids))
    take_turns(trials, settings["samples"])
    return [{"variant": v, **trial.record} for v, trial in zip(settings["variants"], trials, strict=True)]
