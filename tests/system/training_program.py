"""A training that saves itself: python training_program.py FOLDER PAUSE. Its last line is its result.

Slurm starts it again without the pause after each step.
"""

from __future__ import annotations

import os
import sys
import time

import keras
import numpy as np

import tfdist

folder, pause = sys.argv[1], float(sys.argv[2]) if os.environ.get("SLURM_RESTART_COUNT", "0") == "0" else 0.0


class Slow(keras.callbacks.Callback):
    """Gives a signal the time to arrive."""

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(pause)


keras.utils.set_random_seed(1)
strategy = tfdist.MultiWorkerMirroredStrategy()
with strategy.scope():
    layers = [keras.layers.Dense(8, activation="relu"), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile("adam", "mse")
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
backup = tfdist.callbacks.BackupAndRestore(folder, save_freq=2)
history = model.fit(
    x, x.sum(axis=1, keepdims=True), batch_size=8, epochs=6, shuffle=True, verbose=0, callbacks=[backup, Slow()]
)
weights = np.concatenate([np.ravel(value) for value in model.get_weights()])
if strategy.is_chief:
    print("result", weights.tobytes().hex(), history.history["loss"], flush=True)
