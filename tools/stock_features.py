"""Prints which rows of the feature table `tf.distribute.MirroredStrategy` fails, as lines of "result<TAB>row".

Example:
    python tools/stock_features.py
    python tools/stock_features.py "BatchNormalization" "numpy arrays"
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_CHILD = "--in-this-process"
# Starting TensorFlow included. A row that hangs does so for good.
_SECONDS_PER_ROW = 60.0
# Comes after the last line.
_END = None


def main(arguments: list[str]) -> int:
    """Runs the rows that are named, or all, and prints one line for each; returns the exit code."""
    sys.path.insert(0, str(_ROOT))
    if arguments[:1] == [_CHILD]:
        _run_here(arguments[1:])
        return 0
    from tests.features.table import FEATURES

    unknown = sorted({*arguments} - {*FEATURES})
    if unknown:
        print(f"Unknown rows: {unknown}. Expected some of: {list(FEATURES)}", file=sys.stderr)
        return 2
    pending = arguments or list(FEATURES)
    while pending:
        # An error inside a step aborts all later collectives of its process: the rows after it need another one.
        for line in _run_in_child(pending):
            print(line, flush=True)
            pending = pending[1:]
    return 0


def _run_here(names: list[str]) -> None:
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    from tests.features.table import FEATURES

    strategy = tf.distribute.MirroredStrategy()
    for name in names:
        try:
            FEATURES[name](strategy)
            result = "equal"
        except AssertionError as error:
            first, *listing = str(error).splitlines() or [""]
            result = "differs: " + (", ".join(line.strip() for line in listing[:2]) or first)
        except Exception as error:
            print(_line(f"{type(error).__name__}: {error}", name), flush=True)
            return
        print(_line(result, name), flush=True)


def _line(result: str, name: str) -> str:
    return f"{' '.join(result.split())[:160]}\t{name}"


def _run_in_child(names: list[str]) -> Iterator[str]:
    """Yields the lines of the rows up to, and with, the first that fails by more than a difference."""
    child = subprocess.Popen(
        [sys.executable, __file__, _CHILD, *names],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in child.stdout:
            lines.put(line.rstrip("\n"))
        lines.put(_END)

    threading.Thread(target=read, daemon=True).start()
    try:
        for name in names:
            line = "..."
            # Lines that a row prints itself are none of ours.
            while line is not _END and not line.endswith(f"\t{name}"):
                try:
                    line = lines.get(timeout=_SECONDS_PER_ROW)
                except queue.Empty:
                    yield _line(f"hangs: more than {_SECONDS_PER_ROW:.0f} s", name)
                    return
            if line is _END:
                if name == names[0]:
                    yield _line(f"dies: exit code {child.wait()}", name)
                return
            yield line
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
