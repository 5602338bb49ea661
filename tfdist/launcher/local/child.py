"""One process that runs a function: `python child.py CALL RESULT CPUS returns|ends`."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import sys
import threading
from pathlib import Path
from typing import NoReturn

# For a process whose function has failed.
_LAST_SECONDS = 60.0


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


def end(code: int) -> NoReturn:
    """Ends this process as Python ends a script, but for TensorFlow's own end: it waits for peers that may be gone."""
    if code:  # threads may wait for peers that are gone, and the peers for this process
        guard = threading.Timer(_LAST_SECONDS, os._exit, (code,))
        guard.daemon = True
        guard.start()
    try:
        threading._shutdown()  # a backup that is still being written, and threads of the function
        # The last report of a training, a lease on a bucket, what loggers keep, and what the function has registered.
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    end(main(*sys.argv[1:]))
