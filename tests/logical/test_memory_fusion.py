"""Layers of which TensorFlow makes one kernel: it is the same one whether a block is run again or not."""

from __future__ import annotations

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.models import ready
from tests.tiers import daily
from tfdist import memory
from tfdist.memory import kinds, plan

WIDTH, BATCH = 64, 64


def dense(activation: str) -> keras.Model:
    inner = [layers.Dense(WIDTH, activation) for _ in range(6)]
    return keras.Sequential([keras.Input((WIDTH,)), *inner, layers.Dense(1)])


def normalised(activation: str) -> keras.Model:
    """With statistics that are trained, and some that are not, which TensorFlow merges with what is before them."""
    x = inputs = keras.Input((8, 8, 4))
    for index in range(4):
        x = layers.Conv2D(4, 3, padding="same", use_bias=False)(x)
        norm = layers.BatchNormalization()
        norm.trainable = index % 2 == 0
        x = layers.Activation(activation)(norm(x))
    return keras.Model(inputs, layers.Dense(1)(layers.Flatten()(x)))


def weights(build, activation: str, policy=None, strategy=None, rows: int = 3 * BATCH) -> list[np.ndarray]:
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = ready(build(activation), "adam", "mse")
    if policy:
        memory.apply(model, policy)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, *model.input_shape[1:])).astype("float32")
    y = rng.normal(size=(rows, 1)).astype("float32")
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return model.get_weights()


def gap(ours: list[np.ndarray], others: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, others, strict=True))


@functools.cache
def plain_weights(build, activation: str) -> list[np.ndarray]:
    return weights(build, activation)


@pytest.mark.parametrize(("build", "activation"), [(dense, "mish"), (normalised, "gelu")])
@pytest.mark.usefixtures("four_devices")
@pytest.mark.nightly
def test_what_is_run_again_is_merged_as_in_plain_training(build, activation):
    policy = memory.MemoryPolicy("recompute+swap" if activation == "mish" else "recompute", host="CPU:3", min_bytes=0)
    assert gap(weights(build, activation, policy), plain_weights(build, activation)) == 0.0


@pytest.mark.parametrize("tolerance", daily([1e-6, 0.0], "1e-06"))
def test_streamed_blocks_are_merged_as_in_plain_training(four_devices, tolerance):
    strategy = tfdist.HostOffloadStrategy("CPU:1", "CPU:0")
    assert gap(weights(dense, "softplus", strategy=strategy), plain_weights(dense, "softplus")) <= tolerance


def unmerged_weights(build, activation: str) -> list[np.ndarray]:
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        return weights(build, activation)
    finally:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


@pytest.mark.nightly
def test_it_is_keeping_apart_that_does_it(monkeypatch):
    monkeypatch.setattr(kinds, "keep_apart", lambda *arguments: None)
    # Blocks that begin with a normalisation, which TensorFlow could merge with what is before it.
    monkeypatch.setattr(plan, "automatic_cuts", lambda graph: (5, 9))
    # Which operations TensorFlow merges depends on the processor.
    pairs = [(normalised, "softplus"), (normalised, "swish")]
    found = any(gap(weights(*pair, "recompute"), plain_weights(*pair)) > 0.0 for pair in pairs)
    if not found and all(gap(unmerged_weights(*pair), plain_weights(*pair)) == 0.0 for pair in pairs):
        pytest.skip("on this processor TensorFlow merges no operations of these models")
    assert found
