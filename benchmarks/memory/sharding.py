"""What does it cost, and what does it save, to split the optimizer's slots over two replicas?"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from typing import Any

from benchmarks.children import Children
from benchmarks.data_parallel.processes import say
from benchmarks.logical_cpus import logical_cpus
from benchmarks.memory.shapes import SHARDED
from benchmarks.windows import FitWindows, take_turns

MIRRORED, WORKERS = "MirroredStrategy, 2 logical CPUs", "MultiWorkerMirroredStrategy, 2 processes"


def measure(children: Children, samples: int, quick: bool) -> list[dict]:
    """One record for each strategy, model and optimizer."""
    records = []
    for shape, numbers in SHARDED.items():
        say(f"sharding: {numbers.title} ...")
        settings = {"shape": shape, "samples": samples, "steps": 2 if quick else 8}
        worker = f"{__package__}.sharding"
        # Two replicas compute at the same time.
        alone = children.python(worker, {**settings, "mirrored": True}, children.cores)
        records += _of(shape, MIRRORED, alone)
        records += _of(shape, WORKERS, children.workers(worker, {**settings, "mirrored": False}, {}))
    return records


def _of(shape: str, strategy: str, found: Sequence[dict]) -> list[dict]:
    for record in found:
        kind = "sharded" if record["sharded"] else "whole"
        say(f"  {strategy}, {kind}: {min(record['samples_ms']):.1f} ms, {record['slot_bytes'] / 1e6:.1f} MB a replica")
    return [{"shape": shape, "strategy": strategy, **record} for record in found]


def main(settings: dict) -> list[dict] | None:
    """Measures both in turns; the chief returns a record of each."""
    import keras

    import tfdist
    from benchmarks.pipeline.keras_models import repeated_batch

    if settings["mirrored"]:
        strategy = tfdist.MirroredStrategy(logical_cpus(2))
    else:
        strategy = tfdist.MultiWorkerMirroredStrategy()
    shape = SHARDED[settings["shape"]]
    data = repeated_batch(shape)
    records, trials = [], []
    for sharded in (False, True):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            layers = [keras.layers.Dense(shape.width, "relu") for _ in range(shape.layers)]
            model = keras.Sequential([keras.Input(shape.batch_shape[1:]), *layers])
            optimizer = keras.optimizers.Adam()
            model.compile(tfdist.ShardedOptimizer(optimizer) if sharded else optimizer, "mse", jit_compile=False)
            before = bytes_of_variables()
            model.optimizer.build(model.trainable_variables)
        after = bytes_of_variables()
        # The first device of this process; all have as much, the first one the counter, too.
        device = min(after)
        records.append({"sharded": sharded, "slot_bytes": after[device] - before.get(device, 0)})
        trials.append(FitWindows(model, data, [os.getpid()], steps=settings["steps"]))
    take_turns(trials, settings["samples"])
    found = [{**record, **trial.record} for record, trial in zip(records, trials, strict=True)]
    return found if settings["mirrored"] or strategy.is_chief else None


def bytes_of_variables() -> dict[str, int]:
    """By device, of all TensorFlow variables that exist in this process, whoever keeps them."""
    from tensorflow.python.ops.resource_variable_ops import ResourceVariable

    gc.collect()
    found: dict[str, Any] = {}
    for item in gc.get_objects():
        if type(item) is ResourceVariable:
            found[item.device] = found.get(item.device, 0) + item.shape.num_elements() * item.dtype.size
    return found
