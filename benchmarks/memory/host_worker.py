"""A process with two logical CPUs, one of which is the device, and the other one the host."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.memory.shapes import SHAPES

DEVICE = "CPU:1"
PLACES = {"device": DEVICE, "host": "CPU:0"}


def main(text: str, path: str) -> None:
    """Follows a step of each variant and depth, and writes a record of each."""
    import numpy as np
    import tensorflow as tf

    from benchmarks.memory.keras_models import compiled
    from benchmarks.memory.liveness import held_in_step

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    settings = json.loads(text)
    shape = SHAPES[settings["shape"]]
    x = np.ones(shape.batch_shape, "float32")
    records = []
    for depth in settings["depths"]:
        for variant in settings["variants"]:
            model = compiled(variant, shape, depth, DEVICE)
            model.fit(x, x, batch_size=len(x), verbose=0)
            found = held_in_step(model, x, x)
            bytes_of = {name: found[device].peak + found[device].resident for name, device in PLACES.items()}
            records.append({"shape": settings["shape"], "depth": depth, "variant": variant, **bytes_of})
    Path(path).write_text(json.dumps(records))


if __name__ == "__main__":
    main(*sys.argv[1:])
