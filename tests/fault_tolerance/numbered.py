"""Checkpoints that hold their own number."""

from __future__ import annotations

import tensorflow as tf

from tfdist.checkpoint.store import CheckpointStore


def write_numbers(store: CheckpointStore, count: int) -> list[str]:
    """Writes `count` checkpoints, whose meta data and whose tensor `value` are 0, 1, …; returns their names."""
    return [store.write({"number": number}, {"value": tf.fill([1000], float(number))}) for number in range(count)]
