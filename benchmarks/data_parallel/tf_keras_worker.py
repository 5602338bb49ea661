"""A process of tf_keras: on its own, or a worker of the stock `tf.distribute.MultiWorkerMirroredStrategy`."""

from __future__ import annotations

import tensorflow as tf
import tf_keras

from benchmarks.data_parallel.keras_training import train
from benchmarks.data_parallel.workload import Workload


def main(settings: dict) -> dict | None:
    """Trains the workload; the chief returns the result."""
    workload = Workload(**settings["workload"])
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if workload.processes > 1 else None
    outcome = train(tf_keras, strategy, workload)
    return outcome if strategy is None or strategy.cluster_resolver.task_id == 0 else None
