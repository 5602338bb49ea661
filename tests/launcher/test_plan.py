"""`tfdist plan` on scripts, the measurement of this machine, and `tfdist.auto`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.conftest import SOURCE
from tfdist.planning.calibration import shares, this_machine
from tfdist.planning.hardware import Device, Hardware, Link
from tfdist.testing import run_local

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
@pytest.mark.exhaustive
def test_a_script_is_run_up_to_its_fit(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    printed = tfdist_plan(tmp_path, "--devices", "2", "--hardware", "v100-nvlink", "train.py", "--epochs", "3")
    assert "arguments ['--epochs', '3'] __main__\n" in printed
    assert "trained" not in printed and "caught" not in printed
    assert "A step of 'sequential' on 48 rows, predicted for hosts of 8 V100" in printed
    names = re.findall(r"^ [* ] (.+?)  +\d", printed, re.MULTILINE)
    assert names[:3] == ["one device", "one device, recompute", "one device, recompute+swap"]
    assert {"Mirrored", "MultiWorker", "ParameterServer", "HostOffload"} < set(names)
    assert any(name.startswith("Pipeline 1f1b, M=") for name in names)
    assert re.search(r"^Take .*, started by `(python|tfdist run .*) train.py --epochs 3`: ", printed, re.MULTILINE)
    assert [name for name in os.listdir(tmp_path) if name != ".cache"] == ["train.py"]


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.exhaustive
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
    # A process of a job may be kept to one of the cores; together they have all of them.
    every = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(every)})
    try:
        assert this_machine(2, cores=sorted(every)) == found
    finally:
        os.sched_setaffinity(0, every)
    with pytest.raises(ValueError, match=r"Received: processes=0\. Expected: at least 1"):
        this_machine(0)


def choose_here(log: str) -> list:
    """In a process of a job that is kept to one core: which machine is planned for, or why not."""
    import tfdist
    from tfdist.planning import automatic

    rank = tfdist.discover().rank
    os.sched_setaffinity(0, [sorted(os.sched_getaffinity(0))[rank]])
    asked = []

    def known(processes: int | None, cores: list[int]) -> Hardware:
        asked.append((processes, len(cores)))
        raise OSError("no machine")

    automatic.this_machine = known
    if log == "hosts":
        automatic.platform.node = lambda: f"host{rank}"
    try:
        tfdist.auto(lambda: None, 8, start_timeout=60.0)
    except ValueError as error:
        return [str(error), asked]


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.exhaustive
def test_a_job_is_measured_with_the_cores_of_all_its_processes():
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there is one core only")
    env = {"CUDA_VISIBLE_DEVICES": "-1"}
    first, other = run_local(choose_here, 2, args=("",), timeout=DEADLINE, env=env)
    # What goes wrong on the chief, the others hear of.
    assert first == ["no machine", [(2, 2)]] and other == ["no machine", []]
    for said, asked in run_local(choose_here, 2, args=("hosts",), timeout=DEADLINE, env=env):
        assert said.startswith("Received: processes on host0, host1, whose links are not known. Expected: tfdist.auto(")
        assert asked == []


def test_cores_are_dealt_out():
    assert shares([3, 4, 5, 6], 2) == [[3, 4], [5, 6]]
    assert shares([3], 2) == [[3], [3]]


def choose(flops: float, bandwidth: float) -> tuple[str, int, bool]:
    """In a process of a job: what `tfdist.auto` makes for a model, and whether it trains."""
    import keras
    import numpy as np

    import tfdist

    def build() -> keras.Model:
        layers = [keras.layers.Dense(32) for _ in range(6)]
        model = keras.Sequential([keras.Input((32,)), *layers])
        model.compile("sgd", "mse")
        return model

    device = Device(flops=flops, bandwidth=1e12, operation=0.0, memory=10**10)
    link = Link(0.0, bandwidth)
    hardware = Hardware("a machine", "CPU", {1: device, 2: device}, 2, link, link, 0.0, 0.0)
    strategy = tfdist.auto(build, 64, hardware=hardware)
    with strategy.scope():
        model = build()
    history = model.fit(np.ones((128, 32)), np.zeros((128, 32)), batch_size=64, verbose=0)
    return type(strategy).__name__, strategy.num_replicas_in_sync, bool(np.isfinite(history.history["loss"]).all())


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.exhaustive
def test_all_processes_get_the_same_strategy():
    assert run_local(choose, 2, args=(1e8, 1e9), timeout=DEADLINE) == [("MultiWorkerMirroredStrategy", 2, True)] * 2
    assert run_local(choose, 1, args=(1e8, 1e9), timeout=DEADLINE) == [("MirroredStrategy", 1, True)]
