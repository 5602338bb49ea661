"""`HostOffloadStrategy`: where things are, what is computed, and what is refused."""

from __future__ import annotations

import collections
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.logical.memory_models import CLASSES, TIED, Block, blocks, data, dense
from tests.logical.test_memory_transparency import Trained, assert_equal, train
from tests.models import assert_arrays, in_scope, ready
from tests.tiers import daily
from tfdist.layer_graph.graph import flatten
from tfdist.memory import kinds
from tfdist.memory.modes import GraphCall, LayerCall
from tfdist.memory.plan import stream_cuts

HOST, DEVICE = "CPU:0", "CPU:1"


@pytest.fixture(scope="module", autouse=True)
def unfused():
    """Where TensorFlow makes one kernel of several operations, it rounds less; it cannot where a block ends between."""
    before = tf.config.optimizer.get_experimental_options().get("remapping", True)
    tf.config.optimizer.set_experimental_options({"remapping": False})
    yield
    tf.config.optimizer.set_experimental_options({"remapping": before})


@pytest.fixture(scope="module")
def strategy(four_devices):
    return tfdist.HostOffloadStrategy(DEVICE, HOST)


@functools.cache
def plain(name: str) -> Trained:
    return train(name, None, None)


def compiled(strategy, build=dense, **arguments) -> keras.Model:
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = build()
        arguments = {key: make() if key == "optimizer" and callable(make) else make for key, make in arguments.items()}
        model.compile(**{"optimizer": "adam", "loss": "sparse_categorical_crossentropy"} | arguments)
    return model


def chain(depth: int = 3) -> keras.Model:
    """Equal layers, one more than `depth`."""
    head = layers.Dense(12, activation="softmax")
    return keras.Sequential([keras.Input((12,)), *(layers.Dense(12, "relu") for _ in range(depth)), head])


# --- The numbers are those of plain training --------------------------------------------------------------------------


@functools.cache
def streamed(name: str, strategy: tfdist.HostOffloadStrategy) -> Trained:
    return train(name, strategy, None)


@pytest.mark.parametrize("tolerance", daily([1e-6, 0.0], "1e-06"))
@pytest.mark.parametrize("name", daily(["dense", "transformer"], "dense"))
def test_equal_to_plain_training(strategy, name, tolerance):
    assert_equal(streamed(name, strategy), plain(name), tolerance)


@pytest.mark.parametrize("name", daily(["tied", "nested"], "tied"))
def test_weights_of_other_layers_and_blocks_in_blocks(four_devices, name):
    strategy = tfdist.HostOffloadStrategy(DEVICE, HOST, blocks=TIED if name == "tied" else "auto")
    assert_equal(train(name, strategy, None), plain(name), 2e-6)


OPTIMIZERS = {
    "global_clipnorm": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
    "loss scale, clipnorm and all that": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.AdamW(
            keras.optimizers.schedules.ExponentialDecay(0.01, 1, 0.5),
            clipnorm=0.1,
            weight_decay=0.1,
            use_ema=True,
            ema_overwrite_frequency=2,
        )
    ),
}


def constrained() -> keras.Model:
    x = inputs = keras.Input((12,))
    for _ in range(4):
        x = layers.Dense(12, "tanh", kernel_regularizer="l2", activity_regularizer="l2", kernel_constraint="max_norm")(
            x
        )
        x = layers.Dropout(0.2)(x)
    return keras.Model(inputs, layers.Dense(CLASSES, activation="softmax")(x))


@pytest.mark.filterwarnings("ignore:Received")
@pytest.mark.nightly
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_losses_and_constraints(strategy, optimizer):
    x, y = data("dense", 30)
    found = []
    for used in (tf.distribute.get_strategy(), strategy):
        model = compiled(used, constrained, optimizer=OPTIMIZERS[optimizer], steps_per_execution=2)
        # Batches of 8 rows, and one of 6.
        history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, validation_data=(x, y)).history
        slots = [v.numpy() for v in model.optimizer.variables]
        found.append([*history.values(), *model.get_weights(), *slots])
    assert_arrays(*found)


