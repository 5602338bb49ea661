"""Runs `pip install` and shows what it is doing, in a few lines: pip itself prints hundreds of lines, or none.

It is run by the environment's own Python, with the arguments of `pip install`, and returns pip's exit code. Warnings
and errors of pip pass. There is a line for each large file, and on a terminal one that says how much of it has come.
Pips before 24.1 do not tell that; there the line only names the file.

Only the standard library is used, as nothing is installed yet.

Example:
    .venv/bin/python tools/install.py -e '.[examples]'
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TextIO

# Smaller files are there in a moment.
_LARGE_MB = 10.0
_FILE = re.compile(r"\s*(?P<what>Downloading|Using cached) (?P<name>\S+) \((?P<size>[\d.]+) (?P<unit>[kMG]?B)\)")
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_UNPACKING = re.compile(r"Installing collected packages: (.+)")
_MB = {"B": 1e-6, "kB": 1e-3, "MB": 1.0, "GB": 1e3}


class Display:
    """Shows what pip is at.

    Args:
        stream: where to.
        live: whether the stream is a terminal, on which a line can be rewritten.
    """

    def __init__(self, stream: TextIO, live: bool) -> None:
        self._stream = stream
        self._live = live
        self._began = time.monotonic()
        self._file = ""
        self._drawn = 0

    def show(self, lines: Iterable[str]) -> None:
        """Takes what pip prints to its end."""
        for line in lines:
            self._take(line.rstrip("\n"))
        self._erase()

    def _take(self, line: str) -> None:
        if progress := _PROGRESS.match(line):
            done, total = int(progress[1]), int(progress[2])
            if self._live and self._file and total >= _LARGE_MB * 1e6:
                self._draw(f"{self._file}: {done / 1e6:.0f} of {total / 1e6:.0f} MB")
        elif file := _FILE.match(line):
            size = float(file["size"]) * _MB[file["unit"]]
            self._file = f"{file['what'].lower()} {_package(file['name'])}"
            if size >= _LARGE_MB:
                self._line(f"{self._file}, {size:.0f} MB")
            else:
                self._draw(self._file)
        elif packages := _UNPACKING.match(line):
            self._line(f"unpacking {len(packages[1].split(','))} packages")
        elif line.startswith("Collecting "):
            self._draw(f"looking for {line.split()[1]}")

    def _line(self, text: str) -> None:
        self._erase()
        print(f"  {self._seconds()} {text}", file=self._stream, flush=True)

    def _draw(self, text: str) -> None:
        if self._live:
            row = f"  {self._seconds()} {text}"[:79]
            print(f"\r{row:<{self._drawn}}", end="", file=self._stream, flush=True)
            self._drawn = len(row)

    def _erase(self) -> None:
        if self._drawn:
            print(f"\r{'':<{self._drawn}}\r", end="", file=self._stream, flush=True)
            self._drawn = 0

    def _seconds(self) -> str:
        return f"{time.monotonic() - self._began:4.0f} s"


def announcement(arguments: Sequence[str], has_tensorflow: bool) -> str:
    """What is installed, and how large it is.

    Example:
        >>> announcement(["-e", ".[docs]"], has_tensorflow=True)
        'Installing .[docs]'
        >>> announcement(["-e", ".[docs]"], has_tensorflow=False)
        'Installing .[docs] with TensorFlow: about 700 MB to download, 2.6 GB on disk'
    """
    what = f"Installing {arguments[-1]}"
    if re.search(r"\[(bench|conformance)\]", what):
        return f"{what} with PyTorch and its libraries for GPUs: several GB"
    if has_tensorflow:
        return what
    return f"{what} with TensorFlow: about 700 MB to download, 2.6 GB on disk"


def progress_bar(version: str, live: bool) -> str:
    """The form of pip's own display that can be read: since pip 24.1 numbers, before that none.

    Example:
        >>> progress_bar("26.3", live=True), progress_bar("22.0.2", live=True), progress_bar("26.3", live=False)
        ('raw', 'off', 'off')
    """
    major, minor = (int(part) for part in re.findall(r"\d+", f"{version}.0")[:2])
    return "raw" if live and (major, minor) >= (24, 1) else "off"


def main(arguments: Sequence[str]) -> int:
    """Installs, and returns pip's exit code."""
    live = sys.stdout.isatty()
    print(announcement(arguments, importlib.util.find_spec("tensorflow") is not None), flush=True)
    bar = progress_bar(importlib.metadata.version("pip"), live)
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", bar, *arguments]
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace", env=_quiet()) as pip:
            assert pip.stdout is not None
            Display(sys.stdout, live).show(pip.stdout)
    except KeyboardInterrupt:
        return 130
    return pip.returncode


def _quiet() -> dict[str, str]:
    # setuptools warns of what every editable installation does.
    filters = [os.environ.get("PYTHONWARNINGS"), "ignore:Editable installation"]
    return {**os.environ, "PYTHONWARNINGS": ",".join(filter(None, filters))}


def _package(file: str) -> str:
    """The name of a package and its version in that of its file.

    Example:
        >>> _package("https://index/tensorflow-2.21.0-cp311-cp311-manylinux_2_27_x86_64.whl")
        'tensorflow 2.21.0'
    """
    name, *rest = file.rpartition("/")[2].removesuffix(".metadata").split("-")
    return " ".join([name, *rest[:1]]).removesuffix(".tar.gz")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
