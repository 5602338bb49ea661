"""What the command lines of several benchmarks have in common."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection


def names(known: Collection[str]) -> Callable[[str], list[str]]:
    """A type of arguments: some of these names, with commas between.

    Example:
        >>> names(["a", "b"])("b,a")
        ['b', 'a']
    """

    def read(text: str) -> list[str]:
        found = [name for name in text.split(",") if name]
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r}: expected names of {', '.join(known)}, with commas between")
        return found

    return read


def count(text: str) -> int:
    """A type of arguments: a whole number from 1 on."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 1 on")
    return int(text)


def first_two_cores(parser: argparse.ArgumentParser) -> tuple[int, int]:
    """The first two cores that this process may use; ends the program with a message if there is only one."""
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        parser.error(f"received {len(usable)} usable core, expected two. Use a larger machine, or a wider taskset.")
    return usable[0], usable[1]
