"""A script under `tfdist run --transport horovod` and horovodrun: as in one process, and what a killed rank does."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.launcher.conftest import Launch
from tests.processes import forked

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(300)]

TRAIN = """
import os, signal, sys
import keras, numpy as np, tfdist

strategy = tfdist.STRATEGY()
keras.utils.set_random_seed(1)

class Fault(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if "--fault" in sys.argv and os.environ.get("TFDIST_RESTART", "0") == "0":
            if not strategy.is_chief and batch == 6: os.kill(os.getpid(), signal.SIGKILL)

with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
data = np.random.default_rng(0).normal(size=(40, 4)).astype("float32"), np.ones((40, 1), "float32")
callbacks = [Fault()]
if "--backup" in sys.argv:
    callbacks.append(tfdist.callbacks.BackupAndRestore(sys.argv[-1] + "-backup", save_freq=2, asynchronous=False))
model.fit(*data, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
if strategy.is_chief:
    np.savez(sys.argv[-1], *model.get_weights())
print("trained by", type(strategy).__name__, strategy._peers and strategy._peers.names)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The program with tfdist's multi-worker strategy, which knows nothing of Horovod."""
    path = tmp_path / "train.py"
    path.write_text(TRAIN.replace("STRATEGY", "MultiWorkerMirroredStrategy"))
    return path


def weights(path: Path) -> np.ndarray:
    """All weights that a program has saved, one after the other."""
    with np.load(path) as saved:
        return np.concatenate([saved[name].ravel() for name in saved])


def tfdist_run(*words: str) -> list[str]:
    return [sys.executable, "-m", "tfdist", "run", "-n", "2", "--transport", "horovod", *words]


def test_an_unchanged_script_trains_to_the_weights_of_one_process(script, warm_launch, tmp_path):
    alone = forked([str(script), "alone.npz"], tmp_path / "alone", tmp_path, os.environ)
    assert alone.wait(100) == 0, (tmp_path / "alone").read_text()
    result = warm_launch("", command=tfdist_run(str(script), "together.npz")[3:]).finish(120)
    assert result.code == 0, result.err
    assert "trained by HorovodStrategy ['worker 0 (127.0.0.1:" in result.out
    assert np.abs(weights(tmp_path / "alone.npz") - weights(tmp_path / "together.npz")).max() <= 5e-7


def test_a_killed_rank_changes_nothing(script, warm_launch, tmp_path):
    for name, fault in (("undisturbed", []), ("killed", ["--fault"])):
        command = tfdist_run("--log-dir", f"{name}-logs", str(script), "--backup", *fault, f"{name}.npz")
        started = warm_launch("", command=command[3:])
        result = started.finish(150)
        assert result.code == 0, result.err
        started.assert_nothing_is_left()
    assert re.search(
        r"worker 1 was killed by SIGKILL at step 7; restart 1 of 3\ntfdist: restart 1 of 3: training again after",
        result.err,
    )
    assert np.array_equal(weights(tmp_path / "undisturbed.npz"), weights(tmp_path / "killed.npz"))


def horovodrun(script: Path, *words: str) -> list[str]:
    command = shutil.which("horovodrun", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
    assert command is not None
    options = ("--gloo", "-np", "2", "-H", "localhost:2", "--network-interfaces", "lo")
    return [command, *options, sys.executable, str(script), *words]


@pytest.mark.nightly
def test_horovodrun_starts_it_as_well(script, launch, tmp_path):
    script.write_text(TRAIN.replace("STRATEGY", "HorovodStrategy"))
    result = launch("", command=horovodrun(script, "horovodrun.npz")).finish(120)
    assert result.code == 0, result.err
    assert re.search(r"trained by HorovodStrategy \['rank 0 \(.+\)', 'rank 1 \(.+\)'\]", result.out)
    again = launch("", command=tfdist_run(str(script), "run.npz")).finish(120)
    assert again.code == 0, again.err
    assert np.array_equal(weights(tmp_path / "horovodrun.npz"), weights(tmp_path / "run.npz"))


@pytest.mark.mpi
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun")
@pytest.mark.nightly
def test_mpirun_starts_it_without_mpi_and_horovodrun_a_strategy_without_horovod(script, launch, tmp_path):
    result = launch("", command=horovodrun(script, "horovodrun.npz")).finish(120)
    assert result.code == 0, result.err
    assert "trained by MultiWorkerMirroredStrategy ['worker 0 (" in result.out
    script.write_text(TRAIN.replace("STRATEGY", "HorovodStrategy"))
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, str(script), "mpirun.npz"]
    result = launch("", command=mpirun).finish(120)
    assert result.code == 0, result.err
    # By tfdist's own names: Horovod has been told by tfdist who is where.
    assert result.out.count("trained by HorovodStrategy ['worker 0 (") == 2
    assert np.abs(weights(tmp_path / "horovodrun.npz") - weights(tmp_path / "mpirun.npz")).max() <= 5e-7


@pytest.mark.nightly
def test_a_killed_rank_ends_a_job_of_horovodrun(script, launch):
    script.write_text(TRAIN.replace("STRATEGY", "HorovodStrategy"))
    began = time.monotonic()
    started: Launch = launch("", command=horovodrun(script, "--fault", "never.npz"))
    result = started.finish(120)
    assert result.code != 0
    assert "Horovod detected that one or more processes exited with non-zero status" in result.err, result.err
    assert time.monotonic() - began < 100
    assert not (script.parent / "never.npz").exists()
    started.assert_nothing_is_left(10)
