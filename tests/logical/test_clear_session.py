"""`clear_session` where people call it: between the folds of a cross-validation, inside the scope."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.models import assert_arrays, ready

X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


def folds(strategy: Any, clears: bool) -> list[np.ndarray]:
    found = []
    with strategy.scope():
        for number in range(2):
            if clears:
                keras.backend.clear_session()
            keras.utils.set_random_seed(number)
            layers = [keras.layers.Dense(3, "relu"), keras.layers.Dense(1)]
            model = ready(keras.Sequential([keras.Input((4,)), *layers]), "adam", "mse")
            model.fit(np.delete(X, number, 0), np.delete(Y, number, 0), batch_size=8, verbose=0)
            found += model.get_weights()
        assert tf.distribute.get_strategy() is strategy
    return found


@pytest.mark.nightly
def test_folds_equal_one_process(mirrored):
    assert_arrays(folds(mirrored, clears=True), folds(tf.distribute.get_strategy(), clears=False), tolerance=1e-5)
