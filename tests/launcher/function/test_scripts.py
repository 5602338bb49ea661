"""`tfdist.launch` in scripts: without a main guard, from modules, stopped; and a training that equals one process'."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launcher.conftest import SOURCE, Launch
from tests.processes import forked

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture
def start(launches: list[Launch], folder: Path) -> Callable[..., Launch]:
    """Writes files, by name, and starts `python script.py`."""

    def start(**files: str) -> Launch:
        for name, text in files.items():
            (folder / f"{name}.py").write_text(text)
        launches.append(Launch(folder, [sys.executable, "script.py"], env={"PYTHONPATH": str(SOURCE)}))
        return launches[-1]

    return start


def test_a_script_without_a_main_guard(start):
    script = start(
        helper="def double(x):\n    return 2 * x\n",
        script="import helper, tfdist\nprint('begins')\nprint(tfdist.launch(helper.double, (4,)))\n"
        "def own(x):\n    return helper.double(x) + 1\nprint(tfdist.launch(own, (4,)))\n",
    )
    ended = script.finish(60)
    assert (ended.code, ended.out) == (0, "begins\n8\n9\n"), ended.err
    script.assert_nothing_is_left()


def test_a_module_that_launches_when_it_is_imported(start):
    """Its workers import it, too: they must not start workers of their own."""
    script = start(
        trainer="import tfdist\ndef train():\n    return 1\nprint(tfdist.launch(train))\n", script="import trainer\n"
    )
    ended = script.finish(60)
    assert ended.code == 1
    assert "put the call below `if __name__ == '__main__':`" in ended.err
    script.assert_nothing_is_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_script_that_is_stopped(start, number):
    """It ends as it would have without workers, and they end with it."""
    script = start(
        script="""
import os, pathlib, signal, time, tfdist
signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run in the background of a shell
def wait():
    pathlib.Path(f"ready-{tfdist.discover().rank}").touch()
    time.sleep(1000)
tfdist.launch(wait)
"""
    )
    script.wait_for_file("ready-0", "ready-1", deadline=60)
    script.popen.send_signal(number)
    ended = script.finish(60)
    assert ended.code == -number
    assert ("KeyboardInterrupt" in ended.err) == (number == signal.SIGINT)
    script.assert_nothing_is_left()


TRAINING = """
import json, sys
import keras, numpy as np, tensorflow as tf
import tfdist

rng = np.random.default_rng(1)
x = rng.normal(size=(60, 4)).astype("float32")
y = (x @ np.array([[1.0], [-2.0], [3.0], [0.5]]) > 0).astype("float32")

def train(rate):
    strategy = tfdist.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1, "sigmoid")])
        model.compile(keras.optimizers.SGD(rate, momentum=0.9), "binary_crossentropy")
    history = model.fit(x, y, batch_size=16, epochs=3, verbose=0)
    return strategy.num_replicas_in_sync, history, model

def differs(one, other):
    return max(float(np.abs(a - b).max()) for a, b in zip(one.get_weights(), other.get_weights()))

replicas, history, model = tfdist.launch(train, (0.1,))
alone, own_history, own = train(0.1)
_, _, another = train(0.11)
said = []
dataset, tensor, variable = tf.data.Dataset.range(3), tf.constant(1.0), tf.Variable(1.0)
strategy, optimizer = tfdist.MirroredStrategy(), keras.optimizers.SGD()
for function in (lambda: own, lambda: dataset, lambda: tensor, lambda: variable, lambda: strategy, lambda: optimizer):
    try:
        tfdist.launch(function)
    except TypeError as error:
        said.append(str(error))
json.dump({
    "replicas": [replicas, alone],
    "difference": differs(model, own),
    "control": differs(another, own),
    "losses": [history.history["loss"], own_history.history["loss"]],
    "model of the history": repr(history.model),
    "iterations": int(model.optimizer.iterations.numpy()),
    "said": said,
}, open("result.json", "w"))
"""


@pytest.mark.slow
def test_a_training_equals_that_of_one_process(folder):
    (folder / "script.py").write_text(TRAINING)
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "TF_CPP_MIN_LOG_LEVEL": "3"}
    process = forked(["script.py"], folder / "log", folder, env)
    try:
        assert process.wait(timeout=280) == 0, (folder / "log").read_text()[-4000:]
    finally:
        process.kill()
    result = json.loads((folder / "result.json").read_text())
    assert result["replicas"] == [2, 1]
    assert result["difference"] < 1e-5 < 1e-3 < result["control"]
    assert result["losses"][0] == pytest.approx(result["losses"][1], rel=1e-5)
    assert result["model of the history"] == "None"
    assert result["iterations"] == 12
    names = ["own", "dataset", "tensor", "variable", "strategy", "optimizer"]
    for name, said in zip(names, result["said"], strict=True):
        assert said.startswith(f"launch: `{name}`, which `<lambda>` uses: a ")
        assert " belongs to this process and its devices. " in said


RESTARTED = """
import json, os
import keras, numpy as np
import tfdist

