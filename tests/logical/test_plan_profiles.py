"""What a plan reads from models: operations, bytes, layers, memory."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfdist
from tests.models import ready
from tfdist.planning.plan import plan_for
from tfdist.planning.profile import ModelProfile, profile_of

ROWS, WIDTH = 64, 32


@pytest.fixture(scope="module")
def dense() -> keras.Model:
    layers = [keras.layers.Dense(WIDTH, "relu", name=f"dense_{i}") for i in range(8)]
    return ready(keras.Sequential([keras.Input((WIDTH,)), *layers]), keras.optimizers.Adam(1e-3), "mse")


@pytest.fixture(scope="module")
def profiled(dense) -> ModelProfile:
    return profile_of(dense, ROWS)


@pytest.mark.nightly
def test_what_is_known_of_dense_layers(profiled):
    found = profiled
    parameters = 8 * (WIDTH * WIDTH + WIDTH) * 4
    assert (found.rows, found.weights, found.trainable) == (ROWS, parameters, parameters)
    # Two moments, and a step and a learning rate.
    assert parameters * 2 <= found.slots <= parameters * 2 + 32
    few, many = found.samples
    assert (few.rows, many.rows) == (ROWS // 4, ROWS)
    # Three products for each layer but the first one, whose input needs no gradient.
    products = 2 * WIDTH * WIDTH * (3 * 8 - 1)
    assert products * ROWS <= many.compute.flops <= 1.1 * products * ROWS
    assert few.compute.flops == pytest.approx(many.compute.flops / 4, rel=0.05)
    assert few.update.bytes == many.update.bytes > 10 * parameters / 2
    assert few.compute.operations == many.compute.operations
    # A row leaves what each layer returns; on the way back, gradients take the place of that.
    kept = 8 * WIDTH * 4 * ROWS
    assert sum(block.kept for block in many.blocks) == kept < many.peak < kept + 2 * found.trainable


def test_nothing_of_the_model_changes(dense):
    before = [np.array(value) for value in dense.get_weights()]
    iterations = int(dense.optimizer.iterations)
    tfdist.plan(dense, ROWS, devices=4, hardware="v100-nvlink")
    assert all((a == b).all() for a, b in zip(before, dense.get_weights(), strict=True))
    assert int(dense.optimizer.iterations) == iterations


def test_a_model_that_is_no_graph_has_no_stages():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = keras.layers.Dense(8), keras.layers.Dense(1)

        def call(self, x):
            return self.second(self.first(x))

    model = ready(Own(), "adam", "mse")
    found = tfdist.plan(model, data=(np.zeros((16, 4)), np.zeros((16, 1))), devices=2, hardware="a100-nvlink")
    assert not any(row.family.startswith("Pipeline") for row in found.rows)


def test_loops_are_counted():
    model = ready(
        keras.Sequential([keras.Input((12, 4)), keras.layers.LSTM(8, use_cudnn=False), keras.layers.Dense(1)]),
        "sgd",
        "mse",
    )
    found = profile_of(model, 16)
    # Two operations for each weight of the LSTM, each row and each step of time, three times.
    assert found.samples[1].compute.flops >= 3 * 2 * 16 * 12 * (4 + 8) * 32


def test_normalizations_wait_for_each_other():
    layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = ready(keras.Sequential([keras.Input((4,)), *layers]), "sgd", "mse")
    from tfdist.planning.hardware import PRESETS

    found, hardware = profile_of(model, 64), PRESETS["p100-25gbe"]
    assert found.normalizations == 1
    (row,) = [row for row in plan_for(found, hardware, [8]).rows if row.name == "MultiWorker"]
    # One sum for gradients, and two for statistics: 14 messages each.
    assert row.communication >= 3 * 14 * hardware.between.latency


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "Received: neither batch_size nor data"),
        ({"batch_size": 8, "hardware": "abacus"}, r"Received: hardware 'abacus'\. Expected: one of p100-25gbe"),
    ],
)
def test_what_cannot_be_planned(dense, arguments, said):
    with pytest.raises(ValueError, match=said):
        tfdist.plan(dense, **{"hardware": "v100-nvlink", **arguments})
