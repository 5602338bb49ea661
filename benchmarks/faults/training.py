"""A small training that saves itself and notes each of its steps: `python training.py FOLDER`.

It ends after the step that `step_log.stop_after` names. STRATEGY in the environment is the class of the strategy, by
default MultiWorkerMirroredStrategy. Files in FOLDER ask for faults that come from within:

- `hang-RANK`: Python stands still after a step; the file is removed;
- `crash`: rank 1 fails after the call of fit and before its first step, and removes the file;
- `absent-RANK`: the process does not join the others, as long as the file is there;
- `read-error`: the first file of a backup that is read fails with ESTALE, and the file is removed;
- `forget`: a process that begins or goes on has another learning rate than it should, as a negative control.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

import tfdist
from benchmarks.checkpointing.step_log import StepWriter
from benchmarks.faults import SAVE_EVERY, STEPS_PER_EPOCH
from tfdist.checkpoint import manifest

_ROWS_PER_STEP, _FEATURES, _UNITS = 8, 8, 192
_EPOCHS = 1_000_000


class Notes(keras.callbacks.Callback):
    """Notes the steps, and does what the files in the folder ask for."""

    def __init__(self, folder: Path, rank: int, pause: float) -> None:
        super().__init__()
        self._folder, self._rank, self._pause = folder, rank, pause
        self._log = StepWriter(str(folder), rank)
        self._epoch = 0

    def on_train_begin(self, logs: dict | None = None) -> None:
        if self._rank == 1 and (self._folder / "crash").exists():
            (self._folder / "crash").unlink()
            raise RuntimeError("a crash before the first step")
        if (self._folder / "forget").exists():
            self.model.optimizer.learning_rate = 0.002

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if self._log.write(self._epoch * STEPS_PER_EPOCH + batch + 1):
            self.model.stop_training = True
        time.sleep(self._pause)
        asked = self._folder / f"hang-{self._rank}"
        if asked.exists():
            asked.unlink(missing_ok=True)
            threading.Event().wait()

    def get_state(self) -> dict[str, Any]:
        """Nothing: what a process has noted is not part of the training."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Does nothing."""


def fail_to_read_once(asked: Path) -> None:
    """Lets the first read of a backup's file fail as NFS does after a failover."""
    measure_file = manifest.measure_file

    def failing(path: str, *args: Any) -> Any:
        if asked.exists():
            asked.unlink(missing_ok=True)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return measure_file(path, *args)

    manifest.measure_file = failing


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds between two steps")
    parser.add_argument("--start-timeout", type=float, default=60)
    parser.add_argument("--synchronous", action="store_true", help="write backups before the next step")
    options = parser.parse_args()
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    rank = task["index"] if task["type"] == "worker" else 0
    while (options.folder / f"absent-{rank}").exists():
        time.sleep(0.1)
    fail_to_read_once(options.folder / "read-error")
    if "ps" in json.loads(os.environ["TF_CONFIG"])["cluster"]:
        strategy = tfdist.ParameterServerStrategy(mode="sync")
    else:
        make = getattr(tfdist, os.environ.get("STRATEGY", "MultiWorkerMirroredStrategy"))
        strategy = make(start_timeout=options.start_timeout)
    keras.utils.set_random_seed(1)
    rows = np.random.default_rng(2).normal(size=(STEPS_PER_EPOCH * _ROWS_PER_STEP, _FEATURES)).astype("float32")
    with strategy.scope():
        hidden = [keras.layers.Dense(_UNITS, "tanh"), keras.layers.Dropout(0.2), keras.layers.Dense(_UNITS, "tanh")]
        model = keras.Sequential([keras.Input((_FEATURES,)), *hidden, keras.layers.Dense(1)])
        model.compile("adam", "mse")
    backup = tfdist.callbacks.BackupAndRestore(
        options.folder / "backup",
        save_freq=SAVE_EVERY,
        delete_checkpoint=False,
        asynchronous=not options.synchronous,
    )
    notes = Notes(options.folder, rank, options.pause)
    model.fit(rows, rows[:, :1], batch_size=_ROWS_PER_STEP, epochs=_EPOCHS, verbose=0, callbacks=[backup, notes])


if __name__ == "__main__":
    main()
