"""Where a pipeline's variables, slots and operations are: on the devices of their stages, and nowhere else."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.logical.pipelines import numbers, pipeline
from tests.models import ready
from tests.tiers import daily
from tfdist.strategies.pipeline.plan import PipelinePlan

pytestmark = pytest.mark.usefixtures("four_devices")

HEAVY = ("MatMul", "Conv2D", "Conv2DBackpropFilter", "Conv2DBackpropInput", "BatchMatMulV2", "Einsum")


def network() -> keras.Model:
    """Each stage has a convolution or a dense layer, a state, and a part in the loss."""
    inputs = keras.Input((6, 6, 2))
    x = layers.BatchNormalization()(layers.Conv2D(4, 3, kernel_regularizer="l2")(inputs))
    x = layers.Dropout(0.2)(layers.Conv2D(4, 3, activation="relu")(x))
    x = layers.Dense(12, "relu", activity_regularizer="l2")(layers.Flatten()(x))
    x = layers.LayerNormalization()(layers.Dense(16, "tanh")(x))
    return ready(keras.Model(inputs, layers.Dense(3)(x)), keras.optimizers.Adam(0.01), "mse", metrics=["mae"])


DATA = numbers(16, 6, 6, 2), numbers(16, 3, seed=2)


@functools.cache
def traced(stages: int, **options: Any) -> tuple[keras.Model, PipelinePlan, tf.types.experimental.ConcreteFunction]:
    """A model after a step, its plan, and the training step as Keras traces it; no test changes them."""
    strategy = pipeline(stages, 4, **options)
    with strategy.scope():
        keras.utils.set_random_seed(7)
        model = network()
    model.fit(*DATA, batch_size=16, verbose=0)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> dict:
        return strategy.run(model.train_step, args=((x, y),))

    return model, strategy._prepare(model), step.get_concrete_function(*map(tf.constant, DATA))


def calls_of_stages(nodes: Iterable[tf.compat.v1.NodeDef]) -> list[tuple[int, str, str]]:
    """Calls of the stages' functions: number of the chunk, what the function is for, and the device."""
    calls = []
    for node in nodes:
        if node.op in ("PartitionedCall", "StatefulPartitionedCall"):
            found = re.search(r"stage_chunk_(\d+)_train_(forward|backward|weights)", node.attr["f"].func.name)
            if found:
                calls.append((int(found[1]), found[2], node.device))
    return sorted(calls)


def expected_calls(plan: PipelinePlan) -> list[tuple[int, str, str]]:
    """Every chunk runs its instructions once for each of four micro-batches, on its device."""
    of_chunk = {chunk.index: full(plan.device_of(chunk.index)) for chunk in plan.chunks}
    assert plan.schedule.microbatches == 4
    return sorted((i.chunk, i.kind, of_chunk[i.chunk]) for order in plan.schedule.orders for i in order)


def full(device: str) -> str:
    with tf.device(device):
        return tf.constant(0.0).device


def test_devices_as_tensorflow_lists_them():
    local = tf.config.list_logical_devices("CPU")
    names = [device.name for device in local]
    assert tfdist.PipelineStrategy(local[:2]).devices == [names[:2]]
    assert tfdist.PipelineStrategy([local[:2], local[2:4]]).devices == [names[:2], names[2:4]]
    with pytest.raises(
        ValueError, match=r"Expected: a list with a device for each stage, such as \['GPU:0', 'GPU:1'\]"
    ):
        tfdist.PipelineStrategy(local[0])


def test_variables_follow_their_stages_in_the_scope_too():
    """With their names, by which optimizers may know them."""
    strategy = pipeline()
    with strategy.scope():
        model = network()
        before = [v.value.name for v in model.variables]
        model.fit(*DATA, batch_size=16, verbose=0)
    assert [v.value.name for v in model.variables] == before
    devices = [tf.DeviceSpec.from_string(v.value.device).device_index for v in model.variables]
    assert devices == sorted(devices) and set(devices) == {0, 1}
    slots = [v for v in model.optimizer.variables if v.path.endswith("velocity")]
    trained = [v.value.device for v in model.trainable_variables]
    assert [v.value.device for v in slots] == trained


SCHEDULES = [
    (4, {}),
    *daily([(2, {"schedule": "interleaved", "memory": "recompute"}), (3, {"schedule": "zb-h1"})], "3"),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("stages", "options"), SCHEDULES)
def test_each_call_waits_for_the_one_before_it_in_the_schedule(stages, options):
    """The turn, a call's first input, is the first output of the call before; nothing else keeps a device in order."""
    _, plan, step = traced(stages, **options)
    found: dict[str, list[tf.Operation]] = {}
    for call in step.graph.get_operations():
        if label_of(call):
            before = call.inputs[0].op
            while before.type == "Identity":
                before = before.inputs[0].op
            # TensorFlow lists operations in the order in which they were made.
            line = found.setdefault(call.device, [])
            assert before.type == "Const" if not line else before is line[-1]
            line.append(call)
    labels = [list(map(label_of, line)) for line in found.values()]
    assert labels == [[(i.chunk, i.kind) for i in order] for order in plan.schedule.orders]


def label_of(operation: tf.Operation) -> tuple[int, str] | None:
    """The chunk and the kind of an operation that calls a stage's function."""
    name = operation.get_attr("f").name if operation.type == "PartitionedCall" else ""
    match = re.search(r"stage_chunk_(\d+)_train_(forward|backward|weights)", name)
    return (int(match[1]), match[2]) if match else None


@pytest.mark.nightly
def test_batched_weight_gradients_are_made_where_the_weights_are():
    model, _, step = traced(4, weight_gradients="batched")
    heavy = [o for o in step.graph.get_operations() if o.type in HEAVY]
    assert sorted(o.type for o in heavy) == ["Conv2DBackpropFilter"] * 2 + ["MatMul"] * 3
    kernels = {tuple(v.shape): v.value.device for v in model.trainable_variables if "kernel" in v.path}
    for operation in heavy:
        assert operation.device == kernels[tuple(operation.outputs[0].shape)], operation.name
        # All four micro-batches at once.
        factors = [t for t in operation.inputs if t.shape.rank and t.shape[0] == 16]
        assert len(factors) == 2, operation.name
    assert len({operation.device for operation in heavy}) == 4


@pytest.mark.parametrize(("stages", "options"), SCHEDULES)
def test_executor_runs_the_stages_where_they_belong(stages, options):
    """What TensorFlow reports after a step, with all of its own rewriting: not only what was asked for."""
    from tensorflow.python.eager import context

    _, plan, step = traced(stages, **options)
    # `disable_run_metadata` would go on collecting graphs, in the tests after this one as well.
    context.enable_graph_collection()
    try:
        step(*map(tf.constant, DATA))
        metadata = context.export_run_metadata()
    finally:
        context.disable_graph_collection()
    nodes = [node for graph in metadata.partition_graphs for node in graph.node]
    assert calls_of_stages(nodes) == expected_calls(plan)
    losses = [node.device for node in nodes if "pipeline_loss" in node.attr["f"].func.name]
    assert losses == [full(f"CPU:{stages - 1}")] * 4
