"""How much faster than one core are two stages with a core each, with tfdist and with PyTorch?"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.children import Children
from benchmarks.data_parallel.peers import installed
from benchmarks.data_parallel.processes import say
from benchmarks.pipeline.shapes import SHAPES

STAGES = 2
MICROBATCHES = (4, 8, 16)
# Of PipelineStrategy; the schedule is eager 1F1B unless it says otherwise.
OPTIONS: tuple[dict[str, str], ...] = ({"schedule": "1f1b"}, {}, {"weight_gradients": "batched"})
_KERAS, _TORCH = f"{__package__}.keras_worker", f"{__package__}.torch_worker"


def measure(children: Children, samples: int, quick: bool) -> list[dict]:
    """One record for each model, framework and variant; that with 1 stage is the model without a pipeline.

    The first record of a framework is the one with 1 stage. In the others, processes are in the order of their ranks.
    """
    counts = MICROBATCHES[:1] if quick else MICROBATCHES
    first = children.cores[:1]
    with_torch = installed("torch")
    if not with_torch:
        say("PyTorch is left out: torch is not installed. Install it by `pip install torch`.")
    records = []
    for name in list(SHAPES)[:1] if quick else SHAPES:
        settings = {"shape": name, "samples": samples}
        say(f"compute: {SHAPES[name].title} ...")
        keras = [{"microbatches": m, **options} for options in OPTIONS for m in counts]
        records += _of(name, "tfdist", 1, children.python(_KERAS, {**settings, "variants": [{}]}, first))
        records += _of(name, "tfdist", STAGES, children.stages(_KERAS, {**settings, "variants": keras}, STAGES, {}))
        if with_torch:
            torch = [{"microbatches": m} for m in counts]
            records += _of(name, "torch", 1, children.python(_TORCH, {**settings, "variants": [{}]}, first))
            records += _of(name, "torch", STAGES, children.ranks(_TORCH, {**settings, "variants": torch}))
    return records


def _of(shape: str, framework: str, stages: int, found: Sequence[dict]) -> list[dict]:
    for record in found:
        milliseconds = min(record["samples_ms"])
        say(f"  {framework}, {stages} stage{'s' if stages > 1 else ''}, {record['variant']}: {milliseconds:.1f} ms")
    return [{"shape": shape, "framework": framework, "stages": stages, **record} for record in found]
