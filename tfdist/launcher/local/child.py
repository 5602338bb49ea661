"""One process that runs a function: `python child.py CALL RESULT CPUS returns|ends`."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path


def main(call: str, result: str, cpus: str, returns: str) -> int:
    """Runs the pickled call and writes how it ended; returns the exit code."""
    if cpus:
        os.sched_setaffinity(0, [int(core) for core in cpus.split(",")])
    file = Path(call).open("rb")  # noqa: SIM115  # closed before the function runs
    setup = pickle.load(file)
    sys.path[:], sys.argv[:] = setup["path"], setup["argv"]
    # All that is ours is imported now, because the function may go to another folder.
    from tfdist.launcher.local.calls import run_call
    from tfdist.launcher.operating_system import die_with_parent

    die_with_parent(os.getppid())()
    return run_call(file, setup, result, returns == "returns")


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    # Past TensorFlow's exit handlers, which wait for peers that may be gone.
    os._exit(code)