@pytest.mark.nightly
def test_files(strategy, tmp_path):
    x, y = data("dense", 32)
    found = []
    for used in (tf.distribute.get_strategy(), strategy):
        model = compiled(used, chain)
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        model.save(tmp_path / "model.keras")
        model = in_scope(used, lambda: keras.models.load_model(tmp_path / "model.keras"))
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        found.append([*model.get_weights(), *(v.numpy() for v in model.optimizer.variables)])
    assert "call" in vars(model)
    assert_arrays(*found)
    # A file says nothing of the strategy.
    model.save(tmp_path / "streamed.keras")
    loaded = keras.models.load_model(tmp_path / "streamed.keras")
    assert "call" not in vars(loaded)
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))


def test_it_is_the_old_seeds_and_statistics_that_are_used_again(strategy, monkeypatch):
    original = kinds.gated

    def other_state(groups, gate, compiled):
        first, *rest = original(groups, gate, compiled)
        # Weights, state and inputs of a block: state is what differs here.
        return [first, [value + tf.cast(1, value.dtype) for value in rest[0]], *rest[1:]] if rest else [first]

    monkeypatch.setattr(kinds, "gated", other_state)
    found, expected = train("dense", strategy, None), plain("dense")
    assert max(np.abs(a - b).max() for a, b in zip(found.weights, expected.weights, strict=True)) > 1e-3


# --- Where things are -------------------------------------------------------------------------------------------------


def graph_of(strategy, model, name: str, x, y) -> tf.Graph:
    @tf.function(autograph=False)
    def step(x, y):
        return strategy.run(getattr(model, name), args=((x, y),))

    return step.get_concrete_function(tf.constant(x), tf.constant(y)).graph


def places(graph: tf.Graph, kind: str) -> collections.Counter[str]:
    devices = [tf.DeviceSpec.from_string(op.device) for op in graph.get_operations() if op.type == kind]
    return collections.Counter(f"{device.device_type}:{device.device_index}" for device in devices)


def test_variables_are_on_the_host_and_layers_on_the_device(strategy):
    model = compiled(strategy, chain, metrics=["accuracy"])
    x, y = data("dense", 8)
    model.fit(x, y, verbose=0)
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    assert {tf.DeviceSpec.from_string(v.value.device).device_index for v in variables} == {0}
    graph = graph_of(strategy, model, "train_step", x, y)
    # Four layers: forward, again, and two gradients.
    assert places(graph, "MatMul") == {DEVICE: 4 * 4}
    # Adam's.
    assert set(places(graph, "Sqrt")) == {HOST}
    assert places(graph_of(strategy, model, "test_step", x, y), "MatMul") == {DEVICE: 4}


def waits_for(operation: tf.Operation) -> set[tf.Operation]:
    """Everything that comes before an operation."""
    found, waiting = set(), [operation]
    while waiting:
        current = waiting.pop()
        for before in [*(t.op for t in current.inputs), *current.control_inputs]:
            if before not in found:
                found.add(before)
                waiting.append(before)
    return found


def sent_weights(graph: tf.Graph) -> list[tf.Operation]:
    """The operations on the host from which matrices go to the device, in the order in which they were made."""
    return [
        op
        for op in graph.get_operations()
        if op.type == "Identity" and "CPU:0" in op.device and op.inputs[0].op.type == "ReadVariableOp"
        if op.outputs[0].shape.rank == 2
    ]


def test_weights_wait_for_an_earlier_block(four_devices):
    strategy = tfdist.HostOffloadStrategy(DEVICE, HOST, prefetch=2)
    model = compiled(strategy, lambda: chain(5))
    x, y = data("dense", 8)
    model.fit(x, y, verbose=0)
    graph = graph_of(strategy, model, "train_step", x, y)
    sent = sent_weights(graph)
    assert len(sent) == 2 * 6
    # How many layers have computed before the weights of each may leave: forward, then forward and backward.
    matmuls = [sum(op.type == "MatMul" for op in waits_for(s)) for s in sent]
    assert matmuls[:6] == [0, 0, 0, 1, 2, 3]
    # Each block on the way back computes again, and two gradients; the last one no product again, since the loss has
    # the gradient of its logits.
    assert matmuls[6:] == [6, 6, 6, 8, 11, 14]
    sent = sent_weights(graph_of(strategy, model, "test_step", x, y))
    assert [sum(op.type == "MatMul" for op in waits_for(s)) for s in sent] == matmuls[:6]


