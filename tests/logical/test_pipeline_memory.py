"""`PipelineStrategy(memory=...)`: the same training, whatever is recomputed or spends its time on the host."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.logical.pipelines import after_one_step, assert_trains_equally, labelled, mlp, pipeline
from tests.logical.test_pipeline_models import recurrent, tokens
from tfdist.layer_graph.graph import functional_of
from tfdist.memory import MemoryPolicy
from tfdist.strategies.pipeline.engine import ActivationOffload, _host_of
from tfdist.testing import differences

pytestmark = pytest.mark.usefixtures("four_devices")

MODES = ("recompute", "recompute+swap", "swap")
SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "interleaved")
DATA = labelled(41)
SMALL = mlp()


def policy(mode: str | dict[str, str], **arguments: Any) -> MemoryPolicy:
    """The device CPU:0 is the host; nothing is too small."""
    return MemoryPolicy(mode, **{"min_bytes": 0, **arguments})


def stages(count: int = 2, num_microbatches: int = 4, **options: Any) -> tfdist.PipelineStrategy:
    """On other devices than the host."""
    devices = [f"CPU:{i}" for i in range(1, 1 + count)]
    return tfdist.PipelineStrategy(devices, num_microbatches=num_microbatches, **options)


def with_state() -> keras.Model:
    """With what a second run could change: masks of Dropout, statistics; with a connection that skips a stage."""
    inputs = keras.Input((8,))
    first = layers.Dense(16, "relu", name="first")(inputs)
    x = layers.BatchNormalization(momentum=0.5)(layers.Dense(16, name="second")(layers.Dropout(0.3)(first)))
    x = layers.Add()([layers.Dense(16, "gelu", name="third")(x), first])
    model = keras.Model(inputs, layers.Dense(3, "softmax")(layers.Dropout(0.2)(x)))
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def own_step() -> keras.Model:
    class Own(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            return super().train_step(data)

    plain = with_state()
    model = Own(plain.inputs, plain.outputs)
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def mixed_precision() -> keras.Model:
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        return with_state()
    finally:
        keras.config.set_dtype_policy("float32")


@functools.cache
def after_two_steps(mode: str, build: Callable[[], keras.Model], make: Callable, count: int, **options: Any) -> dict:
    """What they leave of a model; no test changes it."""
    data = (tokens(), np.random.RandomState(2).randint(0, 3, (37, 6))) if build is recurrent else DATA
    return after_one_step(make(count, memory=policy(mode), **options), build, data, 2)[1]


def observed(
    build: Callable[[], keras.Model], make: Callable = stages, count: int = 2, **options: Any
) -> dict[str, dict[str, np.ndarray]]:
    """What two steps leave, by mode."""
    return {mode: after_two_steps(mode, build, make, count, **options) for mode in ("none", *MODES)}


def assert_equal(found: dict[str, dict[str, np.ndarray]], tolerance: float = 1e-6) -> None:
    """To the host and back nothing changes; what is run again may be rounded otherwise."""
    gaps = {pair: max(differences(*(found[mode] for mode in pair)).values()) for pair in PAIRS}
    assert gaps.pop(("recompute", "none")) <= tolerance
    assert gaps == {("recompute+swap", "recompute"): 0.0, ("swap", "none"): 0.0}


PAIRS = (("recompute", "none"), ("recompute+swap", "recompute"), ("swap", "none"))


@pytest.mark.parametrize(
    "schedule", ["gpipe", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in SCHEDULES if name != "gpipe")]
)
def test_equal_bit_for_bit(schedule):
    assert_equal(observed(with_state, schedule=schedule))


@pytest.mark.exhaustive
def test_models_of_other_kinds():
    assert_equal(observed(own_step, schedule="gpipe"))
    assert_equal(observed(recurrent, schedule="gpipe"))
    # Eight bits in each number.
    assert_equal(observed(mixed_precision, schedule="gpipe"), tolerance=0.01)


@pytest.mark.exhaustive
def test_other_options():
    assert_equal(observed(SMALL, pipeline, 4, replicas=2, schedule="gpipe"))
    assert_equal(observed(SMALL, stages, 3, num_microbatches=6, schedule="gpipe", weight_gradients="batched"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", MODES)
def test_equal_to_one_process(mode):
    assert_trains_equally(mlp(), labelled(), stages(2, 4, schedule="gpipe", memory=policy(mode)))


def test_negative_control_with_the_inputs_of_another_micro_batch(monkeypatch):
    """What is fetched is what is used."""
    right = observed(with_state, schedule="gpipe")
    original = ActivationOffload.sent
    first: dict[tuple, list[tf.Tensor]] = {}

    def sent(self: ActivationOffload, stage: int, instruction: Any, tensors: Any) -> list[tf.Tensor]:
        # There are micro-batches of ten rows, and one of eleven.
        key = id(self), instruction.chunk, *(tuple(tensor.shape) for tensor in tensors)
        return first.setdefault(key, original(self, stage, instruction, tensors))

    monkeypatch.setattr(ActivationOffload, "sent", sent)
    for mode in ("recompute+swap", "swap"):
        strategy = stages(memory=policy(mode), schedule="gpipe")
        assert max(differences(after_one_step(strategy, with_state, DATA, 2)[1], right[mode]).values()) > 1e-4


@functools.cache
def kept(count: int, schedule: str, mode: str, **arguments: Any) -> tuple[dict[int, int], dict[int, int]]:
    """How many tensors go from forward passes to backward passes, by stage: on the device, and through the host.

    Args:
        count: of stages.
        schedule: of eight micro-batches.
        mode: where they are kept.
        **arguments: of `policy`.
    """
    strategy = stages(count, 8, schedule=schedule, memory=policy(mode, **arguments))
    with strategy.scope():
        model = mlp()()
    x, y = labelled(64)
    model.fit(x, y, batch_size=64, verbose=0)

    @tf.function(autograph=False)
    def step(x: tf.Tensor, y: tf.Tensor) -> Any:
        return strategy.run(model.train_step, args=((x, y),))

    graph = step.get_concrete_function(tf.TensorSpec([64, 8]), tf.TensorSpec([64], tf.int64)).graph
    on_device, on_host = dict.fromkeys(range(4), 0), dict.fromkeys(range(4), 0)
    for operation in graph.get_operations():
        if operation.name.startswith("backward_") and "PartitionedCall" in operation.type:
            stage = int(operation.name.split("_")[1].split("/")[0])
            # The first one is the turn.
            for tensor in operation.inputs[1:]:
                devices = []
                while tensor.op.type == "Identity":
                    devices.append(tf.DeviceSpec.from_string(tensor.device).device_index)
                    tensor = tensor.op.inputs[0]
                # There is another one, of the loss.
                if re.fullmatch(r"forward_\d+(_\d+)?/(Stateful)?PartitionedCall", tensor.op.name):
                    (on_host if 0 in devices else on_device)[stage] += 1
    return on_device, on_host


@pytest.mark.exhaustive
def test_where_it_is_kept():
    everything, _ = kept(2, "gpipe", "none")
    inputs, nothing = kept(2, "gpipe", "recompute")
    # One input a stage, of eight micro-batches; layers keep more.
    assert [inputs[0], inputs[1]] == [8, 8]
    assert min(everything[0], everything[1]) >= 16
    assert sum(nothing.values()) == 0
    assert kept(2, "gpipe", "recompute+swap") == (nothing, inputs)
    on_device, on_host = kept(2, "gpipe", "swap")
    assert {i: on_device[i] + on_host[i] for i in on_host} == everything
    # Nothing but the shapes of what is not there.
    assert max(on_device.values()) <= 8
    assert on_host[0] >= 16


def test_small_tensors_and_what_is_needed_soon_stay():
    inputs, _ = kept(2, "gpipe", "recompute")
    assert kept(2, "gpipe", "recompute+swap", min_bytes=1 << 16)[0] == inputs
    # In 1F1B the last stage goes back at once, the one before it after two more instructions.
    _, on_host = kept(3, "1f1b", "recompute+swap")
    assert min(on_host[0], on_host[1]) > 4
    assert on_host[2] == 0


def test_modes_by_stages():
    modes = MemoryPolicy({"stage_1": "swap", "stage_2": "recompute", "*": "recompute+swap"}, min_bytes=0)
    plan = pipeline(4, memory=modes)._planner.plan(model := mlp()(), functional_of(model))
    assert plan.modes == ["recompute+swap", "swap", "recompute", "recompute+swap"]
    assert (plan.recompute, plan.swap) == ([True, False, True, True], [True, True, False, True])
    one = MemoryPolicy({"stage_0": "recompute+swap"}, min_bytes=0)
    assert stages(2, memory=one)._planner.plan(model, functional_of(model)).modes == ["recompute+swap", "none"]
    _, trained = after_one_step(stages(2, schedule="gpipe", memory=one), with_state, DATA, 2)
    assert max(differences(trained, after_two_steps("none", with_state, stages, 2, schedule="gpipe")).values()) <= 1e-6


@pytest.mark.exhaustive
def test_what_is_needed_soon_is_more_with_more_prefetching():
    _, on_host = kept(3, "1f1b", "recompute+swap", prefetch=2)
    assert on_host[0] > 4
    assert on_host[1] == on_host[2] == 0


def test_the_host_is_that_of_the_process():
    assert _host_of("/job:worker/replica:0/task:1/device:GPU:3", "CPU:0") == (
        "/job:worker/replica:0/task:1/device:CPU:0"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memory": "offload"}, "Received: mode='offload'. Expected one of 'none', 'recompute', 'recompute+swap', "),
        ({"memory": MemoryPolicy({"a": "swap"})}, "whose blocks are its stages: stage_0, stage_1. Expected: one mode"),
        ({"memory": MemoryPolicy("swap", blocks=["a"])}, "without `blocks`; or None to recompute where the memory is"),
        (
            {"memory": MemoryPolicy("auto", budget="8GB")},
            "for a PipelineStrategy, whose blocks are its stages: stage_0, stage_1.",
        ),
    ],
)
def test_policies_that_make_no_sense(arguments, message):
    with pytest.raises(ValueError) as error:
        pipeline(**arguments)
    assert message in str(error.value)
