"""`compile(jit_compile=...)` under strategies: what replicas and stages compute is compiled, and results are equal."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import tfdist
from tests.models import assert_arrays, in_scope, ready

X = np.random.default_rng(0).normal(size=(40, 8, 4)).astype("float32")
Y = np.arange(40) % 5
LAYERS = keras.layers


def convolutions() -> list:
    return [LAYERS.Conv1D(6, 3, use_bias=False), LAYERS.BatchNormalization(), LAYERS.ReLU(), LAYERS.Flatten()]


def dense() -> list:
    return [LAYERS.LayerNormalization(), LAYERS.Flatten(), LAYERS.Dense(8, activation="gelu")]


def compiled(strategy: Any, layers: Any, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = in_scope(
        strategy,
        lambda: ready(
            keras.Sequential([keras.Input((8, 4)), *layers(), LAYERS.Dense(5)]),
            "adam",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            **options,
        ),
    )
    return model


def train(strategy: Any, layers: Any, **options: Any) -> tuple:
    model = compiled(strategy, layers, metrics=["accuracy"], **options)
    history = model.fit(X, Y, batch_size=16, epochs=2, verbose=0, validation_data=(X, Y)).history
    return history, model.get_weights(), model.predict(X, verbose=0)


def clusters(strategy: Any, **options: Any) -> int:
    """What TensorFlow gives to XLA in a step."""
    model = compiled(strategy, convolutions, **options)
    # `disable_run_metadata` would go on collecting graphs, in the tests after this one as well.
    context.enable_graph_collection()
    try:
        model.fit(X[:16], Y[:16], batch_size=16, verbose=0)
        functions = context.export_run_metadata().function_graphs
    finally:
        context.disable_graph_collection()
    return sum(node.op == "_XlaRun" for f in functions for graph in f.partition_graphs for node in graph.node)


def assert_equal(found: tuple, expected: tuple) -> None:
    for key, values in expected[0].items():
        np.testing.assert_allclose(found[0][key], values, rtol=1e-4, err_msg=key)
    assert_arrays([*found[1], found[2]], [*expected[1], expected[2]], tolerance=1e-4)


@pytest.mark.nightly
def test_replicas(mirrored):
    assert_equal(
        train(mirrored, convolutions, jit_compile=True, steps_per_execution=2),
        train(tf.distribute.get_strategy(), convolutions, jit_compile=False, steps_per_execution=2),
    )


@pytest.mark.nightly
def test_stages(four_devices):
    strategy = tfdist.PipelineStrategy(["CPU:0", "CPU:1"], num_microbatches=4, memory="recompute")
    assert_equal(
        train(strategy, dense, jit_compile=True),
        train(tf.distribute.get_strategy(), dense, jit_compile=False),
    )


def test_replicas_are_compiled(mirrored):
    assert clusters(mirrored, jit_compile=True) > 0
    assert clusters(mirrored, jit_compile=False) == 0


@pytest.mark.parametrize("gpus", [0, 2])
def test_auto_decides_as_without_a_strategy(mirrored, gpus, monkeypatch):
    original = tf.config.list_physical_devices

    def devices(kind: str | None = None) -> list:
        found = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(gpus)]
        return [*([] if kind == "GPU" else original(kind)), *([] if kind == "CPU" else found)]

    strategies = [mirrored, tfdist.PipelineStrategy(["CPU:0", "CPU:1"]), tf.distribute.get_strategy()]
    monkeypatch.setattr(tf.config, "list_physical_devices", devices)
    assert [compiled(strategy, convolutions).jit_compile for strategy in strategies] == [gpus > 0] * 3