# --- Which blocks there are -------------------------------------------------------------------------------------------


def test_automatic_blocks_do_not_grow_with_the_depth():
    for depth in (4, 16):
        assert stream_cuts(flatten(chain(depth)._functional)) == tuple(range(1, depth + 1))


@pytest.mark.nightly
def test_layers_that_are_in_no_named_block_are_streamed_too(four_devices):
    def of_blocks() -> keras.Model:
        x = layers.Dense(12)(inputs := keras.Input((12,)))
        for _ in range(2):
            x = Block()(x)
        return keras.Model(inputs, layers.Dense(CLASSES, activation="softmax")(x))

    strategy = tfdist.HostOffloadStrategy(DEVICE, HOST, blocks=[Block])
    x, y = data("blocks", 8)
    model = compiled(strategy, blocks)
    model.train_on_batch(x, y)
    streamed = [layer.name for layer in model._flatten_layers() if isinstance(vars(layer).get("call"), LayerCall)]
    assert sorted(streamed) == sorted([*(f"block_{i}" for i in range(3)), model.head.name])
    model = compiled(strategy, of_blocks)
    model.train_on_batch(x, y)
    assert isinstance(vars(model)["call"], GraphCall)
    assert set(vars(model)["call"].plan.modes) == {"stream"}


# --- What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"device 'GPU:0'. Expected: one of .*CPU:0.*device='CPU:1', host='CPU:0'"),
        ({"device": "CPU:1", "host": "CPU:9"}, r"device 'CPU:9'. Expected: one of"),
        ({"device": "the GPU"}, r"device 'the GPU'. Expected: one of"),
        ({"device": "CPU:0", "host": "/device:CPU:0"}, r"which are the same.*Expected: an accelerator, and the host"),
        ({"device": "CPU:1", "prefetch": -1}, r"prefetch=-1. Expected: a whole number"),
        ({"device": "CPU:1", "blocks": "encoder"}, r"Expected: 'auto', or a list of names"),
    ],
)
def test_arguments_that_make_no_sense(four_devices, arguments, message):
    with pytest.raises(ValueError, match=message):
        tfdist.HostOffloadStrategy(**arguments)


@pytest.mark.parametrize(
    ("build", "arguments", "message"),
    [
        (chain, {"run_eagerly": True}, r"run_eagerly=True under HostOffloadStrategy.*Expected: run_eagerly=False"),
        (chain, {"jit_compile": True}, r"jit_compile=True\) under HostOffloadStrategy.*Expected: jit_compile=False"),
        (lambda: chain(0), {}, r"is one block: the device would hold all of it.*Expected: a model of several layers"),
    ],
)
@pytest.mark.parametrize("method", ["fit", "predict"])
def test_models_that_cannot_be_streamed(strategy, build, arguments, message, method):
    model = compiled(strategy, build, **arguments)
    x, y = data("dense", 8)
    with pytest.raises(ValueError, match=message):
        model.fit(x, y, verbose=0) if method == "fit" else model.predict(x, verbose=0)


@pytest.mark.nightly
def test_what_is_made_outside_of_the_scope_or_has_a_policy(strategy):
    x, y = data("dense", 8)
    optimizer = keras.optimizers.Adam()
    with pytest.raises(ValueError, match=r"optimizer 'adam.*', created outside of strategy.scope"):
        compiled(strategy, chain, optimizer=lambda: optimizer).fit(x, y, verbose=0)
    model = compiled(strategy, chain)
    for trained in (False, True):
        with pytest.raises(ValueError, match=r"under HostOffloadStrategy, which has one of its own"):
            tfdist.memory.apply(model, "recompute")
        assert ("call" in vars(model)) == trained
        model.fit(x, y, verbose=0)
    assert vars(model)["call"].policy.streams
    outside = chain()
    model = in_scope(
        strategy,
        lambda: ready(
            keras.Sequential([keras.Input((12,)), *outside.layers, layers.Dense(CLASSES)]),
            "sgd",
            "sparse_categorical_crossentropy",
        ),
    )
    with pytest.raises(ValueError, match=r"variable '.*dense.*', created outside of strategy.scope"):
        model.fit(x, y, verbose=0)
