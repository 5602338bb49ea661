"""Trains a small network and writes its weights: the same with any number of processes."""

from __future__ import annotations

import argparse
from pathlib import Path

import keras
import numpy as np

import tfdist

# Enough for a step to be felt in a slow network.
_UNITS = 512


class Progress(keras.callbacks.Callback):
    """Makes a file when training has come to a step."""

    def __init__(self, path: Path, step: int):
        super().__init__()
        self._path, self._step = path, step

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if batch == self._step:
            self._path.touch()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout=60)
    keras.utils.set_random_seed(1)
    rank = strategy._peers.rank if strategy._peers else 0
    random = np.random.default_rng(0)
    # Uneven for three processes.
    x = random.normal(size=(options.steps * 32, 16)).astype("float32")
    y = x.mean(axis=1, keepdims=True)
    with strategy.scope():
        hidden = [keras.layers.Dense(_UNITS, activation="tanh") for _ in range(2)]
        model = keras.Sequential([keras.Input((16,)), *hidden, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    progress = Progress(options.folder / f"trains-{rank}", step=5)
    history = model.fit(x, y, batch_size=32, verbose=0, callbacks=[progress]).history
    found = {"loss": history["loss"], "replicas": strategy.num_replicas_in_sync}
    np.save(options.folder / f"bucket-{rank}.npy", strategy._gradient_options.bucket_bytes)
    weights = {f"weight {number}": weight for number, weight in enumerate(model.get_weights())}
    np.savez(options.folder / f"rank-{rank}.npz", **found, **weights)


if __name__ == "__main__":
    main()
