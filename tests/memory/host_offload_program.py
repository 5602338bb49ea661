"""Prints what each device holds at the peak of a step, in bytes, with the weights on the host or on the device.

python -m tests.memory.host_offload_program <depth> <offload | all at once | plain>...
"""

from __future__ import annotations

import json
import sys

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdist
from benchmarks.memory.liveness import held_in_step

WIDTH, ROWS = 256, 64


def build(depth: int) -> keras.Model:
    """Blocks whose weights need more than what they compute, with Dropout, BatchNormalization and a regularizer."""
    x = inputs = keras.Input((WIDTH,))
    for _ in range(depth):
        y = layers.Dropout(0.1)(layers.Dense(WIDTH, activation="relu", kernel_regularizer="l2")(x))
        x = layers.Add()([x, layers.BatchNormalization()(y)])
    return keras.Model(inputs, layers.Dense(1)(x))


# What is asked of each way to train: a step that is followed operation by operation takes long.
STEPS = {"offload": ("train_step", "test_step"), "all at once": ("test_step",), "plain": ("train_step",)}


def measure(depth: int, kind: str) -> dict[str, dict[str, int]]:
    """Bytes at the peak and all the time, by device, of a train and a test step, or one of them."""
    keras.utils.set_random_seed(0)
    if kind == "plain":
        strategy = tf.distribute.OneDeviceStrategy("CPU:1")
    else:
        strategy = tfdist.HostOffloadStrategy("CPU:1", "CPU:0", prefetch=1 if kind == "offload" else 10 * depth)
    with strategy.scope():
        model = build(depth)
        model.compile("adam", "mse")
    x, y = np.ones((ROWS, WIDTH), "float32"), np.ones((ROWS, 1), "float32")
    model.fit(x, y, batch_size=ROWS, verbose=0)
    found = {}
    for name in STEPS[kind]:
        for device, usage in held_in_step(model, x, y, name).items():
            found[f"{name} {device}"] = {"peak": usage.peak, "resident": usage.resident}
    return found


if __name__ == "__main__":
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    print(json.dumps({kind: measure(int(sys.argv[1]), kind) for kind in sys.argv[2:]}))
