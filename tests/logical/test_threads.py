"""Fits in threads under one strategy, as joblib's threads do it for folds: each is as it is by itself, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.models import ready

# A fit that waits for ever, not one that is slow.
SECONDS = 600.0

pytestmark = pytest.mark.timeout(SECONDS)


def built(strategy: Any, seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        layers = [keras.layers.Dense(4, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        model = ready(
            keras.Sequential([keras.Input((3,)), *layers]),
            keras.optimizers.SGD(0.05),
            "mse",
            metrics=["mae"],
        )
    return model


def rows(fold: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(fold)
    return rng.standard_normal((count, 3)).astype("f"), fold + rng.standard_normal((count, 1)).astype("f")


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """What the calls return, all begun at once; a call that does not end fails the test."""
    begin = threading.Barrier(len(calls))

    def one(call: Callable[[], Any]) -> Any:
        begin.wait(SECONDS)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(SECONDS) for future in [pool.submit(one, call) for call in calls]]


@pytest.mark.nightly
def test_folds_in_threads_equal_folds_one_by_one(mirrored: Any) -> None:
    def folds() -> list[Callable[[], tuple]]:
        models = [built(mirrored, fold) for fold in range(2)]

        def of(fold: int) -> tuple:
            model = models[fold]
            history = model.fit(*rows(fold, 96), batch_size=4, verbose=0, shuffle=False).history
            return history, model.evaluate(*rows(fold, 8), verbose=0), model.get_weights()

        return [lambda fold=fold: of(fold) for fold in range(2)]

    expected = [fold() for fold in folds()]
    for found, (history, result, weights) in zip(in_threads(folds()), expected, strict=True):
        assert found[:2] == (history, result)
        for a, b in zip(found[2], weights, strict=True):
            np.testing.assert_array_equal(a, b)  # bit by bit


def test_a_server_predicts_while_a_model_is_trained(mirrored: Any) -> None:
    trained, served = built(mirrored, 1), built(mirrored, 2)
    x, _ = rows(1, 8)
    expected = served.predict(x, verbose=0)
    results = in_threads(
        [
            lambda: trained.fit(*rows(1, 96), batch_size=4, verbose=0),
            lambda: [served.predict(x, verbose=0) for _ in range(5)],
            lambda: served.evaluate(*rows(1, 8), verbose=0),
        ]
    )
    for found in results[1]:
        np.testing.assert_array_equal(found, expected)
    assert results[2] == served.evaluate(*rows(1, 8), verbose=0)


def test_a_generator_that_predicts_does_not_wait_for_the_step_that_waits_for_it(mirrored: Any) -> None:
    student, teacher = built(mirrored, 1), built(mirrored, 2)
    x, _ = rows(1, 4)

    def batches() -> Any:
        for _ in range(3):
            yield x, teacher.predict(x, verbose=0)

    signature = (tf.TensorSpec((4, 3)), tf.TensorSpec((4, 1)))
    data = tf.data.Dataset.from_generator(batches, output_signature=signature).prefetch(1)
    student.fit(data, epochs=2, verbose=0)
    assert int(student.optimizer.iterations) == 6
