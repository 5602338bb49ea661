"""How much memory does each stage take during a step, beyond what it has between steps?"""

from __future__ import annotations

from benchmarks.children import Children
from benchmarks.data_parallel.processes import say

STAGES = 4
MICROBATCHES = 8
LAYERS = 16
WIDTH = 512
# Of a micro-batch: an activation is as large as a layer's weights, and a micro-batch keeps several for each layer.
ROWS = 512
# glibc gives blocks from this size on back to the system as soon as they are freed: what a process has is what it uses.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "0",
    "MALLOC_ARENA_MAX": "2",
    # With oneDNN, TensorFlow has an allocator that keeps what is freed.
    "TF_ENABLE_ONEDNN_OPTS": "0",
}

VARIANTS: dict[str, dict] = {
    "gpipe": {"schedule": "gpipe", "memory": "none"},
    "1f1b": {"schedule": "1f1b", "memory": "none"},
    '1f1b, weight_gradients="batched"': {"schedule": "1f1b", "memory": "none", "weight_gradients": "batched"},
    'gpipe, memory="recompute"': {"schedule": "gpipe", "memory": "recompute"},
    '1f1b, memory="recompute"': {"schedule": "1f1b", "memory": "recompute"},
}


def measure(children: Children, samples: int, quick: bool) -> list[dict]:
    """One record for each variant, with a list of the stages' bytes for each sample."""
    records = []
    for title, arguments in VARIANTS.items():
        say(f"memory: {title} ...")
        settings = {"arguments": arguments, "samples": 1 if quick else samples}
        found = children.stages(f"{__package__}.memory_worker", settings, STAGES, ENVIRONMENT)
        records.append({"variant": title, **found})
        say(f"  at most {', '.join(f'{max(each) / 1e6:.1f}' for each in zip(*found['peaks'], strict=True))} MB")
    return records
