"""A process that trains with Adam, whole and sharded in turns: all replicas, or one worker of two."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.memory.shapes import SHARDED
from benchmarks.windows import FitWindows


def main(text: str, path: str) -> None:
    """Measures both in turns; the chief writes a record of each."""
    import keras
    import tensorflow as tf

    import tfdist
    from benchmarks.pipeline.keras_models import repeated_batch

    settings = json.loads(text)
    if settings["mirrored"]:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
        strategy = tfdist.MirroredStrategy(["CPU:0", "CPU:1"])
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
    for _ in range(settings["samples"]):
        for trial in trials:
            trial.run()
    if settings["mirrored"] or strategy.is_chief:
        found = [{**record, **trial.record} for record, trial in zip(records, trials, strict=True)]
        Path(path).write_text(json.dumps(found))


def bytes_of_variables() -> dict[str, int]:
    """By device, of all TensorFlow variables that exist in this process, whoever keeps them."""
    from tensorflow.python.ops.resource_variable_ops import ResourceVariable

    gc.collect()
    found: dict[str, Any] = {}
    for item in gc.get_objects():
        if type(item) is ResourceVariable:
            found[item.device] = found.get(item.device, 0) + item.shape.num_elements() * item.dtype.size
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
