"""Writes checkpoints until it is killed: `checkpoint_loop.py FOLDER`; prints the number in each that is written."""

from __future__ import annotations

import sys

import tensorflow as tf

from tfdist.checkpoint.store import CheckpointStore

if __name__ == "__main__":
    store = CheckpointStore(sys.argv[1])
    newest = store.newest()
    number = 0 if newest is None else newest.meta["number"]
    while True:
        number += 1
        store.write({"number": number}, {f"v{i}": tf.fill([1_000_000], float(number)) for i in range(3)})
        print(number, flush=True)
