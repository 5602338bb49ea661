"""Prints what a training step adds to the memory in use at its peak, in bytes, for each mode that is asked for.

python -m tests.memory.peak_program <blocks> <mode>...
"""

from __future__ import annotations

import json
import os
import sys

# TensorFlow counts what this allocator gives out; the usual one of CPUs is not counted.
os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "1")

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from benchmarks.memory.activations import peak_of_step
from tfdist import memory

WIDTH, ROWS = 64, 2048


def build(blocks: int) -> keras.Model:
    """Blocks that make twelve times what goes into them."""
    x = inputs = keras.Input((WIDTH,))
    for index in range(blocks):
        inner = [layers.Dense(4 * WIDTH, activation="gelu"), layers.Dropout(0.1), layers.Dense(WIDTH)]
        x = layers.Add()([x, keras.Sequential([keras.Input((WIDTH,)), *inner], name=f"block_{index}")(x)])
    return keras.Model(inputs, layers.Dense(1)(x))


def peak(blocks: int, mode: str) -> int:
    """Bytes that the last of three steps adds to what is in use before it."""
    keras.utils.set_random_seed(0)
    model = build(blocks)
    model.compile("adam", "mse", jit_compile=False)
    if mode != "none":
        memory.apply(model, memory.MemoryPolicy(mode, [f"block_{index}" for index in range(blocks)]))
    x, y = np.ones((ROWS, WIDTH), "float32"), np.ones((ROWS, 1), "float32")
    data = tf.data.Dataset.from_tensors((x, y)).repeat(3)
    return peak_of_step(model, data, "CPU:0", steps=3)


if __name__ == "__main__":
    # Several threads compute what is ready in any order: what is in use at a time would differ from run to run.
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    print(json.dumps({mode: peak(int(sys.argv[1]), mode) for mode in sys.argv[2:]}))
