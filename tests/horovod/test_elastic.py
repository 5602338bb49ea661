"""Elastic jobs: the processes that are left go on when one is killed, and another one can join them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.horovod.test_launch import weights
from tests.launcher.conftest import SOURCE, Launch

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(240)]

# Arguments: the file for the weights, and what happens at the tenth step: "kill 0", "kill 1", "kill 1 disk", "add",
# "remove" (of a host), "preempt", or nothing.
TRAIN = """
import os, signal, sys, time
from pathlib import Path
import keras, numpy as np, tfdist

strategy = tfdist.MultiWorkerMirroredStrategy()
print("began", os.getpid(), "of", strategy.num_replicas_in_sync, flush=True)
happening = " ".join(sys.argv[2:])
host = os.environ.get("HOROVOD_HOSTNAME")
first = {"localhost": 0, "127.0.0.1": 1}.get(host, 0)

def saved():
    return len(list(Path("backup").glob("checkpoint-*/manifest.json")))

class Happening(keras.callbacks.Callback):
    steps = 0
    def on_train_batch_end(self, batch, logs=None):
        type(self).steps += 1
        once = "once" if os.environ.get("TFDIST_RESTART") == "0" else None
        if self.steps == 10 and happening.removesuffix(" disk") in (f"kill {first}", f"kill {once}"):
            until = time.monotonic() + 20
            # They are written in the background.
            while happening.endswith("disk") and saved() < 2 and time.monotonic() < until:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        if happening == "preempt disk":
            Path("training").touch()
            time.sleep(0.1)
        if happening == "remove" and self.steps == 10:
            Path("removed").touch()
        if happening == "remove":
            time.sleep(0.15 if strategy.num_replicas_in_sync > 1 else 0.0)
        if happening == "add":
            Path("added").touch()
            time.sleep(0.0 if strategy.num_replicas_in_sync > 1 else 0.15)

