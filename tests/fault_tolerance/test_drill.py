"""`tfdist drill` with a small training on two workers: faults that it survives, and scripts that do not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.conftest import Launch, launches  # noqa: F401 - a fixture

# tests/launcher/test_drill.py drills a program without TensorFlow.
pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.cluster, pytest.mark.timeout(1200)]

SCRIPT = """
import time
import keras, numpy as np, tfdist

strategy = tfdist.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)
x = np.random.default_rng(2).normal(size=(96, 8)).astype("float32")
y = x.sum(axis=1, keepdims=True)

class Slowly(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.02)

with strategy.scope():
    layers = [keras.layers.Dense(16), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile("adam", "mse")
backup = tfdist.callbacks.BackupAndRestore("runs/backup", save_freq=8, asynchronous=False)
model.fit(x, y, batch_size=8, epochs=8, verbose=0, callbacks=[Slowly(), backup])
"""


def drilled(launches: list[Launch], folder: Path, script: str, *options: str) -> dict[str, Any]:  # noqa: F811
    """What a drill of a script there reports."""
    (folder / "train.py").write_text(script)
    launches.append(Launch(folder, [sys.executable, "-m", "tfdist", "drill", "--json", *options, "train.py"]))
    result = launches[0].finish(1100)
    launches[0].assert_nothing_is_left()
    assert result.code == 0, result.err
    return json.loads(result.out)


def only(*faults: str) -> list[str]:
    return [word for fault in faults for word in ("--only", fault)]


def test_a_sharded_training_survives(launches: list[Launch], tmp_path: Path) -> None:  # noqa: F811
    """Each process writes its parts of a backup: whoever is lost, they belong to one step."""
    script = SCRIPT.replace("MultiWorkerMirroredStrategy", "FullyShardedStrategy")
    report = drilled(launches, tmp_path, script, *only("kill-chief", "kill-worker", "hang", "preempt"))
    assert [row["result"] for row in report["rows"]] == ["identical"] * 4


def test_a_training_survives(launches: list[Launch], tmp_path: Path) -> None:  # noqa: F811
    faults = only("kill-chief", "corrupt", "preempt", "shrink")
    report = drilled(launches, tmp_path, SCRIPT, "--log-dir", "logs", *faults)
    assert report["identical"] is True
    rows = {row["fault"]: row for row in report["rows"]}
    assert [row["result"] for row in rows.values()] == [*["identical"] * 3, "complete"]
    assert rows["corrupt"]["steps_redone"] >= 8
    assert rows["preempt"]["steps_redone"] == 0
    assert 0 <= rows["kill-chief"]["steps_redone"] <= 24
    # The script's own folder of backups is left alone, whatever on_finish is.
    assert not (tmp_path / "runs").exists()
