"""`PipelineStrategy(memory=...)`: the same training, whatever is recomputed or spends its time on the host."""

from __future__ import annotations

import functools
import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.logical.pipelines import after_one_step, labelled, mlp, pipeline
from tests.models import in_scope, ready
from tfdist.layer_graph.graph import functional_of
from tfdist.memory import MemoryPolicy
from tfdist.strategies.pipeline.engine import ActivationOffload, _host_of
from tfdist.strategies.pipeline.plan import PipelinePlan
from tfdist.testing import differences

pytestmark = pytest.mark.usefixtures("four_devices")

DATA = labelled(41)


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
    return ready(
        keras.Model(inputs, layers.Dense(3, "softmax")(layers.Dropout(0.2)(x))),
        keras.optimizers.SGD(0.05, momentum=0.9),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )


@functools.cache
def after_two_steps(mode: str, schedule: str) -> dict[str, np.ndarray]:
    """What they leave; no test changes it."""
    return after_one_step(stages(memory=policy(mode), schedule=schedule), with_state, DATA, 2)[1]


@pytest.mark.nightly
def test_equal_bit_for_bit():
    """To the host and back nothing changes; what is run again may be rounded otherwise."""

    def gap(*modes: str) -> float:
        return max(differences(*(after_two_steps(mode, "interleaved") for mode in modes)).values())

    assert gap("recompute", "none") <= 1e-6
    assert gap("recompute+swap", "recompute") == gap("swap", "none") == 0.0


@pytest.mark.nightly
def test_negative_control_with_the_inputs_of_another_micro_batch(monkeypatch):
    """What is fetched is what is used."""
    right = after_two_steps("swap", "interleaved")
    original = ActivationOffload.sent
    first: dict[tuple, list[tf.Tensor]] = {}

    def sent(self: ActivationOffload, instruction: Any, tensors: Any) -> list[tf.Tensor]:
        # There are micro-batches of ten rows, and one of eleven.
        key = id(self), instruction.chunk, *(tuple(tensor.shape) for tensor in tensors)
        return first.setdefault(key, original(self, instruction, tensors))

    monkeypatch.setattr(ActivationOffload, "sent", sent)
    strategy = stages(memory=policy("swap"), schedule="interleaved")
    assert max(differences(after_one_step(strategy, with_state, DATA, 2)[1], right).values()) > 1e-4


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
    model = in_scope(strategy, mlp())
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


@pytest.mark.nightly
def test_small_tensors_and_what_is_needed_soon_stay():
    inputs, _ = kept(2, "gpipe", "recompute")
    assert kept(2, "gpipe", "recompute+swap", min_bytes=1 << 16)[0] == inputs
    # In 1F1B the last stage goes back at once, the one before it after two more instructions.
    _, on_host = kept(3, "1f1b", "recompute+swap")
    assert min(on_host[0], on_host[1]) > 4
    assert on_host[2] == 0


def test_modes_by_stages():
    modes = MemoryPolicy({"stage_1": "swap", "stage_2": "recompute", "*": "recompute+swap"}, min_bytes=0)
    plan = PipelinePlan(pipeline(4, memory=modes)._options, model := mlp()(), functional_of(model))
    assert plan.modes == ["recompute+swap", "swap", "recompute", "recompute+swap"]
    assert (plan.recompute, plan.swap) == ([True, False, True, True], [True, True, False, True])
    one = MemoryPolicy({"stage_0": "recompute+swap"}, min_bytes=0)
    assert PipelinePlan(stages(2, memory=one)._options, model, functional_of(model)).modes == ["recompute+swap", "none"]
    _, trained = after_one_step(stages(2, schedule="gpipe", memory=one), with_state, DATA, 2)
    assert max(differences(trained, after_two_steps("none", "gpipe")).values()) <= 1e-6


def test_stages_recompute_by_the_micro_batches_that_the_schedule_has_in_flight(monkeypatch):
    """1F1B has two of eight at a time, GPipe all of them."""
    model = mlp()()
    plan = PipelinePlan(pipeline(2, 8)._options, model, functional_of(model))
    rows = 64
    of_batch = max(sum(cost.output_bytes for cost in plan.costs_of_chunk(i)) for i in (0, 1)) * rows / 16
    monkeypatch.setattr("tfdist.strategies.pipeline.plan._memory_limit", lambda *_: of_batch)
    for obstacle, name in ((None, "1f1b"), ("a loss", "gpipe")):
        plan.choose_schedule(obstacle)
        plan.choose_recompute(rows)
        assert (plan.schedule.name, "recompute" in plan.modes) == (name, name == "gpipe")


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
