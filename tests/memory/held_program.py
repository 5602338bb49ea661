"""Prints what each device holds at the peak of a training step, and all the time, in bytes, for each mode.

python -m tests.memory.held_program <swap | pipeline | offload> <blocks, micro-batches or layers> <mode>...
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys

# It gives out more than it is asked for, not always the same.
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "0"

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdist
from benchmarks.memory.liveness import Held, held_in_step
from tests.memory.peak_program import ROWS, WIDTH, build
from tfdist import memory

HOST, DEVICES = "CPU:0", ["CPU:1", "CPU:2"]
STAGES_BLOCKS = 4
OFFLOADED_WIDTH, OFFLOADED_ROWS = 256, 64


def heavy(depth: int) -> keras.Model:
    """Blocks whose weights need more than what they compute, with Dropout, BatchNormalization and a regularizer."""
    x = inputs = keras.Input((OFFLOADED_WIDTH,))
    for _ in range(depth):
        y = layers.Dropout(0.1)(layers.Dense(OFFLOADED_WIDTH, activation="relu", kernel_regularizer="l2")(x))
        x = layers.Add()([x, layers.BatchNormalization()(y)])
    return keras.Model(inputs, layers.Dense(1)(x))


def held(where: str, count: int, mode: str) -> dict[str, Held]:
    """What each device holds in a step of a model of so many blocks, or with so many micro-batches."""
    keras.utils.set_random_seed(0)
    blocks, rows, width = count, ROWS, WIDTH
    policy = memory.MemoryPolicy(mode if mode in ("swap", "recompute", "recompute+swap") else "none", host=HOST)
    if where == "offload":
        rows, width = OFFLOADED_ROWS, OFFLOADED_WIDTH
        plain = tf.distribute.OneDeviceStrategy(DEVICES[0])
        strategy = tfdist.HostOffloadStrategy(DEVICES[0], HOST) if mode == "stream" else plain
    elif where == "pipeline":
        blocks, rows = STAGES_BLOCKS, count * ROWS
        strategy = tfdist.PipelineStrategy(DEVICES, num_microbatches=count, schedule="gpipe", memory=policy)
    else:
        strategy = tf.distribute.OneDeviceStrategy(DEVICES[0])
    with strategy.scope():
        model = (heavy if where == "offload" else build)(blocks)
        model.compile("adam", "mse")
    if where == "swap":
        memory.apply(model, dataclasses.replace(policy, blocks=[f"block_{index}" for index in range(blocks)]))
    x, y = np.ones((rows, width), "float32"), np.ones((rows, 1), "float32")
    model.fit(x, y, batch_size=rows, verbose=0)
    return held_in_step(model, x, y)


if __name__ == "__main__":
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
    where, count, *modes = sys.argv[1:]
    found = {mode: held(where, int(count), mode) for mode in modes}
    print(json.dumps({mode: {k: [v.peak, v.resident] for k, v in of.items()} for mode, of in found.items()}))
