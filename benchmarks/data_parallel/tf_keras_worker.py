"""A process of tf_keras: on its own, or a worker of the stock `tf.distribute.MultiWorkerMirroredStrategy`."""

from __future__ import annotations

import sys

import tensorflow as tf
import tf_keras

from benchmarks.data_parallel import result
from benchmarks.data_parallel.keras_training import train
from benchmarks.data_parallel.workload import Workload


def main(text: str, path: str) -> None:
    """Trains the workload and writes the result."""
    workload = Workload.from_json(text)
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if workload.processes > 1 else None
    outcome = train(tf_keras, strategy, workload)
    if strategy is None or strategy.cluster_resolver.task_id == 0:
        result.write(path, *outcome)


if __name__ == "__main__":
    main(*sys.argv[1:])
