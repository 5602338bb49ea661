"""One process of `run_local`: `python child.py CALL RESULT`."""

from __future__ import annotations

import os
import pickle
import sys
import time
import traceback
from pathlib import Path
from typing import Any


def main(call: str, result: str) -> int:
    """Runs the pickled call and writes `(time, succeeded, value or exception)`; returns the exit code."""
    with Path(call).open("rb") as file:
        # Functions of the parent's modules travel by name: they are looked for where the parent found them. So is
        # tfdist: now, because the function may go to another folder.
        sys.path[:] = pickle.load(file)
        call_begins = file.tell()
    from tfdist.atomic_files import write_atomically

    try:
        outcome: tuple[float, bool, Any] = (time.time(), True, _run(Path(call), call_begins))
    except BaseException as error:
        traceback.print_exc()
        outcome = (time.time(), False, error)
    write_atomically(result, _dump(outcome))
    jobs = sys.modules.get("tfdist.runtime.job")
    if outcome[1] and jobs is not None and jobs.joined() is not None:
        jobs.joined().leave()
    return 0 if outcome[1] else 1


def _run(call: Path, begins: int) -> Any:
    with call.open("rb") as file:
        file.seek(begins)
        devices = pickle.load(file)
        fn, args = pickle.load(file)
    if devices > 1:
        import tensorflow as tf

        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * devices)
    return fn(*args)


def _dump(outcome: tuple) -> bytes:
    import cloudpickle

    try:
        return cloudpickle.dumps(outcome)
    except Exception as error:
        return cloudpickle.dumps((outcome[0], False, RuntimeError(f"{outcome[2]!r} could not be pickled: {error}")))


if __name__ == "__main__":
    code = main(sys.argv[1], sys.argv[2])
    sys.stdout.flush()
    # Past TensorFlow's exit handlers, which wait for peers that may be gone.
    os._exit(code)
