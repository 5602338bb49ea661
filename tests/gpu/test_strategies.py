"""Each strategy, XLA, mixed precision, memory policies and compression on a GPU: what one device computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.compressed_by_hand import POWER_SGD, Low, assert_close, by_hand, distance, sgd, trained
from tests.features.table import mlp, rows
from tests.logical.test_fully_sharded import DATA, deep
from tests.logical.test_memory_transparency import Trained, train
from tfdist.compression import TopK
from tfdist.memory import MemoryPolicy
from tfdist.testing import assert_transparent

# Of weights after some steps in float32: a GPU adds up in any order. Where memory policies keep XLA from compiling,
# what they are compared with is not compiled either: for Dropout, XLA draws other random numbers from the same seed.
_TOLERANCE = 1e-4


def largest_gap(found: Trained, expected: Trained) -> float:
    return max(np.abs(a - b).max() for a, b in zip(found.weights, expected.weights, strict=True))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("options", [{}, {"jit_compile": True}], ids=["graph", "XLA"])
def test_replicas_equal_one_process(gpus: list[str], replicas: int, options: dict[str, Any]) -> None:
    """The last batch does not divide."""
    strategy = tfdist.MirroredStrategy(gpus[:replicas])
    build = mlp(layers.BatchNormalization, **options)
    assert_transparent(strategy, build, rows(81), batch_size=16, tolerance=_TOLERANCE)


@pytest.mark.parametrize("make", [lambda gpus: tfdist.PipelineStrategy(gpus), tfdist.MirroredStrategy])
def test_it_computes_on_the_gpus(gpus: list[str], make: Callable[[list[str]], Any]) -> None:
    """Placement is what a silent fallback to the CPU would change."""
    strategy = make(gpus)
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), layers.Dense(16), layers.Dense(16), layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(*rows(32), batch_size=16, verbose=0)
    values = [getattr(weight.value, "values", [weight.value]) for weight in model.weights]
    found = {":".join(part.device.split(":")[-2:]) for parts in values for part in parts}
    assert found == set(gpus)


def test_a_pipeline_equals_one_process(gpus: list[str]) -> None:
    strategy = tfdist.PipelineStrategy(gpus, num_microbatches=4)
    assert_transparent(strategy, mlp(layers.LayerNormalization), rows(80), batch_size=16, tolerance=_TOLERANCE)


@pytest.mark.parametrize("mode", ["recompute", "swap", "recompute+swap"])
@pytest.mark.parametrize("name", ["dense", "resnet"])
def test_a_memory_policy_changes_nothing(gpus: list[str], host: str, name: str, mode: str) -> None:
    with tf.device(gpus[0]):
        expected = train(name, None, None, jit_compile=False)
        found = train(name, None, MemoryPolicy(mode, host=host, min_bytes=0), jit_compile=False)
    assert mode in found.modes
    assert largest_gap(found, expected) < _TOLERANCE


def test_weights_on_the_host(gpus: list[str], host: str) -> None:
    with tf.device(gpus[0]):
        expected = train("dense", None, None, jit_compile=False)
    found = train("dense", tfdist.HostOffloadStrategy(device=gpus[0], host=host), None)
    assert largest_gap(found, expected) < _TOLERANCE


def test_a_policy_takes_less_memory(gpus: list[str]) -> None:
    """As TensorFlow counts it; it does not count a stand-in's."""
    if not gpus[0].startswith("GPU"):
        pytest.skip("TensorFlow counts no memory of CPU devices")

    def peak(policy: str | None) -> int:
        keras.backend.clear_session()
        with tf.device(gpus[0]):
            inputs = x = keras.Input((1024,))
            for index in range(8):
                y = layers.Dense(4096, activation="relu", name=f"wide_{index}")(x)
                x = layers.Add()([x, layers.Dense(1024)(y)])
            model = keras.Model(inputs, layers.Dense(1)(x))
            model.compile("sgd", "mse")
            if policy:
                tfdist.memory.apply(model, policy)
            data = tf.data.Dataset.from_tensors((tf.zeros([4096, 1024]), tf.zeros([4096, 1]))).repeat(4)
            model.fit(data, verbose=0)
            tf.config.experimental.reset_memory_stats(gpus[0])
            model.fit(data, verbose=0)
        return tf.config.experimental.get_memory_info(gpus[0])["peak"]

    plain = peak(None)
    for policy in ("recompute", "swap"):
        assert peak(policy) < 0.8 * plain, policy


def test_compression(gpus: list[str]) -> None:
    power = trained(tfdist.MirroredStrategy(gpus, compression=POWER_SGD), sgd(0.9))
    assert_close(power, by_hand(Low(POWER_SGD), sgd(0.9)), within=1e-3)
    everything = trained(tfdist.MirroredStrategy(gpus, compression=TopK(1.0)), sgd(0.9))
    plain = trained(tfdist.MirroredStrategy(gpus), sgd(0.9))
    assert distance(everything, plain) < _TOLERANCE < distance(power, plain)


def test_mixed_precision_with_a_loss_scale(gpus: list[str]) -> None:
    def build() -> keras.Model:
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy("mixed_float16")
        try:
            return mlp()()
        finally:
            keras.config.set_dtype_policy(before)

    assert_transparent(tfdist.MirroredStrategy(gpus), build, rows(64), batch_size=16, tolerance=2e-2)


@pytest.mark.parametrize("changes", [{}, {"reshard_after_forward": False}, {"memory": "recompute"}])
def test_parts_of_weights_equal_one_process(gpus: list[str], changes: dict[str, Any]) -> None:
    """Norms of gradients clip: those of all parts together. Each GPU has a part."""
    strategy = tfdist.FullyShardedStrategy(**changes)
    build = partial(deep, lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.05))
    assert_transparent(strategy, build, DATA, batch_size=16, tolerance=_TOLERANCE)
    with strategy.scope():
        parts = deep().trainable_variables[0].value.values
    assert {":".join(part.device.split(":")[-2:]) for part in parts} >= set(gpus)
    assert len({part.shape for part in parts}) == 1
