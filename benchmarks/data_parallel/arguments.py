"""The command line of the benchmark."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.argument_types import count, first_two_cores, names
from benchmarks.data_parallel.models import MODELS
from benchmarks.data_parallel.peers import PEERS, VARIANTS


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line; ends the program with exit code 2 and a message if it is wrong.

    Example:
        >>> parse(["--models", "mlp", "--rounds", "1"]).models
        ['mlp']
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data_parallel", description=__doc__)
    add = parser.add_argument
    add("--peers", type=names(PEERS), default=list(PEERS), help=f"of {','.join(PEERS)} (default: all)")
    add("--models", type=names(MODELS), default=list(MODELS), help=f"of {','.join(MODELS)} (default: all)")
    add(
        "--variants",
        type=names(VARIANTS),
        default=list(VARIANTS),
        help=f'more lines for tfdist, of {",".join(VARIANTS)} (default: all; "" for none)',
    )
    add("--rounds", type=count, default=3, help="how often every trial runs (default: %(default)s)")
    add("--windows", type=count, default=5, help="windows of a trial (default: %(default)s)")
    add("--steps", type=count, default=40, help="steps of a window (default: %(default)s)")
    add("--warmup", type=count, default=60, help="steps before the first window (default: %(default)s)")
    add("--batch", type=count, default=64, help="rows of each process in a step (default: %(default)s)")
    add("--deadline", type=float, default=300.0, help="seconds that a trial may take (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write all samples there")
    add("--write-readme", action="store_true", help="put the result into the README of this benchmark")
    options = parser.parse_args(arguments)
    options.cores = first_two_cores(parser)
    return options
