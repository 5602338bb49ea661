"""A pipeline computes what one process computes: whatever the stages, micro-batches, schedule and options."""

from __future__ import annotations

import functools

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
from tfdist.memory import MemoryPolicy

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
def expected_of_skips(whole: bool = False) -> dict[str, np.ndarray]:
    return one_process(skips, SKIPS_DATA, whole=whole)


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
    (3, 8, "gpipe", "recompute", "batched"),
    (1, 3, "auto", "none", "accumulate"),
    (1, 8, "gpipe", "recompute", "batched"),
    (2, 1, "auto", "recompute", "accumulate"),
    (2, 3, "gpipe", "recompute", "batched"),
    (2, 8, "eager-1f1b", "none", "accumulate"),
    (2, 8, "interleaved", "none", "batched"),
    (3, 1, "gpipe", "none", "accumulate"),
    (3, 3, "interleaved", "recompute", "accumulate"),
    (3, 4, "eager-1f1b", recomputed(0, 2), "batched"),
    (4, 1, "eager-1f1b", "recompute", "accumulate"),
    (4, 3, "gpipe", recomputed(0, 2), "accumulate"),
    (4, 4, "gpipe", "recompute", "accumulate"),
    (4, 8, "1f1b", "none", "batched"),
]


@pytest.mark.parametrize(
    ("stages", "microbatches", "schedule", "memory", "weight_gradients"),
    [*DAILY, *(pytest.param(*row, marks=pytest.mark.exhaustive) for row in REST)],
)
def test_options(stages, microbatches, schedule, memory, weight_gradients):
    strategy = pipeline(stages, microbatches, schedule=schedule, memory=memory, weight_gradients=weight_gradients)
    # Where a device has several pieces, `evaluate` and `predict` go round.
    whole = schedule == "interleaved"
    assert_equal(expected_of_skips(whole), observe(strategy, skips, SKIPS_DATA, whole))


@pytest.mark.parametrize(
    ("stages", "microbatches", "schedule", "memory"),
    [
        (2, 4, "interleaved", "none"),
        *(
            pytest.param(*row, marks=pytest.mark.exhaustive)
            for row in [
                (3, 4, "auto", "recompute"),
                (2, 4, "auto", "none"),
                (2, 4, "gpipe", "recompute"),
                (2, 8, "auto", "none"),
            ]
        ),
    ],
)
def test_state_goes_from_micro_batch_to_micro_batch(stages, microbatches, schedule, memory):
    strategy = pipeline(stages, microbatches, schedule=schedule, memory=memory)
    assert_equal(expected_of_stateful(microbatches), observe(strategy, stateful, labelled(), whole=False))


def test_single_micro_batch_equals_whole_batches():
    assert_trains_equally(stateful, labelled(), pipeline(2, 1), whole=False)


def test_gradients():
    """Plain SGD with a learning rate of 1: a weight changes by its gradient."""

    def build() -> keras.Model:
        model = skips()
        model.compile(keras.optimizers.SGD(1.0), ["mse", "mae"], loss_weights=[1.0, 0.5])
        return model

    data = numbers(16, 8), [numbers(16, 3, seed=2), numbers(16, 2, seed=3)]
    strategy = pipeline(3, 4, weight_gradients="batched")
    assert_trains_equally(build, data, strategy, epochs=1, tolerance=3e-6, whole=False)


@pytest.mark.parametrize("rows", [3, pytest.param(17, marks=pytest.mark.exhaustive)])
def test_uneven_batches(rows):
    """Fewer rows than micro-batches, and a last batch of one row."""
    assert_trains_equally(mlp(), labelled(rows), whole=False)


def test_choice_of_schedules():
    chosen = {}
    for schedule in SCHEDULES:
        strategy = pipeline(2, 4, schedule=schedule)
        with strategy.scope():
            model = mlp()()
        plan = strategy._prepare(model)
        chosen[schedule] = plan.schedule.name, plan.decomposes, len(plan.chunks)
    assert chosen == {
        "auto": ("1f1b", True, 2),
        "1f1b": ("1f1b", True, 2),
        "eager-1f1b": ("eager-1f1b", True, 2),
        "gpipe": ("gpipe", True, 2),
        "interleaved": ("interleaved", True, 4),
    }
