"""What is left on the device if activations, or weights, spend their time on the host?"""

from __future__ import annotations

from benchmarks.children import Children
from benchmarks.data_parallel.processes import say
from benchmarks.memory.shapes import DEPTHS
from benchmarks.memory.variants import OFFLOAD, PLAIN, RECOMPUTE, RECOMPUTE_SWAP, SWAP

VARIANTS = (PLAIN, RECOMPUTE, RECOMPUTE_SWAP, SWAP, OFFLOAD)
_SHAPE = "mlp"


def measure(children: Children, samples: int, quick: bool) -> list[dict]:
    """One record for each variant and depth."""
    depths = DEPTHS[:1] if quick else DEPTHS
    say(f"host: {', '.join(map(str, depths))} blocks ...")
    settings = {"shape": _SHAPE, "depths": depths, "variants": VARIANTS}
    return children.python(f"{__package__}.host_worker", settings, children.cores)
