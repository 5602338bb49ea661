"""A process with Keras 3: on its own, or one of the cluster of a `tfdist.ParameterServerStrategy`."""

from __future__ import annotations

import sys

import keras

import tfdist
from benchmarks.answering import answer_all
from benchmarks.parameter_server.chief import Chief
from benchmarks.parameter_server.trials import Trial


def main(address: str) -> None:
    """Answers the benchmark's requests; a worker or ps serves instead."""
    # Workers and parameter servers do not get beyond this line.
    strategy = None if tfdist.discover().is_single_process else tfdist.ParameterServerStrategy()
    default = strategy._max_inflight if strategy else None

    def configure(trial: Trial) -> None:
        if strategy:
            strategy._mode, strategy._worker_input = trial.mode, trial.worker_input
            strategy._max_inflight = trial.max_inflight or default

    answer_all(address, Chief(keras, strategy, lambda make: make(), configure))


if __name__ == "__main__":
    main(*sys.argv[1:])
