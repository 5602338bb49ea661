"""A worker of a job whose workers come and go: `python -m tests.cluster.coming_program FOLDER FAULT`.

Each worker writes its weights and history at the end, and notes its processes. Faults strike once:

- `kill`: SIGKILL to rank 2, in the second epoch; rank 0 ends the training two epochs after it has come again;
- `stop`: SIGSTOP to rank 2 until the others have left it out, else the same; the test lets it go on;
- `cut`: the test cuts the network of rank 2, and joins it when the others have left it out; else the same;
- `chief`: SIGKILL to rank 0, in the fourth of eight epochs, which then goes on from a backup in the middle of a period;
- `alone`: rank 1 stops in the second epoch, in the middle of a period.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

import tfdist

STEPS, SYNC_EVERY, ROWS = 10, 4, 12


class Faults(keras.callbacks.Callback):
    """Strikes this worker once, notes where it takes part, and ends the training on rank 0."""

    def __init__(self, folder: Path, fault: str, rank: int, held_out: tuple) -> None:
        super().__init__()
        self._held_out = held_out
        self._folder, self._fault, self._rank = folder, fault, rank
        self._came = -1
        self.times: list[float] = []

    def _evaluate(self) -> None:
        """Also where rank 0 goes on from a backup, of whose epochs the others know the logs only."""
        loss, _ = self.model.evaluate(*self._held_out, verbose=0)
        assert np.isfinite(loss)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        hooks = self.model.distribute_strategy._keras_hooks
        if (self._fault, hooks._pace.epoch, batch) == ("chief", 1, 4):
            self._evaluate()
        self.times.append(time.monotonic())
        if not hooks._skips:
            (self._folder / f"trains-{self._rank}-{os.getpid()}").touch()
            time.sleep(0.02)
        here = (self._fault, self._rank, hooks._pace.epoch, batch)
        signals = {
            ("kill", 2, 1, 5): signal.SIGKILL,
            ("stop", 2, 1, 5): signal.SIGSTOP,
            ("chief", 0, 3, 7): signal.SIGKILL,
        }
        if here in signals and not (self._folder / "struck").exists():
            (self._folder / "struck").touch()
            os.kill(os.getpid(), signals[here])
        self.model.stop_training |= here == ("alone", 1, 1, 5)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if (self._fault, epoch) == ("chief", 1):
            self._evaluate()
        has_come = (self._folder / "came").exists()
        if self._fault in ("chief", "alone"):
            return
        if self._rank == 2 and (self._folder / "struck").exists() and not has_come:
            hooks = self.model.distribute_strategy._keras_hooks
            if not hooks._skips and (self._fault == "kill" or (self._folder / "left-out").exists()):
                (self._folder / "came").touch()
        if self._rank == 0 and has_come:
            self._came = epoch if self._came < 0 else self._came
            self.model.stop_training = epoch >= self._came + 2


def main(folder: Path, fault: str) -> None:
    keras.config.set_floatx("float64")
    optimizer = lambda: keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)  # noqa: E731
    strategy = tfdist.LocalStepsStrategy(SYNC_EVERY, outer_optimizer=optimizer, min_workers=1, patience=20)
    rank = strategy.workers[1]
    x = np.random.default_rng(1).normal(size=(STEPS * ROWS, 5))
    y = np.tanh(x[:, :1] - x[:, 1:2])
    with strategy.scope():
        layers = [keras.layers.Dense(6, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((5,)), *layers])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    callbacks = [
        Faults(folder, fault, rank, (x[:24], y[:24])),
        keras.callbacks.ReduceLROnPlateau("loss", patience=2, min_delta=10.0),
    ]
    if fault == "chief":
        callbacks.append(tfdist.callbacks.BackupAndRestore(folder / "backup", save_freq=3))
    epochs = 10_000 if fault in ("kill", "stop", "cut") else 8
    history = model.fit(
        x, y, batch_size=ROWS, epochs=epochs, verbose=0, callbacks=callbacks, validation_data=(x[:24], y[:24])
    ).history
    found = {
        "pid": os.getpid(),
        "history": {name: list(map(float, values)) for name, values in history.items()},
        "weights": [w.tolist() for w in model.get_weights()],
        "rate": float(model.optimizer.learning_rate),
        "seconds": sorted(np.diff(callbacks[0].times)),
        "loss": float(model.evaluate(x, y, verbose=0)[0]),
    }
    (folder / f"found-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
