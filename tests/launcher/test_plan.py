"""`tfdist plan` on scripts, and the measurement of this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.conftest import SOURCE
from tfdist.planning.calibration import this_machine
from tfdist.planning.hardware import Hardware

DEADLINE = 180.0
SCRIPT = """\
import sys
import keras, numpy as np
import tfdist
print("arguments", sys.argv[1:], __name__)
strategy = tfdist.MultiWorkerMirroredStrategy()
with strategy.scope():
    layers = [keras.layers.Dense(16, "relu") for _ in range(6)]
    model = keras.Sequential([keras.Input((16,)), *layers, keras.layers.Dense(1)])
    model.compile("adam", "mse")
try:
    callback = tfdist.callbacks.BackupAndRestore("backup")
    model.fit(np.ones((96, 16)), np.ones((96, 1)), batch_size=48, epochs=1000000, callbacks=[callback])
except Exception as error:
    print("caught", error)
print("trained")
"""


def tfdist_plan(folder: Path, *words: str, code: int = 0) -> str:
    """What `tfdist plan` prints."""
    result = subprocess.run(
        [sys.executable, "-m", "tfdist", "plan", *words],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(SOURCE),
            "CUDA_VISIBLE_DEVICES": "-1",
            "XDG_CACHE_HOME": str(folder / ".cache"),
        },
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout if code == 0 else result.stderr


@pytest.mark.slow
@pytest.mark.nightly
def test_a_script_is_run_up_to_its_fit(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    printed = tfdist_plan(tmp_path, "--devices", "2", "--hardware", "v100-nvlink", "train.py", "--epochs", "3")
    assert "arguments ['--epochs', '3'] __main__\n" in printed
    assert "trained" not in printed and "caught" not in printed
    assert "A step of 'sequential' on 48 rows, predicted for hosts of 8 V100" in printed
    names = re.findall(r"^ [* ] (.+?)  +\d", printed, re.MULTILINE)
    assert {"one device", "Mirrored", "MultiWorker"} < set(names)
    assert any(name.startswith("Pipeline 1f1b, M=") for name in names)
    assert re.search(
        r"^Take .* ms a step, .*, started by `(python|tfdist run .*) train.py --epochs 3`\.$", printed, re.MULTILINE
    )
    assert [name for name in os.listdir(tmp_path) if name != ".cache"] == ["train.py"]


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.nightly
def test_this_machine_is_measured_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there is one core only")
    found = this_machine(2)
    assert found.kind == "CPU" and set(found.devices) == {1, 2} and found.per_host == 2
    for device in found.devices.values():
        assert device.flops > 1e8 and device.bandwidth > 1e8 and 0 < device.operation < 0.1
    assert found.inside.latency > 0 and found.inside.bandwidth > 1e5 and found.cluster_step > 0
    monkeypatch.setattr("tfdist.planning.calibration.calibrate", lambda cores, processes: found)
    (kept,) = (tmp_path / "tfdist" / "machines").iterdir()
    kept.write_text("damaged")
    assert this_machine(2) == found
    assert Hardware.from_json(kept.read_text()) == found
    # Where nothing can be kept, what was measured is used all the same.
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept))
    assert this_machine(2) == found
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("tfdist.planning.calibration.calibrate", None)
    assert this_machine(2) == found
