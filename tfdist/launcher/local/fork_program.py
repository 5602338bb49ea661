"""What a fork server runs, by its path: `python -u fork_program.py DESCRIPTOR`. It never uses what it has imported."""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import socket
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[3])

from tfdist.launcher.main_program import first_path, run_as_main
from tfdist.launcher.operating_system import die_with_parent

_ADOPTION_DEADLINE = 5.0


def serve(descriptor: int) -> None:
    """Imports TensorFlow, then forks a process for each request until the connection ends; returns in these only."""
    client, connection = os.getppid(), socket.socket(fileno=descriptor)
    before = dict(os.environ)
    for package in ("numpy", "tensorflow", "keras"):
        importlib.import_module(package)
    connection.send(json.dumps({k: v for k, v in os.environ.items() if before.get(k) != v}).encode())
    # Nothing of this becomes garbage: uncollected, its memory pages stay shared with the processes.
    gc.collect()
    gc.freeze()
    while True:
        message, descriptors, *_ = socket.recv_fds(connection, 2**20, 1)
        if not message:
            os._exit(0)
        (output,) = descriptors
        # Forked twice: the parent ends at once, and the client, which adopts orphans meanwhile, gets the process.
        if (between := os.fork()) == 0:
            if os.fork() != 0:
                os._exit(0)
            break
        os.close(output)
        os.waitpid(between, 0)
    deadline = time.monotonic() + _ADOPTION_DEADLINE
    while os.getppid() != client:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.001)
    die_with_parent(client)()
    _begin(json.loads(message), output, connection)


def _begin(request: dict[str, Any], output: int, connection: socket.socket) -> None:
    os.setsid()
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    os.chdir(request["folder"])
    os.sched_setaffinity(0, request["cpus"])
    os.environ.clear()
    os.environ.update(request["env"])
    # All processes would draw the same numbers; TensorFlow has drawn none yet.
    random.seed()
    sys.modules["numpy"].random.seed()
    importlib.invalidate_caches()
    # The program may have another tfdist, which watches imports by the environment.
    for name in [name for name in sys.modules if name.partition(".")[0] == "tfdist"]:
        del sys.modules[name]
    sys.path[0] = first_path(request["words"])
    sys.argv[:] = request["words"]
    with connection:
        connection.send(b"%d" % os.getpid())


if __name__ == "__main__":
    serve(int(sys.argv[1]))
    run_as_main(sys.argv[:], (sys.executable, "-u", *sys.argv), hidden_files=[__file__])
