"""The comparison with one process must fail when a pipeline is wrong: each test here breaks one thing."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.logical.pipelines import (
    assert_equal,
    labelled,
    micro_batched,
    mlp,
    observe,
    one_process,
    pipeline,
)
from tfdist.strategies.pipeline.chunk import GradientSums
from tfdist.strategies.pipeline.engine import MicroBatches, PipelineRun

pytestmark = pytest.mark.usefixtures("four_devices")


MODELS = {
    "plain": mlp(),
    "BatchNormalization": mlp(layers.BatchNormalization),
    "Dropout": mlp(lambda: layers.Dropout(0.4)),
}


@functools.cache
def expected(model: str, rows: int, stateful: bool, **arguments: Any) -> dict[str, np.ndarray]:
    """What one process leaves, which several tests compare with."""
    build = micro_batched(MODELS[model], 4) if stateful else MODELS[model]
    return one_process(build, labelled(rows), epochs=1, **arguments)


def assert_noticed(
    model: str, rows: int, *names: str, strategy: Any = None, stateful: bool = False, **arguments: Any
) -> None:
    """Asserts that the comparison fails, and names what differs; without "predict", the model is only fitted."""
    arguments |= {"whole": any(name.startswith("predict") for name in names)}
    right = expected(model, rows, stateful, **arguments)
    received = observe(strategy or pipeline(), MODELS[model], labelled(rows), epochs=1, **arguments)
    with pytest.raises(AssertionError) as error:
        assert_equal(right, received)
    for name in names:
        assert f"'{name}': " in str(error.value), error.value


def test_every_micro_batch_counts_the_same(monkeypatch):
    """Whatever its number of rows: the last batch does not divide."""
    monkeypatch.setattr(MicroBatches, "weight", lambda self, index: tf.constant(1 / self.count, tf.float64))
    assert_noticed("plain", 19, "weight 0", "history 1", batch_size=16)


def dropped(which: int) -> object:
    original = PipelineRun.add_cotangents

    def add_cotangents(self: PipelineRun, index: int, keys: list, cotangents: list) -> None:
        if index != which:
            original(self, index, keys, cotangents)

    return add_cotangents


def test_cotangents_of_a_micro_batch_are_dropped(monkeypatch):
    monkeypatch.setattr(PipelineRun, "add_cotangents", dropped(2))
    assert_noticed("plain", 16, "weight 0")


def test_gradients_that_are_not_added_up(monkeypatch):
    monkeypatch.setattr("tfdist.strategies.pipeline.chunk.added", lambda first, second: second)
    assert_noticed("plain", 16, "weight 0")


@pytest.mark.nightly
def test_factors_of_one_micro_batch_only(monkeypatch):
    original = GradientSums.of_chunks

    def of_chunks(self: GradientSums) -> list:
        self._factors = {key: (product, pairs[:1]) for key, (product, pairs) in self._factors.items()}
        return original(self)

    monkeypatch.setattr(GradientSums, "of_chunks", of_chunks)
    assert_noticed("plain", 16, "weight 0", strategy=pipeline(weight_gradients="batched"))


def test_state_that_is_not_handed_on(monkeypatch):
    """Every micro-batch begins with the state that the step began with: masks are others."""
    monkeypatch.setattr(MicroBatches, "kept", lambda self, index, new, old, *_: old if index < self.count - 1 else new)
    assert_noticed("Dropout", 16, "weight 0", stateful=True)


@pytest.mark.nightly
def test_state_of_stand_in_rows_that_counts(monkeypatch):
    """Three rows in four micro-batches: the fourth has none."""
    monkeypatch.setattr(MicroBatches, "kept", lambda self, index, new, old, *_: new)
    assert_noticed("BatchNormalization", 19, "predict 0", stateful=True)
