"""Prints which rows of the feature table `tf.distribute.MirroredStrategy` fails, as lines of "result<TAB>row".

Each row has a process of its own: an error inside a step aborts all later collectives of a process, and some rows hang.

Example:
    python tools/stock_features.py
    python tools/stock_features.py "BatchNormalization" "numpy arrays"
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_CHILD = "--in-this-process"
# Starting TensorFlow included. A row that hangs does so for good.
_SECONDS = 60.0


def main(arguments: list[str]) -> int:
    """Runs the rows that are named, or all, and prints one line for each; returns the exit code."""
    sys.path.insert(0, str(_ROOT))
    if arguments[:1] == [_CHILD]:
        print(_result(arguments[1]))
        return 0
    from tests.features.table import FEATURES

    if unknown := sorted({*arguments} - {*FEATURES}):
        print(f"Unknown rows: {unknown}. Expected some of: {list(FEATURES)}", file=sys.stderr)
        return 2
    for name in arguments or FEATURES:
        words, env = [sys.executable, __file__, _CHILD, name], {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
        try:
            done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=_SECONDS)
            # Lines that a row prints itself are none of ours.
            result = f"dies: exit code {done.returncode}" if done.returncode else done.stdout.splitlines()[-1]
        except subprocess.TimeoutExpired:
            result = f"hangs: more than {_SECONDS:.0f} s"
        print(f"{result}\t{name}", flush=True)
    return 0


def _result(name: str) -> str:
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    from tests.features.table import FEATURES

    try:
        FEATURES[name](tf.distribute.MirroredStrategy())
        return "equal"
    except AssertionError as error:
        first, *listing = str(error).splitlines() or [""]
        result = "differs: " + (", ".join(line.strip() for line in listing[:2]) or first)
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    return " ".join(result.split())[:160]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
