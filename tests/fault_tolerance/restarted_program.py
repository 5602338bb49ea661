"""Trains on the cluster that TF_CONFIG describes; `python restarted_program.py FOLDER EPOCHS`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import keras
import numpy as np

import tfdist


class Tell(keras.callbacks.Callback):
    """Writes to a file how far the process is, so that the test kills it in time, and stops there if it is to."""

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        folder, pid = Path(sys.argv[1]), os.getpid()
        (folder / f"epoch of {pid}").write_text(str(epoch))
        while (folder / f"stop {pid}").exists():
            time.sleep(0.1)


if __name__ == "__main__":
    folder, epochs = Path(sys.argv[1]), int(sys.argv[2])
    strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout=60)
    keras.utils.set_random_seed(1)
    rows = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    backup = tfdist.callbacks.BackupAndRestore(folder / "backup")
    model.fit(rows, rows[:, :1], batch_size=8, epochs=epochs, verbose=0, callbacks=[backup, Tell()])
    if strategy.is_chief:
        np.savez(folder / "weights.npz", *model.get_weights())
