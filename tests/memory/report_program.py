"""Prints what a report estimates and measures for a training step, with and without a policy, in bytes.

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

from tests.logical.memory_models import MODELS
from tests.memory import peak_program
from tfdist import memory

ROWS = {"dense": 8192, "resnet": 512, "transformer": 2048, "written": 2048, "unet": 1024}
BLOCKS = 12
# Its skips can be computed early or late: peaks of one trace and another differ by a third.
TRACES = {"unet": 6}


def described(name: str) -> dict[str, dict[str, int]]:
    """Bytes by policy: estimated and measured, of the step and of all; and whether the report has changed weights."""
    keras.utils.set_random_seed(0)
    if name == "blocks":
        model, rows, loss = peak_program.build(BLOCKS), peak_program.ROWS, "mse"
    else:
        model, rows, loss = MODELS[name](), ROWS[name], "sparse_categorical_crossentropy"
    model.compile("adam", loss)
    data = None
    if name == "written":
        data = np.zeros((rows, 6), "int32"), np.zeros(rows, "int32")
    before = model.get_weights()
    found = {}
    for policy in ("none", "recompute"):
        # The executor's order, and with it the peak, is another one for each trace.
        reports = [
            memory.report(model, None if data else rows, policy, data=data, measured=True)
            for _ in range(TRACES.get(name, 1))
        ]
        devices = sorted((report["CPU:0"] for report in reports), key=lambda device: device.measured)
        device = devices[len(devices) // 2]
        found[policy] = {
            "step": device.step,
            "least step": devices[0].measured,
            "total": device.total,
            "measured total": device.total - device.step + device.measured,
            "changed": not all(map(np.array_equal, before, model.get_weights())),
        }
    return found


if __name__ == "__main__":
    # Several threads compute what is ready in any order: what is in use at a time would differ from run to run.
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    print(json.dumps({name: described(name) for name in sys.argv[1:]}))
