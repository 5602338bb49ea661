"""Memory policies change nothing of what is computed: weights, history and predictions are equal.

Bit for bit where TensorFlow merges no operations, which depends on the processor: such cases are not daily ones.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.logical.memory_models import MODELS, TIED, data
from tests.models import assert_arrays, ready
from tests.tiers import daily
from tfdist.memory import MemoryPolicy

BATCH, BATCHES, EPOCHS = 8, 4, 2


class Trained(NamedTuple):
    weights: list[np.ndarray]
    history: dict[str, list[float]]
    predictions: np.ndarray
    modes: set[str]


def train(name: str, strategy: Any, policy: Any, **compile_arguments: Any) -> Trained:
    keras.utils.set_random_seed(7)
    x, y = data(name, BATCH * BATCHES)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = ready(
            MODELS[name](),
            **{"optimizer": "adam", "loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}
            | compile_arguments,
        )
    if policy is not None:
        tfdist.memory.apply(model, policy)
    history = model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    calls = [vars(layer)["call"] for layer in model._flatten_layers() if "call" in vars(layer)]
    modes = {mode for call in calls for mode in (call.plan.modes if hasattr(call, "plan") else [call._mode])}
    return Trained(model.get_weights(), history.history, model.predict(x, verbose=0), modes)


def assert_equal(found: Trained, expected: Trained, tolerance: float = 0.0) -> None:
    assert found.history.keys() == expected.history.keys()
    assert_arrays(found.history.values(), expected.history.values(), tolerance)
    assert_arrays(found.weights, expected.weights, tolerance)
    assert_arrays([found.predictions], [expected.predictions], tolerance)


@functools.cache
def plain(name: str, strategy: Any, **compile_arguments: Any) -> Trained:
    return train(name, strategy, None, **compile_arguments)


# Every mode is in the blocks of a graph, and in those of a model that is written as a class.
OF_BLOCKS = {"block_0": "swap", "block_1": "recompute", "block_2": "recompute+swap", "*": "none"}
OF_LAYERS = {"block_0": "swap", "block_1": "recompute", "block_2": "recompute+swap"}


@pytest.mark.nightly
def test_every_mode():
    policy = MemoryPolicy(OF_BLOCKS, host="CPU:3", min_bytes=0)
    found = train("dense", None, policy)
    assert found.modes == set(policy.modes)
    assert_equal(found, plain("dense", None))


@pytest.mark.nightly
def test_every_mode_on_two_replicas(mirrored):
    """The policy is that of a strategy."""
    policy = MemoryPolicy(OF_LAYERS, host="CPU:3", min_bytes=0)
    strategy = tfdist.MirroredStrategy(list(mirrored.extended.worker_devices), memory=policy)
    found = train("blocks", strategy, None)
    assert found.modes == set(OF_LAYERS.values())
    assert_equal(found, plain("blocks", mirrored))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "mode"),
    [("resnet", "recompute"), ("transformer", "recompute+swap"), ("unet", "swap"), ("written", "recompute")],
)
def test_equal_to_plain_training(name, mode):
    policy = MemoryPolicy(mode, host="CPU:3", min_bytes=0)
    assert_equal(train(name, None, policy), plain(name, None))


@pytest.mark.parametrize(
    ("name", "mode"),
    daily(
        [
            pytest.param(name, mode, id=f"{name}, {mode}")
            for name in ("nested", "tied")
            for mode in ("recompute", "swap", "recompute+swap")
        ],
        *("nested, swap", "tied, swap"),
    ),
)
def test_blocks_in_blocks_and_weights_of_other_layers(name, mode):
    policy = MemoryPolicy(mode, TIED if name == "tied" else "auto", host="CPU:3", min_bytes=0)
    assert_equal(train(name, None, policy), plain(name, None), 2e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("arguments", [{"run_eagerly": True}, {"jit_compile": True}], ids=str)
def test_weights_of_other_layers_without_a_graph_and_compiled(arguments):
    assert_equal(train("tied", None, MemoryPolicy("recompute", TIED), **arguments), plain("tied", None), 2e-5)


@pytest.mark.parametrize("changes", daily([{}, {"memory": "recompute"}, {"reshard_after_forward": False}], "{}"))
@pytest.mark.parametrize("name", daily(["nested", "tied"], "tied"))
def test_blocks_whose_weights_are_in_parts(four_devices, name, changes):
    strategy = tfdist.FullyShardedStrategy(blocks=TIED if name == "tied" else "auto", **changes)
    found, expected = (train(name, used, None, optimizer="sgd") for used in (strategy, None))
    assert_equal(found, expected, 1e-6)


# That recomputation works under XLA, and what it saves: tests/memory/test_peak.py.
@pytest.mark.nightly
def test_xla():
    assert_equal(train("dense", None, "recompute", jit_compile=True), plain("dense", None, jit_compile=True))


@pytest.mark.nightly
def test_eager_steps():
    policy = MemoryPolicy({"block_0": "recompute", "*": "recompute+swap"}, host="CPU:3", min_bytes=0)
    assert_equal(train("dense", None, policy, run_eagerly=True), plain("dense", None, run_eagerly=True))


class Recomputed(keras.layers.Layer):
    """Computes its layers again in the backward pass, by itself."""

    def __init__(self, again: Callable) -> None:
        super().__init__()
        self.first, self.second = keras.layers.Dense(8, "tanh"), keras.layers.Dense(5)
        self._again = again(lambda x: self.second(self.first(x)))

    def build(self, shape: tuple) -> None:
        self.first.build(shape)
        self.second.build((*shape[:-1], 8))

    def call(self, x: Any) -> Any:
        return x + self._again(x)


RECOMPUTED = {"keras.remat": keras.remat, "tf.recompute_grad": lambda function: tf.recompute_grad(function)}
STRATEGIES = {
    "plain": lambda devices: tfdist.MirroredStrategy(devices),
    "recompute": lambda devices: tfdist.MirroredStrategy(devices, memory="recompute"),
    "sharded": lambda devices: tfdist.FullyShardedStrategy(),
    "pipeline": lambda devices: tfdist.PipelineStrategy(devices, num_microbatches=2),
}


@contextlib.contextmanager
def in_order() -> Iterator[None]:
    """While the block runs, TensorFlow keeps the order of what is computed again and of updates."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"dependency_optimization": False})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({"dependency_optimization": True, **before})


