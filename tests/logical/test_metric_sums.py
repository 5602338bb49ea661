"""Metrics have one process' state: where it is set outside of a step, and after each batch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests import metric_sums
from tests.models import in_scope, ready
from tests.tiers import daily


@pytest.mark.parametrize("name", metric_sums.WAYS)
def test_no_count_is_lost(mirrored, name, tmp_path):
    metric_sums.read_back(mirrored, name, tmp_path)


def test_a_metric_of_keras_that_a_callback_fills(four_devices):
    strategy = tfdist.MirroredStrategy(four_devices[:3])
    expected = metric_sums.iou_of_a_callback(tf.distribute.get_strategy())
    assert metric_sums.iou_of_a_callback(strategy) == expected == pytest.approx((7 / 8 + 3 / 4) / 2)


def logs_of_batches(strategy: Any, **options: Any) -> list[dict[str, float]]:
    """What callbacks get at each batch, of which the last has too few rows for all replicas."""
    found: list[dict[str, float]] = []

    class Logs(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            found.append(logs)

        on_test_batch_end = on_train_batch_end

    def build() -> keras.Model:
        net = keras.Sequential([keras.Input((4,)), layers.Dense(3, "tanh"), layers.Dense(1, "sigmoid")])
        metrics = ["accuracy", keras.metrics.AUC(name="auc"), keras.metrics.F1Score(threshold=0.5, name="f1")]
        return ready(net, keras.optimizers.Adam(0.1), "binary_crossentropy", metrics=metrics, **options)

    keras.utils.set_random_seed(1)
    x = np.random.RandomState(0).randn(21, 4).astype("float32")
    model, data = in_scope(strategy, build), (x, (x[:, :1] > 0).astype("float32"))
    model.fit(*data, batch_size=5, epochs=2, shuffle=False, verbose=0, validation_data=data, callbacks=[Logs()])
    return found


@pytest.mark.parametrize(
    "options", daily([{}, {"run_eagerly": True}, {"jit_compile": True}, {"steps_per_execution": 2}], "{}")
)
def test_callbacks_see_all_rows_after_each_batch(mirrored, options):
    expected = logs_of_batches(tf.distribute.get_strategy(), **options)
    for found, one in zip(logs_of_batches(mirrored, **options), expected, strict=True):
        assert found == {name: pytest.approx(value, abs=1e-6) for name, value in one.items()}
