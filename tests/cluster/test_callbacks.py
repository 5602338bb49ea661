"""Callbacks that write files, with the same paths on every process: the chief's write, every process can read."""

from __future__ import annotations

import csv
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tests.cluster.attempt import found_on
from tests.cluster.file_checks import DEADLINE, FileChecks, built, gap, on_two_processes
from tests.features.table import rows

pytestmark = pytest.mark.cluster


class Interrupt(keras.callbacks.Callback):
    """Raises on every process, in the middle of the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if self._epoch == 1 and batch == 2:
            raise InterruptedError("in epoch 2")


def callbacks(strategy: object, folder: Path) -> dict:
    """Trains with the callbacks that write files; returns what they wrote and what they should have."""
    folder.mkdir(exist_ok=True)
    model = built(strategy)
    writers = [
        keras.callbacks.ModelCheckpoint(folder / "best.keras", monitor="val_loss", save_best_only=True),
        keras.callbacks.ModelCheckpoint(folder / "epoch-{epoch}.weights.h5", save_weights_only=True),
        keras.callbacks.ModelCheckpoint(
            folder / "step-{epoch}-{batch}.weights.h5", save_freq=2, save_weights_only=True
        ),
        keras.callbacks.CSVLogger(folder / "log.csv"),
    ]
    # A learning rate of 0 after the first epoch would make "best" arbitrary; this one overshoots in the second.
    steps = keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 if epoch == 0 else 5.0)
    history = model.fit(
        *rows(96),
        batch_size=16,
        epochs=3,
        shuffle=False,
        verbose=0,
        validation_data=rows(42, seed=2),
        callbacks=[steps, *writers],
    )
    with (folder / "log.csv").open() as file:
        lines = list(csv.DictReader(file))
    best = keras.models.load_model(folder / "best.keras")
    return {
        "files": sorted(p.name for p in folder.iterdir()),
        "losses": history.history["val_loss"],
        "best": best.evaluate(*rows(42, seed=2), batch_size=16, verbose=0)[0],
        "csv": [{name: float(value) for name, value in line.items()} for line in lines],
        "history": history.history,
    }


def tensorboard(strategy: object, folder: Path) -> dict[str, list[str]]:
    """Returns the processes that wrote an event file, by folder; their id is part of the file's name."""
    model = built(strategy)
    callback = keras.callbacks.TensorBoard(folder)
    model.fit(*rows(96), batch_size=16, epochs=2, verbose=0, validation_data=rows(16), callbacks=[callback])
    found: dict[str, list[str]] = {}
    for path in folder.rglob("*tfevents*"):
        found.setdefault(path.parent.name, []).append(path.name.split(".")[-3])
    return found


def interrupted(strategy: object, folder: Path) -> dict:
    """Crashes in the second epoch and starts again; returns the epochs of the second run and the final weights."""
    arguments = {"batch_size": 16, "epochs": 3, "shuffle": False, "verbose": 0}
    for is_second in (False, True):
        model = built(strategy)
        stop = [] if is_second else [Interrupt()]
        try:
            history = model.fit(*rows(96), **arguments, callbacks=[keras.callbacks.BackupAndRestore(folder), *stop])
        except InterruptedError:
            saved = json.loads((folder / "training_metadata.json").read_text())
    return {
        "saved": saved,
        "epochs": history.epoch,
        "steps": int(np.asarray(model.optimizer.iterations)),
        "weights": model.get_weights(),
        "left": folder.exists(),
    }


def everything(checks: FileChecks) -> None:
    """Runs on every process."""
    import tensorflow as tf

    strategy, folder = checks.strategy, checks.folder
    one = tf.distribute.get_strategy()
    checks.note("callbacks", callbacks, strategy, folder / "callbacks")
    checks.note("tensorboard", tensorboard, strategy, folder / "tensorboard")
    checks.note("interrupted", interrupted, strategy, folder / "backup")
    with tempfile.TemporaryDirectory() as alone:
        checks.note("callbacks alone", callbacks, one, Path(alone) / "callbacks")
        checks.note("interrupted alone", interrupted, one, Path(alone) / "backup")


@functools.cache
def results() -> list[dict]:
    return on_two_processes(everything)


def check(rank: int, name: str) -> Any:
    return found_on(results(), rank, name)


@pytest.mark.timeout(DEADLINE + 30)
class TestCallbacks:
    def test_callbacks_write_on_the_chief_alone(self):
        chief, other = results()
        assert set(chief["callbacks writes"]) == {f"callbacks/{name}" for name in check(0, "callbacks")["files"]}
        assert other["callbacks writes"] == []

    def test_callbacks_write_each_file_once(self):
        written = results()[0]["callbacks writes"]
        once = [path for path in written if "best" not in path]
        assert sorted(once) == sorted(set(once))
        losses = check(0, "callbacks")["losses"]
        improvements = sum(loss < min(losses[:i], default=np.inf) for i, loss in enumerate(losses))
        assert written.count("callbacks/best.keras") == improvements

    def test_callbacks_write_the_files_of_one_process(self, rank):
        steps = [f"step-{epoch}-{batch}.weights.h5" for epoch in (1, 2, 3) for batch in (2, 4, 6)]
        names = sorted(["best.keras", "log.csv", *(f"epoch-{epoch}.weights.h5" for epoch in (1, 2, 3)), *steps])
        assert check(rank, "callbacks")["files"] == check(rank, "callbacks alone")["files"] == names

    def test_best_model_is_the_best(self, rank):
        seen = check(rank, "callbacks")
        assert min(seen["losses"]) < max(seen["losses"]) - 0.01, "the losses do not tell the epochs apart"
        assert seen["best"] == pytest.approx(min(seen["losses"]), abs=1e-5)

    def test_csv_has_one_line_an_epoch(self, rank):
        lines = check(rank, "callbacks")["csv"]
        assert [line["epoch"] for line in lines] == [0, 1, 2]
        for line, expected in zip(lines, check(rank, "callbacks alone")["csv"], strict=True):
            assert line == pytest.approx(expected, rel=1e-3, abs=1e-5)

    def test_the_chiefs_tensorboard_alone_writes_one_file_for_training_and_one_for_validation(self, rank):
        chief = str(results()[0]["pid"])
        assert check(rank, "tensorboard") == {"train": [chief], "validation": [chief]}

    def test_interrupted_training_goes_on(self, rank):
        seen, alone = check(rank, "interrupted"), check(rank, "interrupted alone")
        assert seen["saved"]["epoch"] == alone["saved"]["epoch"] == 1
        assert seen["epochs"] == alone["epochs"] == [1, 2]
        assert seen["steps"] == alone["steps"] == 18
        assert gap(seen["weights"], alone["weights"]) < 1e-5
        assert not alone["left"] and not seen["left"], "the backup must be gone after training"

    def test_backup_is_written_by_the_chief_alone(self):
        chief, other = results()
        assert set(chief["interrupted writes"]) == {"backup/latest.weights.h5", "backup/training_metadata.json"}
        assert other["interrupted writes"] == []
