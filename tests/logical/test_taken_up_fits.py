"""Fits that begin behind the first epoch, by Keras' own BackupAndRestore or by initial_epoch, count as resumed."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest

from tests.models import ready
from tfdist.runtime.progress import ProgressReporter
from tfdist.supervision.events import EventLog, EventStream
from tfdist.supervision.progress import ProgressFile, ProgressWriter

X, Y = np.random.default_rng(0).normal(size=(40, 4)), np.ones((40, 1))


class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if int(self.model.optimizer.iterations) == 34:
            raise KeyboardInterrupt


def test_a_backup_of_keras_is_resumed(tmp_path: Path) -> None:
    def fit(*more: keras.callbacks.Callback) -> None:
        keras.utils.set_random_seed(1)
        model = ready(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), "sgd", "mse")
        backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
        model.fit(X, Y, batch_size=4, epochs=5, verbose=0, callbacks=[*more, backup])

    with ProgressFile() as file:
        reporter = ProgressReporter(ProgressWriter(file.value), EventLog(str(tmp_path), "worker 0"))
        with pytest.raises(KeyboardInterrupt):
            fit(reporter, Stop())
        first = file.read()
        assert first is not None and (first.step, first.resumed_step) == (34, None)
        fit(reporter)
        second = file.read()
        assert second is not None and (second.step, second.resumed_step, second.has_ended) == (50, 30, True)
    resumed = [event for event in EventStream(tmp_path).read() if event["event"] == "resumed"]
    assert [(event["epoch"], event["step"]) for event in resumed] == [(3, 30)]
