"""Measures this machine, predicts, trains, and compares: `python -m benchmarks.planning`."""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

from benchmarks.children import Children
from benchmarks.data_parallel.processes import say
from benchmarks.data_parallel.table import fill
from benchmarks.planning.table import render

_README = Path(__file__).with_name("README.md")
_MODULE = "benchmarks.planning.worker"
_FAMILIES = ("one device", "MultiWorker")


def main() -> None:
    """Reads the options, and prints the table."""
    parser = argparse.ArgumentParser(description="How near to measured steps are the predictions of tfdist.plan?")
    parser.add_argument("--models", nargs="*", help="some of the models only")
    parser.add_argument("--write-readme", action="store_true", help="renew the table in README.md")
    parser.add_argument("--json", metavar="FILE", help="keep all samples")
    options = parser.parse_args()
    # Neither this process nor its children may see a GPU.
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    from benchmarks.planning.models import MODELS
    from tfdist.planning.calibration import calibrate

    cores = sorted(os.sched_getaffinity(0))[:2]
    say("measuring the machine")
    hardware = calibrate(cores, 2)
    children = Children(tuple(cores), 300.0)
    found: dict[str, list[dict[str, Any]]] = {}
    for model in options.models or MODELS:
        found[model] = _of(children, model, hardware.to_json())
        if options.json:
            kept = {"hardware": json.loads(hardware.to_json()), "models": found}
            Path(options.json).write_text(json.dumps(kept, indent=1))
    text = render(found, hardware)
    print(text)
    if options.write_readme:
        _README.write_text(fill(_README.read_text(), text))


def _of(children: Children, model: str, hardware: str) -> list[dict[str, Any]]:
    """Predicted and measured rows of a model."""
    say(model)
    settings = {"task": "plan", "model": model, "hardware": hardware}
    rows = children.python(_MODULE, settings, children.cores)
    plain = [row for row in rows if row["mode"] == "none" and not row["is_sharded"]]
    chosen = [row for name in _FAMILIES for row in plain if row["name"] == name]
    pipelines = [row for row in plain if row["bubble"] is not None]
    chosen += [min(pipelines, key=lambda row: row["seconds"])] if pipelines else []
    chosen += [row for row in rows if row["name"] == "one device, recompute"]
    for row in chosen:
        say(f"  {row['name']}")
        row["samples_ms"] = _measured(children, model, row)
        row["measured_ms"] = statistics.median(row["samples_ms"])
    return chosen


def _measured(children: Children, model: str, row: dict[str, Any]) -> list[float]:
    settings = {"task": "train", "model": model, "strategy": row["strategy"], "options": row["options"]}
    if row["devices"] == 1:
        threads = {"TF_NUM_INTRAOP_THREADS": str(len(children.cores)), "TF_NUM_INTEROP_THREADS": "2"}
        return children.python(_MODULE, settings, children.cores, threads)
    if row["bubble"] is not None:
        return children.stages(_MODULE, settings, row["devices"], {})
    return children.workers(_MODULE, settings, {})


if __name__ == "__main__":
    main()
