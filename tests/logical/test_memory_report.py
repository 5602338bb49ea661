"""`tfdist.memory.report`: what it counts, for whom, and what it leaves alone."""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.logical.memory_models import MODELS, data
from tfdist import memory
from tfdist.memory.estimation import estimate
from tfdist.memory.estimation.batch import batch_of
from tfdist.memory.estimation.report import _moments
from tfdist.memory.modes import applied

ROWS, WIDTH = 512, 64


def stack(depth: int = 4, optimizer: object = "adam") -> keras.Model:
    x = inputs = keras.Input((WIDTH,))
    for index in range(depth):
        x = layers.Dense(WIDTH, activation="tanh", name=f"layer_{index}")(x)
    model = keras.Model(inputs, x)
    model.compile(optimizer, "mse")
    return model


def names(depth: int) -> list[str]:
    return [f"layer_{index}" for index in range(depth)]


def test_weights_slots_and_batch_are_counted_exactly():
    report = memory.report(stack(), ROWS)
    device = report["CPU:0"]
    weights = 4 * (WIDTH * WIDTH + WIDTH) * 4
    assert device.weights == weights
    assert 2 * weights <= device.slots <= 2 * weights + 64  # Adam has two, a counter and a learning rate
    assert device.batch == 2 * ROWS * WIDTH * 4
    assert device.total == device.weights + device.slots + device.batch + device.step
    assert sum(device.at_peak.values()) == device.step
    assert max(sum(moment.values()) for moment in device.timeline) <= device.step


def test_activations_are_those_of_the_blocks():
    activation = ROWS * WIDTH * 4
    policy = memory.MemoryPolicy({"*": "none"}, names(8))
    device = memory.report(stack(8), ROWS, policy)["CPU:0"]
    # At the end of the forward pass each layer has left what its tanh has returned.
    assert [device.at_peak[name] for name in names(7)] == [activation] * 7
    recomputed = memory.report(stack(8), ROWS, memory.MemoryPolicy("recompute", names(8)))["CPU:0"]
    # The input of a layer is what the one before it has returned: nothing is saved but the last one.
    assert device.step - activation <= recomputed.step <= device.step + 2 * activation


def test_gradients_of_weights_are_told_apart():
    model = stack(2)
    report = memory.report(model, 1)["CPU:0"]
    gradients = [moment.get("gradients of weights", 0) for moment in report.timeline]
    # With one row, what is left at the end of the backward pass are gradients, of all weights or of one at a time.
    assert WIDTH * WIDTH * 4 <= max(gradients) <= sum(w.nbytes for w in model.get_weights())


@pytest.mark.exhaustive
def test_a_policy_is_looked_at_and_left_alone():
    model = MODELS["unet"]()
    model.compile("adam", "sparse_categorical_crossentropy")
    memory.apply(model, "recompute")
    own = applied(model)
    function = model.make_train_function() or model.train_function
    recomputed, plain = memory.report(model, 64)["CPU:0"].step, memory.report(model, 64, "none")["CPU:0"].step
    assert recomputed < 0.75 * plain
    assert applied(model) is own
    assert model.train_function is function
    memory.remove(model)
    assert memory.report(model, 64)["CPU:0"].step == plain
    assert applied(model) is None