@pytest.mark.parametrize("model", RECOMPUTED)
@pytest.mark.parametrize("strategy", daily(STRATEGIES, "sharded"))
def test_what_keras_recomputes_gets_its_gradients(mirrored, strategy, model):
    """Blocks and stages have values in the place of weights, which TensorFlow's own recomputation does not find.

    They are compared with what is not computed again: in plain Keras, what keras.remat computes again may read weights
    that are updated already (9 of 200 trainings, on a busy machine).
    """
    x = np.random.default_rng(0).normal(size=(24, 5)).astype("float32")
    found = []
    devices = list(mirrored.extended.worker_devices)[:2]
    for scope, again in (
        (contextlib.nullcontext(), lambda function: function),
        (STRATEGIES[strategy](devices).scope(), RECOMPUTED[model]),
    ):
        keras.utils.set_random_seed(7)
        # Where nothing is in a block, TensorFlow computes again.
        with scope, in_order() if strategy == "plain" else contextlib.nullcontext():
            trained = keras.Sequential([keras.Input((5,)), Recomputed(again), Recomputed(again)])
            trained.compile(keras.optimizers.SGD(0.5), "mse")
            found.append([trained.fit(x, x[:, ::-1], batch_size=8, shuffle=False, verbose=0).history["loss"]])
        found[-1] += trained.get_weights()
    assert_arrays(found[1], found[0], 1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("case", ["plain", "recompute", "in order"])
def test_what_tensorflow_recomputes_is_told(mirrored, recwarn, case):
    """Computed again after an update, in 9 of 200 trainings of plain Keras on a busy machine."""
    with in_order() if case == "in order" else contextlib.nullcontext():
        devices = list(mirrored.extended.worker_devices)[:2]
        with STRATEGIES["plain" if case == "in order" else case](devices).scope():
            model = keras.Sequential([keras.Input((5,)), Recomputed(keras.remat), Recomputed(keras.remat)])
            model.compile("sgd", "mse")
        x = np.ones((16, 5), "float32")
        model.predict(x, verbose=0)
        assert not [one for one in recwarn if "loses the order" in str(one.message)]
        for _ in range(2):
            model.fit(x, x, batch_size=8, verbose=0)
    assert len([one for one in recwarn if "loses the order" in str(one.message)]) == (case == "plain")
