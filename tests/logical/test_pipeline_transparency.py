"""A pipeline computes what one process computes: whatever the stages, micro-batches, schedule and options."""

from __future__ import annotations

import functools
import itertools

import keras
import numpy as np
import pytest
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

pytestmark = pytest.mark.usefixtures("four_devices")

SCHEDULES = ("auto", "1f1b", "eager-1f1b", "gpipe", "interleaved")


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
    return one_process(skips, SKIPS_DATA)


def stateful() -> keras.Model:
    """Dropout and BatchNormalization: what a micro-batch makes depends on those before it."""
    return mlp(layers.BatchNormalization, lambda: layers.Dropout(0.3), lambda: layers.GaussianNoise(0.1))()


@functools.cache
def expected_of_stateful(microbatches: int) -> dict[str, np.ndarray]:
    return one_process(micro_batched(stateful, microbatches), labelled())


@pytest.mark.parametrize(
    ("schedule", "recompute", "weight_gradients"),
    [
        *itertools.product(["auto"], [False, True], ["accumulate", "batched"]),
        ("gpipe", False, "accumulate"),
        ("gpipe", True, "batched"),
        ("eager-1f1b", False, "batched"),
        ("eager-1f1b", True, "accumulate"),
        ("interleaved", False, "batched"),
        ("interleaved", True, "accumulate"),
    ],
)
def test_options(schedule, recompute, weight_gradients):
    strategy = pipeline(2, 4, schedule=schedule, recompute=recompute, weight_gradients=weight_gradients)
    assert_equal(expected_of_skips(), observe(strategy, skips, SKIPS_DATA))


@pytest.mark.parametrize(
    ("stages", "microbatches", "schedule"),
    [
        (1, 4, "auto"),
        (2, 1, "auto"),
        (2, 3, "1f1b"),
        (2, 8, "auto"),
        (3, 4, "auto"),
        (3, 3, "gpipe"),
        (4, 4, "1f1b"),
        (4, 8, "eager-1f1b"),
    ],
)
def test_stages_and_micro_batches(stages, microbatches, schedule):
    """With 8 micro-batches the last batch of 5 rows leaves three of them empty."""
    strategy = pipeline(stages, microbatches, schedule=schedule)
    assert_equal(expected_of_skips(), observe(strategy, skips, SKIPS_DATA))


def test_recompute_of_some_stages():
    strategy = pipeline(3, 4, recompute=(True, False, True))
    assert_equal(expected_of_skips(), observe(strategy, skips, SKIPS_DATA))


@pytest.mark.parametrize(
    ("schedule", "recompute"), [("auto", False), ("auto", True), ("gpipe", True), ("interleaved", False)]
)
def test_state_goes_from_micro_batch_to_micro_batch(schedule, recompute):
    strategy = pipeline(2, 4, schedule=schedule, recompute=recompute)
    assert_equal(expected_of_stateful(4), observe(strategy, stateful, labelled()))


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (3, 4), (2, 8)])
def test_state_with_other_numbers(stages, microbatches):
    assert_equal(expected_of_stateful(microbatches), observe(pipeline(stages, microbatches), stateful, labelled()))


def test_single_micro_batch_equals_whole_batches():
    assert_equal(one_process(stateful, labelled()), observe(pipeline(2, 1), stateful, labelled()))


def test_gradients():
    """Plain SGD with a learning rate of 1: a weight changes by its gradient."""

    def build() -> keras.Model:
        model = skips()
        model.compile(keras.optimizers.SGD(1.0), ["mse", "mae"], loss_weights=[1.0, 0.5])
        return model

    data = numbers(16, 8), [numbers(16, 3, seed=2), numbers(16, 2, seed=3)]
    strategy = pipeline(3, 4, weight_gradients="batched")
    assert_trains_equally(build, data, strategy, epochs=1, tolerance=3e-6)


@pytest.mark.parametrize("rows", [3, 17])
def test_uneven_batches(rows):
    """Fewer rows than micro-batches, and a last batch of one row."""
    assert_trains_equally(mlp(), labelled(rows))


def test_choice_of_schedules():
    chosen = {}
    for schedule in SCHEDULES:
        strategy = pipeline(2, 4, schedule=schedule)
        with strategy.scope():
            model = mlp()()
        plan = strategy.prepare(model)
        chosen[schedule] = plan.schedule.name, plan.decomposes, len(plan.chunks)
    assert chosen == {
        "auto": ("1f1b", True, 2),
        "1f1b": ("1f1b", True, 2),
        "eager-1f1b": ("eager-1f1b", True, 2),
        "gpipe": ("gpipe", True, 2),
        "interleaved": ("interleaved", True, 4),
    }
