"""`tfdist.memory.report`: what it counts, for whom, and what it leaves alone."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.logical.memory_models import MODELS, data
from tests.models import in_scope, ready
from tests.tiers import daily
from tfdist import memory
from tfdist.memory.estimate import batch_of
from tfdist.memory.modes import applied

ROWS, WIDTH = 512, 64


def stack(depth: int = 4, optimizer: object = "adam") -> keras.Model:
    x = inputs = keras.Input((WIDTH,))
    for index in range(depth):
        x = layers.Dense(WIDTH, activation="tanh", name=f"layer_{index}")(x)
    return ready(keras.Model(inputs, x), optimizer, "mse")


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


@pytest.mark.nightly
def test_activations_are_those_of_the_blocks():
    activation = ROWS * WIDTH * 4
    policy = memory.MemoryPolicy({"*": "none"}, names(8))
    device = memory.report(stack(8), ROWS, policy)["CPU:0"]
    # At the end of the forward pass each layer has left what its tanh has returned.
    assert [device.at_peak[name] for name in names(7)] == [activation] * 7
    recomputed = memory.report(stack(8), ROWS, memory.MemoryPolicy("recompute", names(8)))["CPU:0"]
    # The input of a layer is what the one before it has returned: nothing is saved but the last one.
    assert device.step - activation <= recomputed.step <= device.step + 2 * activation


def test_losses_belong_to_outputs_by_their_names():
    x = keras.Input((4,))
    outputs = [layers.Dense(3, activation="softmax", name="kind")(x), layers.Dense(2, name="box")(x)]
    sparse = "sparse_categorical_crossentropy"
    for losses in ({"kind": sparse, "box": "mse"}, {"kind": sparse}, [sparse, "mse"]):
        _, (kind, box) = batch_of(ready(keras.Model(x, outputs), "sgd", losses), 8)
        assert [(one.shape, one.dtype) for one in (kind, box)] == [((8,), "int32"), ((8, 2), "float32")]


@pytest.mark.nightly
def test_a_policy_is_looked_at_and_left_alone():
    model = ready(MODELS["unet"](), "adam", "sparse_categorical_crossentropy")
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
    model = in_scope(mirrored, stack)
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


@pytest.mark.parametrize("mode", daily(["swap", "recompute+swap"], "swap"))
def test_what_is_on_the_host(mode, four_devices):
    steps, few, many = {}, 2, 6
    for depth in (few, many):
        model = in_scope(tfdist.MirroredStrategy(["CPU:1"]), functools.partial(stack, depth))
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
    model = in_scope(tfdist.HostOffloadStrategy("CPU:1", "CPU:0"), lambda: stack(8))
    report = memory.report(model, ROWS)
    assert report["CPU:1"].weights == report["CPU:1"].slots == 0
    assert report["CPU:0"].weights == 8 * WIDTH * (WIDTH + 1) * 4
    assert report.policy.mode == "stream"
    for policy in ("recompute", memory.MemoryPolicy("auto", budget="1GB")):
        with pytest.raises(ValueError, match=r"a memory policy for model .* under HostOffloadStrategy.* and no policy"):
            memory.report(model, ROWS, policy)


@pytest.mark.parametrize("name", daily(["unet", "blocks"], "unet"))
def test_shapes_of_targets(name):
    model = ready(MODELS[name](), "adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    x, y = data(name, 8)
    assert memory.report(model, data=(x, y))["CPU:0"].step > 0
    if name == "blocks":
        with pytest.raises(ValueError, match=r"no known shapes. Expected: data=\(x, y\)"):
            memory.report(model, 8)
    else:
        assert [spec.shape for spec in batch_of(model, 8)] == [x.shape, y.shape]


def test_the_table():
    report = memory.report(stack(8), ROWS, memory.MemoryPolicy("recompute", names(8)))
    lines = str(report).splitlines()
    assert lines[0] == f"A training step of '{report.model}', 512 rows, mode 'recompute'"
    rows = {line[:24].strip(): line[24:].split() for line in lines[3:]}
    assert rows["weights"] == [f"{report['CPU:0'].weights / 1e6:.2f}"]
    assert rows["all"] == [f"{report['CPU:0'].total / 1e6:.2f}"]
    assert [name for name in rows if name.startswith("layer_")] == names(8)


def test_what_cannot_be_estimated():
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    with pytest.raises(ValueError, match=r"report\(\) for <Sequential.*Expected: a keras.Model, after `model.compile"):
        memory.report(model, 8)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"neither batch_size nor data\. Expected: one of them"):
        memory.report(model)
    with pytest.raises(ValueError, match=r"both batch_size and data\."):
        memory.report(model, 8, data=(np.ones((8, 2)), np.ones((8, 1))))
    piped = in_scope(
        tfdist.PipelineStrategy(["CPU:0"], num_microbatches=2),
        lambda: ready(keras.Sequential([keras.Input((2,)), layers.Dense(1)]), "sgd", "mse"),
    )
    with pytest.raises(ValueError, match=r"under PipelineStrategy, whose steps run in other processes or in parts"):
        memory.report(piped, 8)
