"""`tfdist plan`: which scripts it can plan, what its options do, and what it says of others."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from tests.tiers import daily
from tfdist.launcher.command import main
from tfdist.planning.hardware import PRESETS

SCRIPT = """\
import keras, numpy as np, tensorflow as tf
import tfdist
print("a line of the script")
strategy = tfdist.{strategy}
with strategy.scope():
    layers = [keras.layers.Dense(16, "relu") for _ in range(6)]
    model = keras.Sequential([keras.Input((16,)), *layers, keras.layers.Dense(1)], name="mine")
    model.compile("adam", "mse")
model.fit({data})
raise AssertionError("trained")
"""
ARRAYS = "np.ones((96, 16)), np.ones((96, 1)), batch_size=48"
DATASET = "tf.data.Dataset.from_tensors((np.ones((16,)), np.ones((1,)))).repeat().batch(40), steps_per_epoch=3"
NEEDS_NO_TARGETS = """\
import keras, numpy as np, tensorflow as tf
class Own(keras.Model):
    def __init__(self):
        super().__init__(name="own")
        self.dense = keras.layers.Dense(4)
    def call(self, x):
        y = self.dense(x[0] if isinstance(x, (list, tuple)) else x)
        self.add_loss(keras.ops.mean(y * y))
        return y
model = Own()
model.compile("sgd")
"""
CARDS = ("--hardware", "v100-nvlink")


def plan(*words: str) -> Result:
    return CliRunner().invoke(main, ["plan", *words])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Keep what is measured of this machine out of it, and what is known already.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize(
    ("strategy", "data", "rows"),
    daily([("ParameterServerStrategy()", DATASET, 40), ("HorovodStrategy()", ARRAYS, 48)], "HorovodStrategy()"),
)
def test_scripts_with_other_strategies(folder, strategy, data, rows):
    (folder / "train.py").write_text(SCRIPT.format(strategy=strategy, data=data))
    result = plan("--devices", "2", *CARDS, "train.py")
    assert result.exit_code == 0, result.output
    assert f"A step of 'mine' on {rows} rows, predicted for hosts of 8 V100" in result.output


@pytest.mark.parametrize(
    ("call", "rows"),
    [
        ("fit(np.ones((6, 4), 'float32'), None, 3, 1)", 3),
        ("fit([np.ones((6, 4), 'float32')], batch_size=2)", 2),
        ("fit(tf.data.Dataset.from_tensors(np.ones((4,), 'float32')).repeat(6).batch(3))", 3),
        ("fit(np.ones((6, 4)), np.ones((6, 1)), 3, 1, sample_weight=np.ones(6))", 3),
    ],
)
def test_fits_of_all_kinds(folder, call, rows):
    """Also models that need no targets, and arguments without names."""
    (folder / "train.py").write_text(f"{NEEDS_NO_TARGETS}model.{call}\n")
    result = plan("--devices", "2", *CARDS, "train.py")
    assert f"A step of 'own' on {rows} rows" in result.output, result.output


@pytest.mark.nightly
def test_options(folder, monkeypatch):
    (folder / "train_as_module.py").write_text(SCRIPT.format(strategy="MirroredStrategy()", data=ARRAYS))
    monkeypatch.syspath_prepend(str(folder))
    options = ("--hardware", "p100-25gbe", "--batch-size", "4096", "--json", "--save", "a.json")
    result = plan("--devices", "1,2,4,8,16", *options, "-m", "train_as_module")
    found = json.loads(result.stdout)
    assert {row["devices"] for row in found["rows"]} == {1, 2, 4, 8, 16}
    started = {"python -m train_as_module", "tfdist run -n 2 --gpus-per-worker 1 -m train_as_module"}  # of four GPUs
    assert {row["start"] for row in found["rows"]} > started
    assert sum(row["best"] for row in found["rows"]) == 1
    assert all(row["fits"] for row in found["rows"])
    # What was written down is the same hardware.
    again = json.loads(plan("--devices", "2", "--hardware", "a.json", "--json", "-m", "train_as_module").stdout)
    assert again["hardware"] == "hosts of 4 P100, 25 Gbit/s"


def test_what_cannot_be_planned(folder):
    (folder / "loop.py").write_text("print('no fit')\n")
    (folder / "kept.json").write_text(PRESETS["v100-nvlink"].to_json())
    (folder / "leaves.py").write_text("import sys\nsys.exit()\n")
    (folder / "empty.py").write_text(
        f"{NEEDS_NO_TARGETS}model.fit(tf.data.Dataset.from_tensor_slices([[1.0]]).batch(1).take(0))\n"
    )
    for words, said in (
        ((*CARDS, "loop.py"), "loop.py, which has ended without a call of model.fit()"),
        ((*CARDS, "leaves.py"), "leaves.py, which has ended without a call of model.fit()"),
        ((*CARDS, "empty.py"), "the dataset is empty. Expected: at least one batch."),
        ((*CARDS, "--save", "nowhere/a", "loop.py"), "No such file or directory: 'nowhere/a'"),
        # What is to be written again is read before.
        (("--hardware", "kept.json", "--save", "kept.json", "loop.py"), "loop.py, which has ended without"),
        (("--hardware", "abacus", "loop.py"), "Received: hardware 'abacus'. Expected: one of p100-25gbe"),
        # This machine is not measured in vain.
        ((), "nothing to plan: expected a script. Example: tfdist plan train.py"),
        (("absent.py",), "absent.py: no such script"),
        (("--", "true"), "'true', a program that is not Python. Expected: a script"),
        (("--devices", "many", "loop.py"), "--devices many: expected a number"),
    ):
        result = plan(*words)
        assert result.exit_code in (1, 2) and said in result.output
    assert not (folder / "cache" / "tfdist").exists()


def test_a_fault_of_the_script_is_its_own(folder):
    (folder / "fails.py").write_text("import tfdist\nint('four')\n")
    result = plan(*CARDS, "fails.py")
    assert isinstance(result.exception, ValueError) and str(result.exception).endswith("'four'")
    (folder / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    assert plan(*CARDS, "leaves.py").exit_code == 3
