"""The fork server: forks processes for training jobs from one that has imported TensorFlow.

Importing TensorFlow takes longer than the jobs do. Each line on stdin, JSON, asks for a process, as
{"number": 1, "job": …, "log": path, "environment": {…}, "seconds": 60}. The answers on stdout are "1 started <pid>" and
"1 ended <exit code>", negative for a signal. The end of stdin ends the server and what it has started.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import wait
from typing import Any

import tfdist
from tests.fault_tolerance.training import train
from tfdist.compat import patches

# Imported for the processes to come.
PRELOADED = (tfdist.MultiWorkerMirroredStrategy, tfdist.callbacks.BackupAndRestore, patches())


def serve() -> None:
    """Answers until stdin ends."""
    processes: dict[int, Any] = {}
    pending = b""
    while True:
        ready = wait([sys.stdin.fileno(), *(process.sentinel for process in processes.values())])
        for number, process in list(processes.items()):
            if process.sentinel in ready:
                process.join()
                print(number, "ended", process.exitcode, flush=True)
                del processes[number]
        if sys.stdin.fileno() in ready:
            received = os.read(sys.stdin.fileno(), 2**16)
            if not received:
                break
            *lines, pending = (pending + received).split(b"\n")
            for request in map(json.loads, lines):
                process = multiprocessing.get_context("fork").Process(target=_run, args=(request,))
                process.start()
                processes[request["number"]] = process
                print(request["number"], "started", process.pid, flush=True)
    for process in processes.values():
        process.kill()
        process.join()


def _run(request: dict[str, Any]) -> None:
    # Whatever becomes of the server and of the tests, the process does not outlive this.
    signal.alarm(request["seconds"])
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.update(request["environment"])
    train(request["job"])


if __name__ == "__main__":
    serve()
