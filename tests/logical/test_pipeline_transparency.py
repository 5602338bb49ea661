"""A pipeline computes what one process computes: whatever the stages, micro-batches, schedule and options."""

from __future__ import annotations

import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.logical.pipelines import (
    assert_equal,
    assert_same,
    assert_trains_equally,
    both,
    labelled,
    micro_batched,
    mlp,
    numbers,
    observe,
    one_process,
    pipeline,
)
from tests.models import in_scope, ready, warned
from tests.tiers import daily
from tfdist.memory import MemoryPolicy

pytestmark = pytest.mark.usefixtures("four_devices")

SCHEDULES = ("auto", "1f1b", "eager-1f1b", "gpipe", "interleaved", "zb-h1")


def skips() -> keras.Model:
    """Connections that skip stages, outputs of several stages, losses of weights and of activations."""
    inputs = keras.Input((8,))
    first = x = layers.Dense(16, "relu", kernel_regularizer="l2", name="first")(inputs)
    early = layers.Dense(2, name="early")(x)
    x = layers.Dense(16, "relu", activity_regularizer="l2")(x)
    x = layers.LayerNormalization()(layers.Add()([x, first]))
    x = layers.Dense(16, "tanh", name="third")(x)
    x = layers.Concatenate()([layers.Dense(16, "tanh")(x), first, inputs])
    model = keras.Model(inputs, [layers.Dense(3, name="late")(x), early])
    metrics = [["mae"], ["mse"]]
    model.compile(keras.optimizers.Adam(0.01), ["mse", "mae"], metrics=metrics, loss_weights=[1.0, 0.5])
    return model


SKIPS_DATA = numbers(37, 8), [numbers(37, 3, seed=2), numbers(37, 2, seed=3)]


@functools.cache
def expected_of_skips() -> dict[str, np.ndarray]:
    return one_process(skips, SKIPS_DATA, whole=False)


def stateful() -> keras.Model:
    """Dropout and BatchNormalization: what a micro-batch makes depends on those before it."""
    return mlp(layers.BatchNormalization, lambda: layers.Dropout(0.3), lambda: layers.GaussianNoise(0.1))()


@functools.cache
def expected_of_stateful(microbatches: int) -> dict[str, np.ndarray]:
    return one_process(micro_batched(stateful, microbatches), labelled(), whole=False)


def recomputed(*stages: int) -> MemoryPolicy:
    return MemoryPolicy({f"stage_{stage}": "recompute" for stage in stages})


# Nearly each pair of values is in one of the rows. With 8 micro-batches the last batch of 5 rows leaves three of them
# empty.
DAILY = [(2, 4, "interleaved", recomputed(0, 2), "accumulate")]
REST = [
    (3, 4, "1f1b", recomputed(1, 2), "accumulate"),
    (4, 3, "eager-1f1b", "none", "batched"),
    (1, 8, "gpipe", "recompute", "batched"),
    pytest.param(3, 4, "zb-h1", "none", "accumulate", id="zb-h1"),
    pytest.param(2, 8, "zb-h1", recomputed(1), "accumulate", id="zb-h1, recomputed"),
]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("stages", "microbatches", "schedule", "memory", "weight_gradients"),
    [*DAILY, *daily(REST)],
)
def test_options(stages, microbatches, schedule, memory, weight_gradients):
    strategy = pipeline(stages, microbatches, schedule=schedule, memory=memory, weight_gradients=weight_gradients)
    assert_equal(expected_of_skips(), observe(strategy, skips, SKIPS_DATA, whole=False))


@pytest.mark.parametrize(
    ("stages", "microbatches", "schedule", "memory"),
    daily([(2, 4, "interleaved", "none"), (3, 4, "auto", "recompute"), (4, 4, "zb-h1", "none")]),
)
def test_state_goes_from_micro_batch_to_micro_batch(stages, microbatches, schedule, memory):
    strategy = pipeline(stages, microbatches, schedule=schedule, memory=memory)
    assert_equal(expected_of_stateful(microbatches), observe(strategy, stateful, labelled(), whole=False))


