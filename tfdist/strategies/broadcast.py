"""Bytes that one process has and all need, such as a file on the chief's disk: over the job's own collectives."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfdist.strategies.exchange import all_reduce
from tfdist.strategies.keras_step import global_replica
from tfdist.strategies.peers import Peers

# Numbers that travel together, at most: 16 MiB as float32.
_CHUNK = 4 << 20


def broadcast_bytes(strategy: tf.distribute.Strategy, peers: Peers, data: bytes | None) -> bytes:
    """Gives every process what rank 0 has; all call it at the same point.

    Args:
        strategy: of several processes.
        peers: these processes.
        data: what rank 0 has; `None` on the others.

    Returns:
        The bytes, on every process.
    """
    is_sender = peers.rank == 0
    size = peers.gather("broadcast", len(data) if is_sender else None, "take over what is on the chief's disk")[0]
    received = bytearray()
    # A sum to which all others add 0, since every transport can add float32 numbers; half of one holds 16 bits exactly.
    add = _sum_of(strategy)
    for begin in range(0, size, 2 * _CHUNK):
        length = min(2 * _CHUNK, size - begin)
        numbers = np.zeros((length + 1) // 2, "<u2")
        if is_sender:
            numbers = np.frombuffer(data[begin : begin + length] + b"\0" * (length % 2), "<u2")
        total = add(tf.constant(numbers, tf.float32)).numpy().astype("<u2")
        received += total.tobytes()[:length]
    return bytes(received)


def _sum_of(strategy: tf.distribute.Strategy) -> tf.types.experimental.PolymorphicFunction:
    first = strategy.extended._input_position()[1] * len(strategy.extended.worker_devices)

    def on_replica(numbers: tf.Tensor) -> tf.Tensor:
        # One replica of each process has the numbers, its others have zeros. Identity: all are on a replica's device.
        return all_reduce(tf.identity(numbers) if global_replica() == first else tf.zeros_like(numbers))

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)], autograph=False)
    def add(numbers: tf.Tensor) -> tf.Tensor:
        return strategy.experimental_local_results(strategy.run(on_replica, (numbers,)))[0]

    return add
