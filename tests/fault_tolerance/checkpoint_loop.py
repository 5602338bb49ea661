"""Writes checkpoints until it is killed; prints the number in each that is written.

`checkpoint_loop.py FOLDER` goes on until somebody else kills it, `checkpoint_loop.py FOLDER STAGE NUMBER` until it
writes that checkpoint, see `kills.while_writing`.
"""

from __future__ import annotations

import sys

import tensorflow as tf

from tests.fault_tolerance.kills import while_writing
from tfdist.checkpoint.store import CheckpointStore

if __name__ == "__main__":
    store = CheckpointStore(sys.argv[1])
    newest = store.newest()
    if sys.argv[2:]:
        while_writing(sys.argv[2], int(sys.argv[3]))
    number = 0 if newest is None else newest.meta["number"]
    while True:
        number += 1
        store.write({"number": number}, {f"v{i}": tf.fill([1_000_000], float(number)) for i in range(3)})
        print(number, flush=True)
