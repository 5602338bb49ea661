"""The comparison with one process must fail when a pipeline is wrong: each test here breaks one thing."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.logical.pipelines import (
    assert_equal,
    assert_trains_equally,
    labelled,
    micro_batched,
    mlp,
    numbers,
    observe,
    one_process,
    pipeline,
)
from tests.logical.test_pipeline_transparency import SKIPS_DATA, skips
from tfdist.strategies.pipeline.engine import PipelineRun
from tfdist.strategies.pipeline.replicas import MicroBatches, ReplicatedRun
from tfdist.strategies.pipeline.weight_gradients import GradientSums

pytestmark = pytest.mark.usefixtures("four_devices")


MODELS = {
    "plain": mlp(),
    "skips": skips,
    "BatchNormalization": mlp(layers.BatchNormalization),
    "Dropout": mlp(lambda: layers.Dropout(0.4)),
}


@functools.cache
def expected(model: str, rows: int, stateful: bool, **arguments: Any) -> dict[str, np.ndarray]:
    """What one process leaves, which several tests compare with."""
    build = micro_batched(MODELS[model], 4) if stateful else MODELS[model]
    return one_process(build, SKIPS_DATA if model == "skips" else labelled(rows), epochs=1, **arguments)


def assert_noticed(
    model: str, rows: int, *names: str, strategy: Any = None, stateful: bool = False, **arguments: Any
) -> None:
    """Asserts that the comparison fails, and names what differs; without "predict", the model is only fitted."""
    arguments |= {"whole": any(name.startswith("predict") for name in names)}
    right = expected(model, rows, stateful, **arguments)
    data = SKIPS_DATA if model == "skips" else labelled(rows)
    received = observe(strategy or pipeline(), MODELS[model], data, epochs=1, **arguments)
    with pytest.raises(AssertionError) as error:
        assert_equal(right, received)
    for name in names:
        assert f"'{name}': " in str(error.value), error.value


class TestEqualWeights:
    """Every micro-batch counts the same, whatever its number of rows."""

    @pytest.fixture(autouse=True)
    def equal_weights(self, monkeypatch):
        monkeypatch.setattr(MicroBatches, "weight", lambda self, index: tf.constant(1.0 / self.count))

    @pytest.mark.parametrize(("rows", "batch_size"), [(18, 18), (19, 16)])
    def test_noticed_where_a_batch_does_not_divide(self, rows, batch_size):
        assert_noticed("plain", rows, "weight 0", "history 1", batch_size=batch_size)

    def test_right_where_it_divides(self):
        assert_trains_equally(mlp(), labelled(16), epochs=1, whole=False)


def dropped(which: int) -> object:
    original = PipelineRun.add_cotangents

    def add_cotangents(self: PipelineRun, index: int, keys: list, cotangents: list) -> None:
        if index != which:
            original(self, index, keys, cotangents)

    return add_cotangents


def test_cotangents_of_a_micro_batch_are_dropped(monkeypatch):
    monkeypatch.setattr(PipelineRun, "add_cotangents", dropped(2))
    assert_noticed("plain", 16, "weight 0")


@pytest.mark.exhaustive
def test_cotangents_of_connections_that_skip_stages_are_dropped(monkeypatch):
    """Only the first gradient of a value that several stages use."""
    original = PipelineRun._backward

    def backward(self: PipelineRun, stage: int, index: int, microbatch: int) -> None:
        for values in self._cotangents[microbatch].values():
            del values[1:]
        original(self, stage, index, microbatch)

    monkeypatch.setattr(PipelineRun, "_backward", backward)
    assert_noticed("skips", 37, "weight 0", strategy=pipeline(3, cuts=["first", "third"]))


def test_gradients_that_are_not_added_up(monkeypatch):
    monkeypatch.setattr("tfdist.strategies.pipeline.weight_gradients.added", lambda first, second: second)
    assert_noticed("plain", 16, "weight 0")


def test_factors_of_one_micro_batch_only(monkeypatch):
    original = GradientSums.of_chunks

    def of_chunks(self: GradientSums) -> list:
        self._factors = {key: (product, pairs[:1]) for key, (product, pairs) in self._factors.items()}
        return original(self)

    monkeypatch.setattr(GradientSums, "of_chunks", of_chunks)
    assert_noticed("plain", 16, "weight 0", strategy=pipeline(weight_gradients="batched"))


@pytest.mark.parametrize(("layer", "name"), [("BatchNormalization", "weight 4"), ("Dropout", "weight 0")])
def test_state_that_is_not_handed_on(monkeypatch, layer, name):
    """Every micro-batch begins with the state that the step began with: moving means, or masks, are others."""
    monkeypatch.setattr(MicroBatches, "kept", lambda self, index, new, old: old if index < self.count - 1 else new)
    assert_noticed(layer, 16, name, stateful=True)


def test_state_of_stand_in_rows_that_counts(monkeypatch):
    """Three rows in four micro-batches: the fourth has none."""
    monkeypatch.setattr(MicroBatches, "kept", lambda self, index, new, old: new)
    assert_noticed("BatchNormalization", 19, "predict 0", stateful=True)


@pytest.mark.exhaustive
def test_whole_batches_differ_from_micro_batches():
    """Statistics of a micro-batch are not those of the batch: what a reference of whole batches would say."""
    assert_noticed("BatchNormalization", 16, "weight 0", "predict 0")


def test_mean_over_unmasked_steps_of_each_micro_batch(monkeypatch):
    """What a loss with masks would be if it were taken for a mean over rows."""

    def build() -> keras.Model:
        inputs = keras.Input((4, 2))
        x = layers.Dense(4)(layers.Masking()(inputs))
        model = keras.Model(inputs, layers.Dense(1)(x))
        model.compile("sgd", "mse")
        return model

    x = numbers(16, 4, 2)
    x[:9, 1:] = 0.0
    data = x, numbers(16, 4, 1)
    right = one_process(build, data, epochs=1, whole=False)
    assert_equal(right, observe(pipeline(), build, data, epochs=1, whole=False))
    monkeypatch.setattr("tfdist.strategies.pipeline.strategy.why_not_decomposable", lambda *_: None)
    monkeypatch.setattr(ReplicatedRun, "outputs_of", _without_masks(ReplicatedRun.outputs_of))
    with pytest.raises(AssertionError, match="'weight 0': "):
        assert_equal(right, observe(pipeline(), build, data, epochs=1, whole=False))


def _without_masks(outputs_of: object) -> object:
    return lambda self, index: [value._replace(mask=None) for value in outputs_of(self, index)]