def test_replicas_have_their_part_of_the_batch(mirrored):
    with mirrored.scope():
        model = stack()
    report = memory.report(model, ROWS)
    one = memory.report(stack(), ROWS // 2)["CPU:0"]
    assert [device.device for device in report.devices][:2] == [
        tf.DeviceSpec.from_string(name).to_string().rpartition("device:")[2]
        for name in mirrored.extended.worker_devices
    ]
    for device in report.devices[:2]:
        assert (device.weights, device.batch) == (one.weights, one.batch)
        assert device.slots == pytest.approx(one.slots, abs=64)
        assert device.step == pytest.approx(one.step, rel=0.2)


@pytest.mark.exhaustive
def test_sharded_slots(mirrored):
    with mirrored.scope():
        whole, parts = stack(), stack(optimizer=tfdist.ShardedOptimizer(keras.optimizers.Adam()))
    for device, other in zip(memory.report(whole, ROWS).devices[:2], memory.report(parts, ROWS).devices, strict=False):
        assert other.slots == pytest.approx(device.slots / 2, rel=0.1)


@pytest.mark.parametrize(
    ("mode", "few", "many"),
    [("swap", 2, 6), *(pytest.param(mode, 4, 16, marks=pytest.mark.exhaustive) for mode in ("recompute+swap", "swap"))],
)
def test_what_is_on_the_host(mode, few, many, four_devices):
    steps = {}
    for depth in (few, many):
        with tfdist.MirroredStrategy(["CPU:1"]).scope():
            model = stack(depth)
        policy = memory.MemoryPolicy(mode, names(depth), min_bytes=0)
        plain, report = memory.report(model, ROWS, "none"), memory.report(model, ROWS, policy)
        assert report["CPU:0"].step > 0
        steps[depth] = plain["CPU:1"].step, report["CPU:1"].step, report["CPU:0"].step
    # Plain training keeps what more layers make on the device, here the host does.
    activation, more = ROWS * WIDTH * 4, many - few
    weights = more * WIDTH * (WIDTH + 1) * 4
    assert steps[many][0] - steps[few][0] >= more * activation
    assert steps[many][1] - steps[few][1] <= weights + activation
    assert steps[many][2] - steps[few][2] >= (more - 1) * activation


def test_weights_on_the_host(four_devices):
    with tfdist.HostOffloadStrategy("CPU:1", "CPU:0").scope():
        model = stack(8)
    report = memory.report(model, ROWS)
    assert report["CPU:1"].weights == report["CPU:1"].slots == 0
    assert report["CPU:0"].weights == 8 * WIDTH * (WIDTH + 1) * 4
    assert report.policy.mode == "stream"
    for policy in ("recompute", memory.MemoryPolicy("auto", budget="1GB")):
        with pytest.raises(ValueError, match=r"a policy for model .* under HostOffloadStrategy.*Expected: no policy"):
            memory.report(model, ROWS, policy)


@pytest.mark.parametrize(
    "name",
    [
        "unet",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("blocks", "dense", "resnet", "transformer", "written")
        ),
    ],
)
def test_shapes_of_targets(name):
    model = MODELS[name]()
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    x, y = data(name, 8)
    assert memory.report(model, data=(x, y))["CPU:0"].step > 0
    if name in ("blocks", "written"):
        with pytest.raises(ValueError, match=r"no known shapes. Expected: data=\(x, y\)"):
            memory.report(model, 8)
    else:
        assert [spec.shape for spec in batch_of(model, 8)] == [x.shape, y.shape]


def test_several_outputs():
    inputs = keras.Input((4,), name="x")
    model = keras.Model({"x": inputs}, {"a": layers.Dense(3)(inputs), "b": layers.Dense(1)(inputs)})
    model.compile("sgd", {"a": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "b": "mse"})
    x, y = batch_of(model, 8)
    assert (x["x"].shape, y["a"].shape, y["b"].shape) == ((8, 4), (8,), (8, 1))
    assert memory.report(model, 8)["CPU:0"].step > 0


def test_a_wrong_guess_is_told():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    model.compile(
        "sgd",
        lambda y, prediction: keras.ops.mean(keras.ops.take(prediction, keras.ops.cast(y[:, 5], "int32"), axis=1)),
    )
    with pytest.raises(ValueError, match=r"for which a batch .* was assumed; .* Expected: data=\(x, y\)"):
        memory.report(model, 8)
    assert memory.report(model, data=(np.ones((8, 4)), np.ones((8, 6), "int32")))["CPU:0"].step > 0
    assert applied(model) is None


