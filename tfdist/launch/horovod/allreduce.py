"""The check of a new wheel: two processes add two numbers up."""

from __future__ import annotations

import sys


def sum_of_ranks(folder: str) -> float:
    """Runs on each of two processes, with the Horovod that is installed in a folder; returns the sum of 1 and 2."""
    sys.path.insert(0, folder)
    import tensorflow as tf

    from tfdist.cluster.discovery import discover
    from tfdist.strategies.horovod.job import join

    job = join(discover(), None, start_timeout=120.0, peer_timeout=60.0)
    value = job.collectives.all_reduce(tf.distribute.ReduceOp.SUM, tf.constant([job.collectives.rank + 1.0]))
    return float(value[0])
