"""`tfdist drill` with a small training on two workers: faults that it survives, and scripts that do not."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launcher.conftest import Launch

# tests/launcher/test_drill.py drills a program without TensorFlow.
pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.cluster, pytest.mark.timeout(600)]

SCRIPT = """
import os, sys, time
import keras, numpy as np, tfdist

strategy = tfdist.MultiWorkerMirroredStrategy()
if "unseeded" not in sys.argv:
    keras.utils.set_random_seed(1)
    rows = np.random.default_rng(2)
else:
    rows = np.random.default_rng(time.time_ns() // 10**10)  # the same on both workers, another one in the next run
x = rows.normal(size=(96, 8)).astype("float32")
y = x.sum(axis=1, keepdims=True)

class Forgetful(keras.callbacks.Callback):
    '''Knows something that it does not let anybody save: whether the process was restarted.'''

    def on_epoch_begin(self, epoch, logs=None):
        if "forgetful" in sys.argv and os.environ["TFDIST_RESTART"] != "0":
            self.model.optimizer.learning_rate = 0.5

class Slowly(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.02)

with strategy.scope():
    layers = [keras.layers.Dense(16), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile("adam", "mse")
backup = tfdist.callbacks.BackupAndRestore("runs/backup", save_freq=8)
model.fit(x, y, batch_size=8, epochs=8, verbose=0, callbacks=[Forgetful(), Slowly(), backup])
"""


@pytest.fixture
def drill(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., tuple[int, dict]]]:
    """`drill(options, flaw)` returns the exit code and the result."""
    (tmp_path / "train.py").write_text(SCRIPT)
    started: list[Launch] = []

    def run(*options: str, flaw: str = "") -> tuple[int, dict]:
        command = [sys.executable, "-m", "tfdist", "drill", "--json", "--log-dir", "logs", *options, "train.py", flaw]
        started.append(Launch(tmp_path, command))
        result = started[-1].finish(540)
        print(result.err)
        started[-1].assert_nothing_is_left()
        return result.code, json.loads(result.out)

    yield run
    for launch in started:
        launch.clean_up()
    if request.session.testsfailed:
        for path in sorted(tmp_path.glob("logs/*/*.log")):
            print(f"--- {path.parent.name}/{path.name}\n{path.read_text(errors='replace')[-4000:]}")


def test_a_training_survives(drill, tmp_path: Path) -> None:
    code, report = drill("--only", "kill-chief", "--only", "corrupt", "--only", "preempt")
    assert (code, report["identical"]) == (0, True), report
    rows = {row["fault"]: row for row in report["rows"]}
    assert [row["result"] for row in rows.values()] == ["identical"] * 3
    assert rows["corrupt"]["steps_redone"] >= 8
    assert rows["preempt"]["steps_redone"] == 0
    assert 0 <= rows["kill-chief"]["steps_redone"] <= 24
    # The script's own folder of backups is left alone, whatever on_finish is.
    assert not (tmp_path / "runs").exists()


def test_state_that_is_not_saved_is_found_out(drill) -> None:
    code, report = drill("--only", "kill-worker", flaw="forgetful")
    assert code == 1
    (row,) = report["rows"]
    assert row["result"] == "differs"
    assert any(line.startswith("History.history.loss[7]: ") for line in row["details"]), row
    assert any(line.startswith("adam/learning_rate: 1 of 1 values differ, by 0.499 at most") for line in row["details"])
    assert any(line.startswith("sequential/dense/kernel: ") for line in row["details"])


def test_random_data_cannot_be_judged(drill) -> None:
    code, report = drill("--only", "kill-worker", flaw="unseeded")
    assert code == 1
    (row,) = report["rows"]
    assert row["result"] == "not comparable"
    assert "Call keras.utils.set_random_seed first" in row["details"][0]