def test_the_table_and_the_picture(tmp_path):
    report = memory.report(stack(8), ROWS, memory.MemoryPolicy("recompute", names(8)))
    lines = str(report).splitlines()
    assert lines[0] == f"A training step of '{report.model}', 512 rows, mode 'recompute'"
    rows = {line[:24].strip(): line[24:].split() for line in lines[3:]}
    assert rows["weights"] == [f"{report['CPU:0'].weights / 1e6:.2f}"]
    assert rows["all"] == [f"{report['CPU:0'].total / 1e6:.2f}"]
    assert [name for name in rows if name.startswith("layer_")] == names(8)
    report.plot(tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 10_000
    [line] = _moments(report.devices)
    assert max(sum(moment.values()) for moment in line) == report["CPU:0"].total


def test_small_models_are_told_in_kilobytes():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(8), layers.Dense(1)])
    model.compile("sgd", "mse")
    lines = str(memory.report(model, 8)).splitlines()
    rows = {line[:24].strip(): line.split() for line in lines}
    assert "kB" in lines[2].split()
    assert rows["weights"][1] == f"{4 * (4 * 8 + 8 + 8 + 1) / 1e3:.2f}"
    assert "at the moment of the step's peak" in lines[-1]


def test_the_picture_shows_what_was_measured(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    report = memory.report(stack(), ROWS)
    device = report["CPU:0"]
    measured = dataclasses.replace(device, measured=device.step + 1_000_000)
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        for name, devices in (("estimated", [device]), ("measured", [measured])):
            dataclasses.replace(report, devices=devices).plot(tmp_path / f"{name}.svg")
    shown = f"measured: {(device.total + 1_000_000) / 1e6:.4g} MB"
    assert shown in (tmp_path / "measured.svg").read_text(encoding="utf-8")
    assert "measured" not in (tmp_path / "estimated.svg").read_text(encoding="utf-8")


class Scored(keras.Model):
    """Has no targets: its loss is the weighted mean of what it returns."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(3)

    def call(self, x):
        return self.inner(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        assert y is None
        return keras.ops.mean(y_pred * sample_weight[:, None])


def test_batches_without_targets_and_models_that_are_not_built(monkeypatch):
    # No device is counted here, but the steps are run.
    monkeypatch.setattr(estimate, "_counted", lambda: [])
    model = Scored()
    model.compile("sgd")
    with pytest.raises(ValueError, match=r"which is not built.*Expected: data=\(x, y\).*model.build"):
        memory.report(model, 8)
    device = memory.report(model, data=(np.ones((8, 4)), None, np.ones((8,))), measured=True)["CPU:0"]
    assert (device.weights, device.batch) == (4 * (4 * 3 + 3), 4 * (8 * 4 + 8))
    model = keras.Sequential([layers.Dense(3)])
    model.compile("adam", "mse")
    policy = memory.MemoryPolicy("auto", budget="1MB")
    assert memory.choose(model, data=(np.ones((8, 4)), np.ones((8, 3))), policy=policy).plain > 0
    assert model.built


def test_what_cannot_be_estimated():
    with pytest.raises(ValueError, match=r"report\(\) for 'model'. Expected: a keras.Model, as the first argument"):
        memory.report("model", 8)
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    with pytest.raises(ValueError, match=r"is not compiled\. Expected: a model with known inputs, after"):
        memory.report(model, 8)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"neither batch_size nor data\. Expected: one of them"):
        memory.report(model)
    with pytest.raises(ValueError, match=r"both batch_size and data\."):
        memory.report(model, 8, data=(np.ones((8, 2)), np.ones((8, 1))))
    with tfdist.PipelineStrategy(["CPU:0"], num_microbatches=2).scope():
        piped = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
        piped.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"under PipelineStrategy, whose steps run in other processes or in parts"):
        memory.report(piped, 8)


def test_measuring_needs_devices_that_are_counted(monkeypatch):
    def not_counted(device):
        raise ValueError(f"Allocator stats not available for device '{device}'")

    monkeypatch.setattr(tf.config.experimental, "get_memory_info", not_counted)
    with pytest.raises(
        RuntimeError, match=r"does not count and .* Expected: a GPU; or, on a CPU, a single logical device"
    ):
        memory.report(stack(), 8, measured=True)
    # As it is where statistics are there, but stay as they are.
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", lambda device: {"current": 0, "peak": 0})
    both = r"does not count and which share one allocator.*a single logical device, and TF_CPU_ALLOCATOR_USE_BFC=1"
    with pytest.raises(RuntimeError, match=both):
        memory.report(stack(), 8, measured=True)
