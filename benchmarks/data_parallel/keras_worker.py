"""A process of Keras 3: on its own, or a worker of tfdist."""

from __future__ import annotations

import keras

import tfdist
from benchmarks.data_parallel.keras_training import train
from benchmarks.data_parallel.workload import Workload


def main(settings: dict) -> dict | None:
    """Trains the workload; the chief returns the result."""
    workload = Workload(**settings["workload"])
    strategy = None
    if workload.processes > 1:
        strategy = tfdist.MultiWorkerMirroredStrategy(compression=workload.compression)
        if strategy.num_replicas_in_sync != workload.processes:
            raise SystemExit(
                f"{strategy.num_replicas_in_sync} replicas; expected {workload.processes}. Start by `tfdist run`."
            )
    outcome = train(keras, strategy, workload)
    return outcome if strategy is None or strategy.is_chief else None