x = np.linspace(-1.0, 1.0, 64, dtype="float32").reshape(16, 4)
y = x.sum(axis=1, keepdims=True)

class Kill(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        first = os.environ["TFDIST_RESTART"] == "0"
        if epoch == 2 and first and os.environ["KILL"] == "yes" and tfdist.discover().rank == 1:
            os.kill(os.getpid(), 9)

def train(folder):
    strategy = tfdist.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    backup = tfdist.callbacks.BackupAndRestore(folder)
    history = model.fit(x, y, batch_size=8, epochs=4, verbose=0, callbacks=[backup, Kill()])
    weights = [weight.tolist() for weight in model.get_weights()]
    return os.environ["TFDIST_RESTART"], history.history["loss"], weights

results = [tfdist.launch(train, (kill,), env={"KILL": kill}, max_restarts=1) for kill in ("no", "yes")]
json.dump(results, open("result.json", "w"))
"""


@pytest.mark.slow
@pytest.mark.nightly
def test_a_training_that_is_restarted_ends_as_if_nothing_had_happened(start):
    script = start(script=RESTARTED)
    ended = script.finish(280)
    assert ended.code == 0, ended.err
    (number, losses, weights), (restart, *restarted) = json.loads((script.folder / "result.json").read_text())
    assert (number, restart) == ("0", "1")
    assert restarted == [losses, weights]
    assert "worker 1 was killed by SIGKILL at step 4; restart 1 of 1" in ended.err


KILLED = """
import os, signal, tempfile, tfdist
def kill(pid):
    os.kill(pid, signal.SIGKILL)
tempfile.tempdir = "{temporary}"
tfdist.launch(kill, (os.getpid() if {itself} else os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000"),), workers=1)
"""


def test_what_a_killed_call_has_left_is_removed_by_the_next_one(start, folder):
    """Its arguments, pickled: they may be large, or secret."""
    (folder / "temporary").mkdir()
    other = f"tfdist-launch-{'0' * 32}-1-2-3-of-another-host"
    (folder / "temporary" / other).mkdir()
    assert start(script=KILLED.format(temporary=folder / "temporary", itself=True)).finish(60).code == -9
    left = [path.name for path in (folder / "temporary").iterdir()]
    assert len(left) == 2
    ended = start(script=KILLED.format(temporary=folder / "temporary", itself=False)).finish(60)
    assert ended.code == 0, ended.err
    assert [path.name for path in (folder / "temporary").iterdir()] == [other]


def test_a_folder_that_was_deleted(start):
    text = "import os, tfdist\nos.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')\ntfdist.launch(print)\n"
    ended = start(script=text).finish(60)
    assert ended.err.splitlines()[-1].startswith("FileNotFoundError: Received: a current folder that does not exist")


SHARDED = """
import keras, numpy as np, tfdist

x = np.random.default_rng(1).normal(size=(60, 4)).astype("float32")

def train():
    strategy = tfdist.FullyShardedStrategy()
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    model.fit(x, x[:, :1], batch_size=20, epochs=2, verbose=0)
    print("evaluated:", model.evaluate(x, x[:, :1], verbose=0))
    return model

print("here:", tfdist.launch(train).evaluate(x, x[:, :1], verbose=0))
"""


@pytest.mark.nightly
def test_a_model_of_which_each_worker_has_a_part_comes_back_whole(start):
    script = start(script=SHARDED)
    ended = script.finish(180)
    assert ended.code == 0, ended.err
    there, here = (float(line.rpartition(": ")[2]) for line in ended.out.splitlines()[-2:])
    assert here == pytest.approx(there, rel=1e-5)
    script.assert_nothing_is_left()
