"""Writes checkpoints until it is killed: for each line on stdin, in a new process that it forks.

Prints the process id, then the number in each checkpoint that is written; and `ended` once the process has.
Forking after the import, but before TensorFlow is used, makes a new process in a moment.
"""

from __future__ import annotations

import os
import sys

import tensorflow as tf

from tfdist.checkpoint.store import CheckpointStore


def write_for_ever(directory: str) -> None:
    store = CheckpointStore(directory)
    newest = store.newest()
    number = 0 if newest is None else newest.meta["number"]
    while True:
        number += 1
        store.write({"number": number}, {f"v{i}": tf.fill([1_000_000], float(number)) for i in range(3)})
        print(number, flush=True)


for line in sys.stdin:
    child = os.fork()
    if child == 0:
        print(os.getpid(), flush=True)
        try:
            write_for_ever(line.strip())
        finally:
            os._exit(1)
    os.waitpid(child, 0)
    print("ended", flush=True)
