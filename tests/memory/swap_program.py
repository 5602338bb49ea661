"""Prints what each device holds at the peak of a training step, in bytes, by the mode of a memory policy.

python -m tests.memory.swap_program <blocks> <mode>...

"swap at once" and "recompute+swap at once" fetch everything as soon as there is a gradient. How many of the few copies
of the latter are there before the first block is done differs from run to run: the highest peak of some steps counts.
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

from benchmarks.memory.liveness import held_in_step
from tests.memory.peak_program import ROWS, WIDTH, build
from tfdist import memory

DEVICE, HOST = "CPU:1", "CPU:0"


def measure(blocks: int, kind: str) -> dict[str, int]:
    """Bytes that a step makes on each device, at its peak."""
    keras.utils.set_random_seed(0)
    with tf.distribute.OneDeviceStrategy(DEVICE).scope():
        model = build(blocks)
        model.compile("adam", "mse")
    mode, _, at_once = kind.partition(" ")
    names = [f"block_{index}" for index in range(blocks)]
    memory.apply(model, memory.MemoryPolicy(mode, names, host=HOST, prefetch=blocks if at_once else 1))
    x, y = np.ones((ROWS, WIDTH), "float32"), np.ones((ROWS, 1), "float32")
    model.fit(x, y, batch_size=ROWS, verbose=0)
    steps = [held_in_step(model, x, y) for _ in range(3 if kind == "recompute+swap at once" else 1)]
    return {device: max(step[device].peak for step in steps) for device in steps[0]}


if __name__ == "__main__":
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    print(json.dumps({kind: measure(int(sys.argv[1]), kind) for kind in sys.argv[2:]}))
