"""The command line of the benchmark."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.parameter_server.trials import PARTS


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line; ends the program with exit code 2 and a message if it is wrong.

    Example:
        >>> parse(["--only", "dense,sleep"]).only
        ['dense', 'sleep']
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parameter_server", description=__doc__)
    add = parser.add_argument
    add("--only", type=_parts, default=list(PARTS), metavar="PARTS", help=f"of {','.join(PARTS)} (default: all)")
    add("--repeats", type=_count, default=5, help="how often everything is measured, in turns (default: %(default)s)")
    add("--seconds", type=float, default=1.0, help="that a sample takes (default: %(default)s)")
    add("--quick", action="store_true", help="measure a little of everything, to see whether it works")
    add("--tf-keras-python", default=sys.executable, metavar="PYTHON", help="an interpreter that has tf_keras")
    add("--deadline", type=float, default=300.0, help="seconds that one answer may take (default: %(default)s)")
    add("--out", type=Path, metavar="FILE", help="write all samples there, as JSON")
    add("--write-readme", action="store_true", help="put the tables into the README of this benchmark")
    options = parser.parse_args(arguments)
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        parser.error(f"received {len(usable)} usable core, expected two. Use a larger machine, or a wider taskset.")
    if options.quick and options.write_readme:
        parser.error("received --quick and --write-readme, expected only one of them: a README has real results.")
    if options.quick:
        options.repeats, options.seconds = min(options.repeats, 2), min(options.seconds, 0.2)
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
