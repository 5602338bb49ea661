"""Prints what each device holds at the peak of a pipeline's training step, in bytes, by its memory mode.

python -m tests.memory.pipeline_program <schedule> <micro-batches> <mode>...
"""

from __future__ import annotations

import json
import os
import sys

# It gives out more than it is asked for, not always the same.
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "0"

import keras
import numpy as np
import tensorflow as tf

import tfdist
from benchmarks.memory.liveness import held_in_step
from tests.memory.peak_program import WIDTH, build

# Of a micro-batch.
ROWS = 2048
STAGES, HOST = ["CPU:1", "CPU:2"], "CPU:0"
BLOCKS = 4


def measure(schedule: str, microbatches: int, mode: str) -> dict[str, int]:
    """Bytes that a step makes on each device, at its peak."""
    policy = tfdist.memory.MemoryPolicy(mode, host=HOST)
    strategy = tfdist.PipelineStrategy(STAGES, num_microbatches=microbatches, schedule=schedule, memory=policy)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build(BLOCKS)
        model.compile("sgd", "mse")
    rows = microbatches * ROWS
    x, y = np.ones((rows, WIDTH), "float32"), np.ones((rows, 1), "float32")
    model.fit(x, y, batch_size=rows, verbose=0)
    return {device: usage.peak for device, usage in held_in_step(model, x, y).items()}


if __name__ == "__main__":
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
    print(json.dumps({mode: measure(sys.argv[1], int(sys.argv[2]), mode) for mode in sys.argv[3:]}))
