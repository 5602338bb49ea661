"""The command line of the benchmark."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.argument_types import count, first_two_cores, names
from benchmarks.parameter_server.trials import PARTS


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line; ends the program with exit code 2 and a message if it is wrong.

    Example:
        >>> parse(["--only", "dense,sleep"]).only
        ['dense', 'sleep']
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parameter_server", description=__doc__)
    add = parser.add_argument
    add("--only", type=names(PARTS), default=list(PARTS), metavar="PARTS", help=f"of {','.join(PARTS)} (default: all)")
    add("--repeats", type=count, default=5, help="how often everything is measured, in turns (default: %(default)s)")
    add("--seconds", type=float, default=1.0, help="that a sample takes (default: %(default)s)")
    add("--quick", action="store_true", help="measure a little of everything, to see whether it works")
    add("--tf-keras-python", default=sys.executable, metavar="PYTHON", help="an interpreter that has tf_keras")
    add("--deadline", type=float, default=300.0, help="seconds that one answer may take (default: %(default)s)")
    add("--out", type=Path, metavar="FILE", help="write all samples there, as JSON")
    add("--write-readme", action="store_true", help="put the tables into the README of this benchmark")
    options = parser.parse_args(arguments)
    options.cores = first_two_cores(parser)
    if options.quick and options.write_readme:
        parser.error("received --quick and --write-readme, expected only one of them: a README has real results.")
    if options.quick:
        options.repeats, options.seconds = min(options.repeats, 2), min(options.seconds, 0.2)
    return options
