"""`sparse_updates` gives Keras' Adagrad from row-wise operations, and leaves other optimizers alone."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tests.logical.embedding_models import apply_function, table_sized
from tests.models import assert_arrays
from tfdist.strategies.parameter_server.step import sparse_updates

ROWS = 97
INITIAL = np.random.default_rng(0).normal(size=(ROWS, 2)).astype("float32")
IDS = [5, 8, 5, 90, 5]
VALUES = np.random.default_rng(1).normal(size=(5, 2)).astype("float32")


def _run(optimizer, dense=False, steps=4, sparse=False):
    """The table and slots after some steps, and the operations of the size of the table."""
    variable = keras.Variable(INITIAL)
    step = apply_function(optimizer, variable, IDS, VALUES, dense)
    if sparse:
        with sparse_updates(optimizer):
            step.get_concrete_function()
    for _ in range(steps):
        step()
    slots = [slot.numpy() for slot in optimizer.variables if slot.shape == variable.shape]
    return [variable.numpy(), *slots], table_sized(step.get_concrete_function().graph, ROWS)


def _adagrad(**arguments):
    return keras.optimizers.Adagrad(0.5, **arguments)


@pytest.mark.parametrize("wrapped", [False, True])
def test_adagrad_is_that_of_keras_on_slices(wrapped):
    optimizer = keras.optimizers.LossScaleOptimizer(_adagrad(), initial_scale=1.0) if wrapped else _adagrad()
    found, types = _run(optimizer, sparse=True)
    expected, keras_types = _run(_adagrad())
    assert len(found) == 2
    assert_arrays(found, expected, tolerance=1e-6)
    assert "Sqrt" in keras_types
    # The test for overflow of Keras' LossScaleOptimizer makes a table of the gradient.
    assert types == ({"TensorScatterUpdate", "Fill"} if wrapped else set())
    # Negative control: with ids that occur several times, Keras' slices are not its dense gradient.
    dense, _ = _run(_adagrad(), dense=True)
    assert np.abs(found[0] - dense[0]).max() > 0.05


def test_dense_gradients_are_left_alone():
    found, _ = _run(_adagrad(), dense=True, sparse=True)
    expected, _ = _run(_adagrad(), dense=True)
    np.testing.assert_array_equal(found[0], expected[0])


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.Adam(0.1),
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        lambda: keras.optimizers.RMSprop(0.1),
        lambda: keras.optimizers.Ftrl(0.1),
        lambda: keras.optimizers.SGD(0.1),
        lambda: type("Mine", (keras.optimizers.Adagrad,), {"update_step": lambda self, *args: None})(0.1),
    ],
    ids=["Adam", "momentum", "RMSprop", "Ftrl", "SGD", "subclass"],
)
def test_other_optimizers_are_not_touched(optimizer):
    optimizer = optimizer()
    with sparse_updates(optimizer):
        assert "update_step" not in vars(optimizer)
