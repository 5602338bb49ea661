"""A small all-reduce through TensorFlow, over the connections that training uses."""

from __future__ import annotations

import time

from tfdist.cluster.config import ClusterConfig

_BYTES = 4 << 20


def all_reduce(cluster: ClusterConfig, timeout: float) -> tuple[float, float]:
    """The sum of 1, 2, ... over the ranks, and how long one of 4 MiB takes, in seconds.

    Raises:
        ClusterError: if the processes do not get together.
    """
    import tensorflow as tf

    from tfdist.strategies.multi_worker import MultiWorkerMirroredStrategy

    strategy = MultiWorkerMirroredStrategy(cluster=cluster, start_timeout=timeout)

    def summed(value: tf.Tensor) -> tf.Tensor:
        # A copy is on the replica's device, as what a step computes.
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(value))

    @tf.function
    def total(value: tf.Tensor) -> tf.Tensor:
        return strategy.run(summed, args=(value,))

    def first(value: tf.Tensor) -> float:
        return float(tf.reshape(strategy.experimental_local_results(total(value))[0], [-1])[0])

    # Of this process' replicas only the share that makes it one.
    own = len(strategy.experimental_local_results(strategy.run(lambda: tf.constant(0.0))))
    block = tf.ones([_BYTES // 4])
    first(block)
    started = time.perf_counter()
    first(block)
    seconds = time.perf_counter() - started
    return first(tf.constant([(cluster.rank + 1.0) / own])), seconds
