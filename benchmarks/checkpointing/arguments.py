"""The command line of the benchmark."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.checkpointing.launchers import LAUNCHERS


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line; ends the program with exit code 2 and a message if it is wrong.

    Example:
        >>> parse(["--rounds", "1", "--launchers", "tfdist", "--cores", "0", "1"]).launchers
        ['tfdist']
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpointing", description=__doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="rounds of the overhead, 0 to leave it out (default: %(default)s)")
    names = list(LAUNCHERS)
    add("--launchers", nargs="*", choices=names, default=names, help="whose recovery is measured (default: all)")
    add("--repeats", type=int, default=2, help="how often each kill happens in a run (default: %(default)s)")
    add("--settle", type=float, default=10.0, help="seconds of training before the first failure (default: 10)")
    add("--between", type=float, default=3.0, help="seconds of training before other failures (default: 3)")
    add("--cores", type=int, nargs=2, metavar="CORE", help="the two cores (default: the first two usable ones)")
    add("--deadline", type=float, default=300.0, help="seconds that a trial may take (default: 300)")
    add("--json", type=Path, metavar="FILE", help="write all samples there")
    add("--write-readme", action="store_true", help="put the result into the README of this benchmark")
    options = parser.parse_args(arguments)
    usable = sorted(os.sched_getaffinity(0))
    options.cores = tuple(options.cores or usable[:2])
    if len(set(options.cores)) != 2 or not set(options.cores) <= set(usable):
        parser.error(
            f"cores {list(options.cores)}: expected two of {usable}. Choose them by --cores, or use a larger machine."
        )
    if options.rounds < 0 or options.repeats < 1:
        parser.error(
            f"--rounds {options.rounds} --repeats {options.repeats}: expected at least 0 and 1. Give higher "
            "numbers, or leave them out."
        )
    return options
