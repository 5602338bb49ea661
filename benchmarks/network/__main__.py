"""Trains a language model on two hosts over slow networks, by tfdist and by PyTorch, and prints how long steps take."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.argument_types import first_two_cores, names
from benchmarks.children import Children, tensorflow_places, torch_places
from benchmarks.data_parallel import machine
from benchmarks.data_parallel.processes import TrialError, end_on_sigterm, say
from benchmarks.data_parallel.table import fill, machine_line
from benchmarks.network.links import ADDRESSES, DEVICE, NETWORKS, joined
from benchmarks.network.table import table

FOLDER = Path(__file__).parent
WORKERS = {"tfdist": "keras_worker", "PyTorch DDP": "torch_worker"}
METHODS = {"tfdist": ("default", "bf16", "PowerSGD", "TopK"), "PyTorch DDP": ("default", "bf16", "PowerSGD")}
PORT = 29400


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if a trial failed."""
    options = parse(arguments)
    end_on_sigterm()
    facts = machine.describe(options.cores)
    found: dict = {"machine": facts, "alone": {}, "records": []}
    settings = {"warmup": options.warmup, "windows": options.windows, "steps": options.steps}
    failed = False
    for peer in WORKERS:
        found["alone"][peer] = _trial(peer, "default", (), settings, options)
        say(f"{peer}, one process: {found['alone'][peer]['ms']}")
    for key in options.networks:
        with joined(NETWORKS[key]) as namespaces:
            for peer, methods in METHODS.items():
                for method in methods:
                    try:
                        record = _trial(peer, method, namespaces, settings, options)
                    except TrialError as error:
                        say(f"{NETWORKS[key].title}, {peer}, {method} failed: {error}")
                        failed = True
                        continue
                    say(f"{NETWORKS[key].title}, {peer}, {method}: {record['ms']}, {record['bytes'][-1] / 1e6:.2f} MB")
                    found["records"].append({"network": key, "peer": peer, "method": method, **record})
    if options.results is not None:
        options.results.write_text(json.dumps(found, indent=1) + "\n")
    terms = f"Windows of {options.steps} steps after {options.warmup}: {options.windows} for each number."
    report = f"{table(found)}\n\n{machine_line(facts, terms)}"
    print(report)
    if options.write_readme:
        (FOLDER / "README.md").write_text(fill((FOLDER / "README.md").read_text(), report))
    return 1 if failed else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line; ends the program with exit code 2 and a message if it is wrong."""
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}", description=__doc__)
    add = parser.add_argument
    every = list(NETWORKS)
    add("--networks", type=names(every), default=every, help=f"of {','.join(every)} (default: all)")
    add("--warmup", type=int, default=8, help="steps before the first window (%(default)s)")
    add("--windows", type=int, default=4, help="%(default)s")
    add("--steps", type=int, default=5, help="of a window (%(default)s)")
    add("--deadline", type=float, default=400.0, help="seconds that a training may take (%(default)s)")
    add("--results", type=Path, default=FOLDER / "results.json", help="where all samples go (default: results.json)")
    add("--write-readme", action="store_true", help="put the table into the README")
    options = parser.parse_args(arguments)
    options.cores = first_two_cores(parser)
    if os.geteuid() != 0:
        parser.error("received: a user who may not make network namespaces. Expected: root.")
    return options


def _trial(
    peer: str,
    method: str,
    namespaces: Sequence[str],
    settings: dict,
    options: argparse.Namespace,
) -> dict:
    settings = {**settings, "method": method, "processes": max(1, len(namespaces))}
    children, module = Children(options.cores, options.deadline), f"{__package__}.{WORKERS[peer]}"
    addresses = [f"{address}:{PORT}" for address in ADDRESSES]
    places = tensorflow_places(addresses) if peer == "tfdist" else torch_places(addresses, DEVICE)
    if not namespaces:
        return children.python(module, settings, children.cores[:1])
    return children.side_by_side(module, settings, places, namespaces)


if __name__ == "__main__":
    sys.exit(main())
