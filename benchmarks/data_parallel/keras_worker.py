"""A process of Keras 3: on its own, or a worker of tfdist."""

from __future__ import annotations

import sys

import keras

import tfdist
from benchmarks.data_parallel import result
from benchmarks.data_parallel.keras_training import train
from benchmarks.data_parallel.workload import Workload


def main(text: str, path: str) -> None:
    """Trains the workload and writes the result."""
    workload = Workload.from_json(text)
    strategy = None
    if workload.processes > 1:
        strategy = tfdist.MultiWorkerMirroredStrategy(compression=workload.compression)
        if strategy.num_replicas_in_sync != workload.processes:
            raise SystemExit(
                f"{strategy.num_replicas_in_sync} replicas; expected {workload.processes}. Start by `tfdist run`."
            )
    outcome = train(keras, strategy, workload)
    if strategy is None or strategy.is_chief:
        result.write(path, *outcome)


if __name__ == "__main__":
    main(*sys.argv[1:])
