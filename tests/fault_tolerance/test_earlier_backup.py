"""A backup that an earlier tfdist wrote is read as it was written, bit for bit, and its fit goes on.

After a change of the format that is intended, `python -m tests.fault_tolerance.test_earlier_backup` writes the folder
`earlier` anew.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers

import tfdist

EARLIER = Path(__file__).with_name("earlier")
# Of 8 steps each: it stops in the second epoch, two steps after its last backup.
EPOCHS, SAVED, STOPPED = 3, 12, 14


class Stopped(Exception):
    """In place of a kill."""


def state_of(model: keras.Model) -> dict[str, np.ndarray]:
    return {str(i): np.asarray(v) for i, v in enumerate([*model.variables, *model.optimizer.variables])}


def fit(folder: Path, at_step: Callable[[keras.Model, int], None]) -> dict[str, list[float]]:
    keras.utils.set_random_seed(1)
    hidden = [layers.Dense(4), layers.BatchNormalization(), layers.Dropout(0.5)]
    model = keras.Sequential([keras.Input((3,)), *hidden, layers.Dense(1)], name="model")
    model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"])
    x = np.random.default_rng(0).normal(size=(32, 3)).astype("float32")
    callbacks: list[Any] = [
        tfdist.callbacks.BackupAndRestore(folder, SAVED, max_to_keep=1, asynchronous=False),
        keras.callbacks.ReduceLROnPlateau("loss", patience=1),
        keras.callbacks.LambdaCallback(
            on_train_batch_begin=lambda batch, logs: at_step(model, int(model.optimizer.iterations))
        ),
    ]
    return model.fit(x, x[:, :1], batch_size=4, epochs=EPOCHS, callbacks=callbacks, verbose=0).history


def test_is_read_bit_for_bit(tmp_path: Path):
    shutil.copytree(EARLIER / "backup", tmp_path / "backup")
    steps, found = [], {}

    def at_step(model: keras.Model, step: int) -> None:
        steps.append(step)
        found.update({} if found else state_of(model))

    history = fit(tmp_path / "backup", at_step)
    assert steps == list(range(SAVED, 8 * EPOCHS))
    with np.load(EARLIER / "state.npz") as expected:
        assert found.keys() == set(expected)
        for name in expected:
            assert found[name].dtype == expected[name].dtype
            assert found[name].tobytes() == expected[name].tobytes(), name
    assert [len(history[name]) for name in ("loss", "mae", "learning_rate")] == [EPOCHS] * 3


def write() -> None:
    """Writes the folder anew."""
    shutil.rmtree(EARLIER, ignore_errors=True)

    def at_step(model: keras.Model, step: int) -> None:
        if step == SAVED:
            np.savez(EARLIER / "state.npz", **state_of(model))
        if step == STOPPED:
            raise Stopped

    with contextlib.suppress(Stopped):
        fit(EARLIER / "backup", at_step)
    # It names this process.
    (EARLIER / "backup/.lock").unlink()


if __name__ == "__main__":
    sys.exit(write())