keras.utils.set_random_seed(1)
with strategy.scope():
    layers = [keras.layers.Dense(8, "relu"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile("adam", "mse", metrics=["mae"])
rows = np.random.default_rng(0).normal(size=(200, 4)).astype("float32")
callbacks = [Happening()]
if happening.endswith("disk"):
    callbacks.append(tfdist.callbacks.BackupAndRestore("backup", save_freq=4))
history = model.fit(rows, rows[:, :1], batch_size=4, epochs=4, shuffle=True, verbose=0, callbacks=callbacks)
before = model.get_weights()[0]
model.fit(rows, rows[:, :1], batch_size=100, epochs=1, verbose=0)
assert not np.array_equal(before, model.get_weights()[0]), "a second fit has done nothing"
if strategy.is_chief:
    np.savez(sys.argv[1], *model.get_weights(), np.ravel(history.history["loss"]), np.ravel(history.history["mae"]))
steps = int(model.optimizer.iterations.numpy())
print("ended", os.getpid(), "of", strategy.num_replicas_in_sync, "iterations", steps, flush=True)
"""


TWO_NAMES = "echo localhost:1; echo 127.0.0.1:1"


@pytest.fixture
def begin(launch, tmp_path):
    """Starts the program as an elastic job of one to two processes on this machine."""
    (tmp_path / "train.py").write_text(TRAIN)

    def start(hosts: str, *happening: str, options: Sequence[str] = ()) -> Launch:
        discovery = tmp_path / "hosts.sh"
        discovery.write_text(f"#!/bin/sh\n{hosts}\n")
        discovery.chmod(0o755)
        own = ("--transport", "horovod", "-n", "1:2", "--host-discovery", str(discovery), "--interface", "lo", *options)
        command = [sys.executable, "-m", "tfdist", "run", *own, "train.py", "elastic.npz", *happening]
        return launch("", command=command)

    return start


@pytest.fixture
def elastic(begin):
    """The same to its end, which is a good one."""

    def run(hosts: str, *happening: str) -> tuple[str, str]:
        started = begin(hosts, *happening, options=["--output", "all"])
        result = started.finish(180)
        assert result.code == 0, result.out[-3000:] + result.err[-6000:]
        assert_nothing_is_left(started)
        return result.out, result.err

    return run


def assert_nothing_is_left(started: Launch) -> None:
    started.assert_nothing_is_left(10)
    ours = re.compile(rf"tfdist-elastic-\d+-({'|'.join(map(str, pids_of(started))) or 'none'})-.*")
    assert [name for name in os.listdir("/dev/shm") if ours.fullmatch(name)] == []


def pids_of(started: Launch) -> list[int]:
    """The processes that have begun."""
    logs = started.folder.glob("tfdist-logs/*/worker-*.log")
    return [int(pid) for log in logs for pid in re.findall(r"began (\d+) of", log.read_text())]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """What one process trains."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "train.py").write_text(TRAIN)
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "train.py", "alone.npz"]
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    return folder / "alone.npz"


def told(out: str, what: str) -> list[tuple[int, int]]:
    """Process id and number of processes, of each line of a kind."""
    return [(int(pid), int(size)) for pid, size in re.findall(rf"{what} (\d+) of (\d+)", out)]


@pytest.mark.parametrize("victim", ["0", "1", "1 disk"])
@pytest.mark.exhaustive
def test_a_killed_rank_does_not_restart_the_other(elastic, alone, tmp_path, victim):
    out, err = elastic(TWO_NAMES, "kill", *victim.split())
    began, ended = told(out, "began"), told(out, "ended")
    assert [size for _, size in began] == [2, 2]
    ((pid, size),) = ended
    assert pid in [pid for pid, _ in began], "it is another process"
    assert size == 1
    assert "tfdist: of 2 processes one is lost" in out
    assert "tfdist: 1 process goes on" in out
    assert re.search(
        r"^tfdist: worker \d was killed by SIGKILL at step \d+; the training goes on from step \d+ with 1 process$",
        err,
        re.M,
    ), err
    assert "iterations 202" in out
    assert np.abs(weights(alone) - weights(tmp_path / "elastic.npz")).max() <= 2e-5


@pytest.mark.exhaustive
def test_another_process_joins(elastic, alone, tmp_path):
    out, err = elastic("echo localhost:1; if [ -e added ]; then echo 127.0.0.1:1; fi", "add")
    began, ended = told(out, "began"), told(out, "ended")
    assert [size for _, size in began] == [1, 2]
    assert {pid for pid, _ in ended} == {pid for pid, _ in began}
    assert [size for _, size in ended] == [2, 2]
    assert "tfdist: other processes are to take part; all go on from the state that they hold" in out
    assert re.search(
        r"^tfdist: the hosts have changed; the training goes on from step \d+ with 2 processes$", err, re.M
    ), err
    assert out.count("iterations 202") == 2
    assert np.abs(weights(alone) - weights(tmp_path / "elastic.npz")).max() <= 2e-5


@pytest.mark.exhaustive
def test_a_host_is_taken_off(elastic, alone, tmp_path):
    out, err = elastic("echo localhost:1; if [ ! -e removed ]; then echo 127.0.0.1:1; fi", "remove")
    assert [size for _, size in told(out, "ended")] == [1]
    assert re.search(r"^tfdist: worker \d is ended: its host 127.0.0.1 is not used any more$", err, re.M), err
    assert "Traceback" not in out + err
    assert "terminate called" not in out + err
    assert np.abs(weights(alone) - weights(tmp_path / "elastic.npz")).max() <= 2e-5


@pytest.mark.exhaustive
def test_a_single_host_is_started_again_or_given_up_in_one_line(begin, alone, tmp_path):
    started = begin(
        "echo localhost:2", "kill", "0", "disk", options=["--max-restarts", "0", "--log-dir", "tfdist-logs/a"]
    )
    result = started.finish(120)
    assert_nothing_is_left(started)
    assert result.code == 137, result.err
    assert "Traceback" not in result.err
    announced, warned, given_up = result.err.splitlines()
    assert announced.endswith("complete logs in tfdist-logs/a/")
    assert warned.startswith("tfdist: all processes are on one host, localhost: ")
    assert re.match(r"tfdist: worker \d was killed by SIGKILL at step 10; too few processes are left", given_up)
    assert "goes on from its last backup. Complete log: tfdist-logs/a/worker-" in given_up
    # Both are killed at their tenth step: the backup of the eighth one is there.
    started = begin("echo localhost:2", "nothing", "disk")
    result = started.finish(120)
    assert result.code == 0, result.err
    assert "The fit goes on at step 8 of epoch 1" in result.out
    assert np.abs(weights(alone) - weights(tmp_path / "elastic.npz")).max() <= 2e-5


@pytest.mark.exhaustive
def test_a_single_host_is_started_again(begin, alone, tmp_path):
    started = begin("echo localhost:2", "kill", "once", "disk")
    result = started.finish(150)
    assert result.code == 0, result.err
    assert_nothing_is_left(started)
    assert re.search(
        r"^tfdist: worker \d was killed by SIGKILL at step 10; restart 1 of 3\ntfdist: restart 1 of 3: training again",
        result.err,
        re.M,
    )
    assert np.abs(weights(alone) - weights(tmp_path / "elastic.npz")).max() <= 2e-5


@pytest.mark.exhaustive
def test_preemption_saves_on_all_and_is_told_by_the_exit_code(begin):
    started = begin(TWO_NAMES, "preempt", "disk")
    started.wait_for_file("training", deadline=60)
    time.sleep(1.0)
    started.popen.send_signal(signal.SIGTERM)
    result = started.finish(60)
    assert_nothing_is_left(started)
    assert result.code == 77, result.err
    assert "Traceback" not in result.err + result.out
    assert "which is saved; exit code 77" in result.out
    assert [path.name for path in started.folder.glob("backup/checkpoint-*")]


def test_options_that_do_not_fit(launch, tmp_path):
    (tmp_path / "train.py").write_text("")
    (tmp_path / "hosts.sh").write_text("echo localhost:2\n")
    (tmp_path / "hosts.sh").chmod(0o755)
    for options, text in (
        (["-n", "1:2"], "expected --transport horovod, too"),
        (
            ["--transport", "horovod", "-n", "1:2", "--hang-timeout", "30"],
            "--hang-timeout and --host-discovery: expected",
        ),
        (["--transport", "horovod"], "--host-discovery: expected -n MIN:MAX, too"),
        (["--transport", "horovod", "-n", "1:2"], "Add --interface lo if all processes stay on this machine"),
        (
            ["--transport", "horovod", "-n", "1:2", "--interface", "eth99"],
            "--interface eth99: this machine has no such",
        ),
    ):
        command = [sys.executable, "-m", "tfdist", "run", *options, "--host-discovery", "hosts.sh", "train.py"]
        result = launch("", command=command).finish(30)
        assert result.code == 2
        assert text in result.err
        assert "Traceback" not in result.err
    assert not list(tmp_path.glob("tfdist-logs"))
