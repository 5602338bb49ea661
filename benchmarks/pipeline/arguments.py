"""The command line of the benchmark."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

PARTS = ("schedules", "compute", "memory", "tracing")
RESULTS = Path(__file__).with_name("results.json")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line; ends the program with exit code 2 and a message if it is wrong.

    Example:
        >>> parse(["--parts", "memory,tracing"]).parts
        ['memory', 'tracing']
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=__doc__)
    add = parser.add_argument
    add("--parts", type=_parts, default=list(PARTS), help=f'of {",".join(PARTS)} (default: all; "" for none)')
    add("--samples", type=_count, default=3, help="how often everything is measured (default: %(default)s)")
    add("--quick", action="store_true", help="measure a little of everything, to see whether it works; keep nothing")
    add("--busy-anyway", action="store_true", help="measure although other programs compute")
    add("--deadline", type=float, default=300.0, help="seconds that a process may take (default: %(default)s)")
    add("--results", type=Path, metavar="FILE", help=f"parts measured here are renewed there (default: {RESULTS.name})")
    add("--write-readme", action="store_true", help="put the tables of all parts there into the README")
    options = parser.parse_args(arguments)
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        parser.error(f"received {len(usable)} usable core, expected two. Use a larger machine, or a wider taskset.")
    if options.quick and options.write_readme:
        parser.error("received --quick and --write-readme, expected only one of them: a README has real results.")
    if options.results is None and not options.quick:
        options.results = RESULTS
    options.cores = tuple(usable[:2])
    return options


def _parts(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"{name!r}: expected names of {', '.join(PARTS)}, with commas between")
    return names


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 1 on")
    return int(text)