@pytest.fixture
def float64():
    """Losses, too."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


def of_several_kinds() -> keras.Model:
    """Weights whose gradients are products, sums, slices, or results of loops, and one that two stages share."""
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(20, 8)(inputs)
    shared = layers.Dense(8, "tanh", name="shared")
    x = layers.LayerNormalization()(shared(x))
    x = layers.MultiHeadAttention(2, 4)(x, x)
    x = layers.GRU(8, return_sequences=True)(x)
    x = layers.Conv1D(8, 3, padding="same", activation="gelu", kernel_regularizer="l2")(x)
    x = layers.Flatten()(shared(x))
    return ready(keras.Model(inputs, layers.Dense(3)(x)), keras.optimizers.SGD(0.05), "mse", metrics=["mae"])


TOKENS = np.random.RandomState(1).randint(0, 20, (37, 6)), numbers(37, 3, seed=2)


@pytest.mark.parametrize(
    ("stages", "options"),
    daily(
        [
            (3, {}),
            (2, {"memory": "recompute"}),
            (4, {"memory": MemoryPolicy("swap", min_bytes=0)}),
            (1, {"replicas": 2}),
        ],
    ),
)
def test_gradients_of_weights_that_are_computed_later(stages, options, float64):
    replicas = options.get("replicas", 1)
    devices = [f"CPU:{i}" for i in range(stages * replicas)]
    strategy = tfdist.PipelineStrategy(devices, num_microbatches=4, schedule="zb-h1", **options)
    expected = one_process(of_several_kinds, TOKENS, whole=False)
    assert_equal(expected, observe(strategy, of_several_kinds, TOKENS, whole=False), 1e-12)
    assert "zb-h1, " in strategy.summary()


class Centred(layers.Layer):
    """Subtracts an average of all rows so far, and counts its calls."""

    def build(self, shape: tuple) -> None:
        state = {"initializer": "zeros", "trainable": False}
        self.average = self.add_weight(shape=(shape[-1],), name="average", **state)
        self.calls = self.add_weight(shape=(), name="calls", dtype="int32", **state)

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        if training:
            self.average.assign(0.9 * self.average + 0.1 * tf.reduce_mean(x, 0))
            self.calls.assign_add(1)
        return x - self.average


@pytest.mark.parametrize("microbatches", [1, 4])
def test_state_that_a_layer_updates_for_each_micro_batch_is_told(microbatches, recwarn):
    model = in_scope(pipeline(2, microbatches), mlp(Centred, lambda: layers.Dropout(0.1)))
    for _ in range(2):
        model.fit(*labelled(), batch_size=16, verbose=0)
    said = [str(one.message) for one in recwarn if "assigns when it is called" in str(one.message)]
    assert len(said) == (microbatches > 1)
    words = r"Received: weight '.*centred.*/average' and 1 other\(s\), .* for each of 4 micro-batches"
    assert all(re.match(words, text) for text in said), said


def test_uneven_batches():
    """Fewer rows than micro-batches in the last batch."""
    assert_trains_equally(mlp(), labelled(19), whole=False)


def test_choice_of_schedules():
    chosen = {}
    for schedule in SCHEDULES:
        strategy = pipeline(2, 4, schedule=schedule)
        model = in_scope(strategy, mlp())
        plan = strategy._prepare(model)
        chosen[schedule] = plan.schedule.name, plan.decomposes, len(plan.chunks)
    assert chosen == {
        "auto": ("1f1b", True, 2),
        "1f1b": ("1f1b", True, 2),
        "eager-1f1b": ("eager-1f1b", True, 2),
        "gpipe": ("gpipe", True, 2),
        "interleaved": ("interleaved", True, 4),
        "zb-h1": ("zb-h1", True, 2),
    }


@pytest.mark.parametrize(("batch_size", "replicas"), [(2, 1), (1, 2)])
def test_batches_smaller_than_the_number_of_micro_batches(batch_size, replicas):
    """There are fewer micro-batches then; with fewer rows than pipelines, one of these computes on a stand-in."""
    devices = [f"CPU:{i}" for i in range(2 * replicas)]
    strategy = tfdist.PipelineStrategy(devices, num_microbatches=8, replicas=replicas)
    assert_trains_equally(mlp(), labelled(2 * batch_size + 1), strategy, whole=False, batch_size=batch_size)
    assert f", {batch_size // replicas or 1} micro-batches of 1 rows" in strategy.summary()


def test_single_batches_smaller_than_the_number_of_micro_batches():
    x, y = labelled(6)

    def train(model: keras.Model) -> list:
        return [model.train_on_batch(x[:2], y[:2]), model.train_on_batch(x[:1], y[:1]), model.train_on_batch(x, y)]

    assert_same(*both(train, mlp()))


@pytest.mark.parametrize("schedule", daily(["auto", "interleaved"], "auto"))
def test_fewer_layers_than_stages(schedule, recwarn):
    def build() -> keras.Model:
        return ready(keras.Sequential([keras.Input((8,)), layers.Dense(8, "tanh"), layers.Dense(3)]), "sgd", "mse")

    strategy = pipeline(4, schedule=schedule)
    assert_trains_equally(build, (numbers(37, 8), numbers(37, 3, seed=2)), strategy)
    (said,) = [str(one.message) for one in recwarn if "can be cut into" in str(one.message)]
    stages = 4 if schedule == "auto" else 8
    assert f"which can be cut into 2 piece(s) at most, for {stages} stages. It runs on 2 stage(s); the other" in said
    assert "at most 2)" in strategy.summary()


class MeanFree(layers.Layer):
    """Subtracts the mean of the batch in training."""

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        return x - tf.reduce_mean(x, 0) if training else x


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_layer_that_looks_at_several_rows_is_told(microbatches):
    model = in_scope(pipeline(2, microbatches), mlp(MeanFree))

    def train() -> None:
        for _ in range(2):
            model.fit(*labelled(), batch_size=16, verbose=0)
        model.evaluate(*labelled(), verbose=0)

    said = warned(train, "mixes the rows of a batch")
    assert len(said) == (microbatches > 1)
    assert all("(MeanFree)" in text and "Each micro-batch sees its own rows" in text for text in said), said


def test_an_output_without_rows_is_told():
    def build() -> keras.Model:
        inputs = keras.Input((8,))
        x = layers.Dense(8, "tanh")(inputs)
        return ready(keras.Model(inputs, [layers.Dense(3)(x), keras.ops.mean(x, axis=0)]), "sgd", ["mse", None])

    model = in_scope(pipeline(), build)
    assert warned(lambda: model.predict(numbers(16, 8), verbose=0), "Received: an output of model")
