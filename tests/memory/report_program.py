"""Prints what a report estimates for a training step, and what one needs, with and without a policy, in bytes.

python -m tests.memory.report_program <model>...
"""

from __future__ import annotations

import json
import os
import sys

# TensorFlow counts what this allocator gives out; the usual one of CPUs is not counted.
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "1"

import keras
import numpy as np
import tensorflow as tf

from benchmarks.memory.activations import peak_of_step
from tests.logical.memory_models import MODELS, data
from tests.memory import peak_program
from tfdist import memory

ROWS = {"resnet": 512, "transformer": 2048}
BLOCKS = 12


def described(name: str) -> dict[str, dict[str, int]]:
    """Bytes of a step by policy: estimated and measured."""
    found = {}
    for policy in ("none", "recompute"):
        keras.utils.set_random_seed(0)
        if name == "blocks":
            model, rows, loss = peak_program.build(BLOCKS), peak_program.ROWS, "mse"
            batch = [np.ones((rows, peak_program.WIDTH), "float32"), np.ones((rows, 1), "float32")]
        else:
            model, rows, loss = MODELS[name](), ROWS[name], "sparse_categorical_crossentropy"
            batch = data(name, rows)
        memory.apply(model, policy).compile("adam", loss)
        device = memory.report(model, rows)["CPU:0"]
        measured = peak_of_step(model, tf.data.Dataset.from_tensors(tuple(batch)).repeat(3), "CPU:0", steps=3)
        found[policy] = {"step": device.step, "measured": measured, "rest": device.total - device.step}
    return found


if __name__ == "__main__":
    # Several threads compute what is ready in any order: what is in use at a time would differ from run to run.
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    print(json.dumps({name: described(name) for name in sys.argv[1:]}))
