"""Programs as users start them, on one GPU: alone, in two processes that share it, killed and resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

SOURCE = Path(__file__).resolve().parents[2]
# Several times of what it takes, which is mostly CUDA's and TensorFlow's start.
_DEADLINE = 240.0
# TF32 keeps ten bits of a product: another sum order would then differ by more than the test allows.
_PROGRAM = """
import os, signal, sys
import keras, numpy as np, tensorflow as tf, tfdist
tf.config.experimental.enable_tensor_float_32_execution(False)
tfdist.set_seed(5, deterministic="DETERMINISTIC" in os.environ)
strategy = tfdist.STRATEGY
x = np.random.RandomState(1).randn(90, 8).astype("float32")
y = (x.sum(1, keepdims=True) > 0).astype("float32")
callbacks = []
if "BACKUP" in os.environ:
    class Printed(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            print("epoch", epoch, flush=True)
            if epoch == int(os.environ.get("PAUSE", -1)):
                signal.pause()
    callbacks = [Printed(), tfdist.callbacks.BackupAndRestore(os.environ["BACKUP"])]
with strategy.scope():
    inputs = keras.Input((8,))
    hidden = keras.layers.BatchNormalization()(keras.layers.Dense(16, activation="relu")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(hidden))
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"])
model.fit(x, y, batch_size=16, epochs=int(os.environ.get("EPOCHS", 3)), verbose=0, callbacks=callbacks)
kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
print("trained on", kind, flush=True)
if getattr(strategy, "is_chief", True):
    np.savez(os.environ["RESULT"], *[weight.numpy() for weight in model.weights])
"""


class Program:
    """The program in a folder of its own."""

    def __init__(self, folder: Path, strategy: str) -> None:
        self.folder, self.result = folder, folder / "weights.npz"
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text(_PROGRAM.replace("STRATEGY", strategy))

    def start(self, *options: str, **env: str) -> subprocess.Popen:
        """Starts it by `tfdist run` with these options, or alone."""
        words = [sys.executable, *(["-m", "tfdist", "run", *options] if options else []), "train.py"]
        path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
        own = {"PYTHONPATH": path, "RESULT": str(self.result), "TF_FORCE_GPU_ALLOW_GROWTH": "true", **env}
        self.log = (self.folder / "log").open("wb")
        return subprocess.Popen(
            words,
            cwd=self.folder,
            env={**os.environ, **own},
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def run(self, *options: str, **env: str) -> list[np.ndarray]:
        """Runs it to its end, and returns the weights."""
        process = self.start(*options, **env)
        try:
            code = process.wait(_DEADLINE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"{options} did not end within {_DEADLINE} s:\n{self.text()}")
        assert code == 0, self.text()
        with np.load(self.result) as weights:
            return list(weights.values())

    def text(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-8000:]


def gap(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    return max(np.abs(a - b).max() for a, b in zip(found, expected, strict=True))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[np.ndarray]:
    """The weights of one process without tfdist's strategies."""
    program = Program(tmp_path_factory.mktemp("programs") / "alone", "MirroredStrategy()")
    text = (program.folder / "train.py").read_text()
    (program.folder / "train.py").write_text(text.replace("tfdist.MirroredStrategy()", "tf.distribute.get_strategy()"))
    return program.run()


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("MirroredStrategy()", ()),
        ("MultiWorkerMirroredStrategy()", ()),
        ("MultiWorkerMirroredStrategy()", ("-n", "1")),
        ("MultiWorkerMirroredStrategy()", ("-n", "2")),
        ("MultiWorkerMirroredStrategy(compression='fp16')", ("-n", "2")),
        ("MultiWorkerMirroredStrategy()", ("-n", "2", "--transport", "tensorflow")),
    ],
)
def test_a_program_equals_one_process(
    alone: list[np.ndarray], tmp_path: Path, strategy: str, options: tuple[str, ...]
) -> None:
    program = Program(tmp_path / "program", strategy)
    weights = program.run(*options)
    assert gap(weights, alone) < (1e-2 if "compression" in strategy else 1e-4), program.text()
    if "2" in options and "trained on GPU" in program.text():
        assert "Processes share a GPU" in program.text()


def test_parameter_servers_train(tmp_path: Path, alone: list[np.ndarray]) -> None:
    """One worker takes one step after the other, and loses no batch."""
    program = Program(tmp_path / "program", "ParameterServerStrategy()")
    weights = program.run("-n", "1", "--ps", "1")
    assert all(np.isfinite(weight).all() for weight in weights)
    assert gap(weights, alone) < 0.5, program.text()


def test_killed_and_resumed_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    # Some sums on a GPU have no fixed order otherwise.
    fixed = {"DETERMINISTIC": "1", "EPOCHS": "6"}
    whole = Program(tmp_path / "whole", "MirroredStrategy()").run(**fixed)
    program = Program(tmp_path / "killed", "MirroredStrategy()")
    process = program.start(**fixed, BACKUP=str(tmp_path / "backup"), PAUSE="3")
    end = time.monotonic() + _DEADLINE
    try:
        while "epoch 3\n" not in program.text() or not [*tmp_path.glob("backup/checkpoint-*/manifest.json")]:
            assert process.poll() is None and time.monotonic() < end, program.text()
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
    assert not program.result.exists()
    resumed = program.run(**fixed, BACKUP=str(tmp_path / "backup"))
    assert "epoch 0\n" not in program.text() and gap(resumed, whole) == 0.0
