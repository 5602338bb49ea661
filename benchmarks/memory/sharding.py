"""What does it cost, and what does it save, to split the optimizer's slots over two replicas?"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.children import Children
from benchmarks.data_parallel.processes import say
from benchmarks.memory.shapes import SHARDED

MIRRORED, WORKERS = "MirroredStrategy, 2 logical CPUs", "MultiWorkerMirroredStrategy, 2 processes"


def measure(children: Children, samples: int, quick: bool) -> list[dict]:
    """One record for each strategy, model and optimizer."""
    records = []
    for shape, numbers in SHARDED.items():
        say(f"sharding: {numbers.title} ...")
        settings = {"shape": shape, "samples": samples, "steps": 2 if quick else 8}
        worker = f"{__package__}.sharding_worker"
        # Two replicas compute at the same time.
        alone = children.python(worker, {**settings, "mirrored": True}, children.cores)
        records += _of(shape, MIRRORED, alone)
        records += _of(shape, WORKERS, children.workers(worker, {**settings, "mirrored": False}, {}))
    return records


def _of(shape: str, strategy: str, found: Sequence[dict]) -> list[dict]:
    for record in found:
        kind = "sharded" if record["sharded"] else "whole"
        say(f"  {strategy}, {kind}: {min(record['samples_ms']):.1f} ms, {record['slot_bytes'] / 1e6:.1f} MB a replica")
    return [{"shape": shape, "strategy": strategy, **record} for record in found]
