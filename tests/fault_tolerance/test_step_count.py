"""How many steps a backup says it is after, however an epoch ends."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.checkpoint.store import CheckpointStore


def rows() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((np.ones((10, 3), "f"), np.ones((10, 1), "f"))).batch(2)


def of_unknown_size() -> tf.data.Dataset:
    return rows().filter(lambda x, y: True)


class Stop(keras.callbacks.Callback):
    """Ends the fit at a batch, or at an epoch."""

    def __init__(self, batch: int | None = None, epoch: int | None = None) -> None:
        super().__init__()
        self.batch, self.epoch = batch, epoch

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if self.batch == batch:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if self.epoch == epoch:
            self.model.stop_training = True


@pytest.mark.parametrize(
    ("data", "execution", "stop", "expected"),
    [
        (rows, 1, [Stop(batch=2)], 3),
        (rows, 2, [Stop(batch=5)], 5),
        (rows, 2, [], 15),
        (rows, 1, [Stop(epoch=1)], 10),
        (of_unknown_size, 1, [Stop(batch=2)], 3),
    ],
)
def test_every_step_is_counted_once(
    data: Callable[[], tf.data.Dataset],
    execution: int,
    stop: list[keras.callbacks.Callback],
    expected: int,
    tmp_path: Path,
) -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=execution)
    backup = tfdist.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)
    model.fit(data(), epochs=3, callbacks=[backup, *stop], verbose=0)
    newest = CheckpointStore(os.fspath(tmp_path / "backup")).newest()
    assert newest.meta["done"]
    assert newest.meta["total"] == expected
