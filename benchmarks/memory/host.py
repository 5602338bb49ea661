"""What is left on the device if activations, or weights, spend their time on the host?"""

from __future__ import annotations

from benchmarks.children import Children
from benchmarks.data_parallel.processes import say
from benchmarks.logical_cpus import logical_cpus
from benchmarks.memory.shapes import DEPTHS, SHAPES
from benchmarks.memory.variants import OFFLOAD, PLAIN, RECOMPUTE, RECOMPUTE_SWAP, SWAP

VARIANTS = (PLAIN, RECOMPUTE, RECOMPUTE_SWAP, SWAP, OFFLOAD)
_SHAPE = "mlp"
DEVICE = "CPU:1"
PLACES = {"device": DEVICE, "host": "CPU:0"}


def measure(children: Children, samples: int, quick: bool) -> list[dict]:
    """One record for each variant and depth."""
    depths = DEPTHS[:1] if quick else DEPTHS
    say(f"host: {', '.join(map(str, depths))} blocks ...")
    settings = {"shape": _SHAPE, "depths": depths, "variants": VARIANTS}
    return children.python(f"{__package__}.host", settings, children.cores)


def main(settings: dict) -> list[dict]:
    """Follows a step of each variant and depth, and returns a record of each."""
    import numpy as np

    from benchmarks.memory.keras_models import compiled
    from benchmarks.memory.liveness import held_in_step

    logical_cpus(2)
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
    return records
