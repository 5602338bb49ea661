"""The processes of each part, and the records that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.children import Children
from benchmarks.data_parallel.peers import installed
from benchmarks.data_parallel.processes import say
from benchmarks.pipeline.memory import ENVIRONMENT
from benchmarks.sharded.variants import MORE_ROWS, PLAIN, ROWS, SHARDED, VARIANTS

_WORKERS = {"tfdist": f"{__package__}.keras_worker", "torch": f"{__package__}.torch_worker"}
_WINDOWS = 6


def steps(children: Children, samples: int, quick: bool, rows: int = ROWS) -> list[dict]:
    """One record for each framework, number of processes and variant. All variants take turns in the same processes."""
    found: dict[tuple, dict] = {}
    settings = {"measure": "time", "windows": 1 if quick else _WINDOWS, "steps": 2, "rows": rows}
    for sample in range(samples):
        for framework in _frameworks():
            for processes, variants in ((1, [PLAIN]), (2, VARIANTS)):
                say(f"steps, {sample + 1} of {samples}: {framework}, processes: {processes} ...")
                for record in _run(children, framework, processes, variants, settings):
                    key = framework, processes, record["variant"]
                    found.setdefault(key, {**_of(*key), "rows": rows, "samples_ms": []})
                    found[key]["samples_ms"].append(record["samples_ms"])
                    say(f"  {record['variant']}: {min(record['samples_ms']):.0f} ms")
    return list(found.values())


def steps_of_more_tokens(children: Children, samples: int, quick: bool) -> list[dict]:
    """As `steps`, with more sequences."""
    return steps(children, samples, quick, MORE_ROWS)


def sent(children: Children, samples: int, quick: bool) -> list[dict]:
    """One record for each framework and variant."""
    settings = {"measure": "sent", "steps": 1, "rows": 1}
    records = []
    for framework in _frameworks():
        for record in _run(children, framework, 2, VARIANTS, settings):
            records.append({**_of(framework, 2, record["variant"]), "sent": record["sent"]})
            say(f"bytes: {framework}, {record['variant']}: {record['sent'] / 1e6:.1f} MB a step")
    return records


def memory(children: Children, samples: int, quick: bool) -> list[dict]:
    """One record for each framework, variant and number of processes, each in processes of its own."""
    records = []
    for framework in _frameworks():
        for variant in VARIANTS:
            # A tiny model shows what the program needs.
            for shape, processes in (("tiny", 2), ("full", 2), ("full", 4))[: 3 if variant == SHARDED else 2]:
                settings = {"measure": "memory", "shape": shape, "steps": 1, "rows": ROWS}
                (record,) = _run(children, framework, processes, [variant], settings, ENVIRONMENT)
                records.append({**_of(framework, processes, variant), "shape": shape, **record})
                say(f"  {framework}, {variant}, {shape}, processes: {processes}: {record}")
    return records


def _frameworks() -> list[str]:
    if installed("torch"):
        return list(_WORKERS)
    say("PyTorch is left out: torch is not installed. Install it by `pip install torch`.")
    return ["tfdist"]


def _of(framework: str, processes: int, variant: str) -> dict[str, Any]:
    return {"framework": framework, "processes": processes, "variant": variant}


def _run(
    children: Children,
    framework: str,
    processes: int,
    variants: Sequence[str],
    settings: Mapping[str, Any],
    env: Mapping[str, str] | None = None,
) -> list[dict]:
    module, env = _WORKERS[framework], env or {}
    settings = {"shape": "full", "variants": variants, **settings}
    if processes == 1:
        found = children.python(module, settings, children.cores[:1], env)
    else:
        run = children.workers if framework == "tfdist" else children.ranks
        found = run(module, settings, env, processes)
    return [{**record, "variant": variant} for record, variant in zip(found, variants, strict=True)]
