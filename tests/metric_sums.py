"""Ways to set the state of a metric that is a sum over all replicas, and of which no digit may be lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

COUNTS = np.array([[7, 0], [1, 3]])
LARGE = np.array([[2**53 + 1, 0], [1, 2**60 + 3]])


class Counter(keras.metrics.Metric):
    """A confusion matrix of whole numbers, and a sum of floats."""

    def __init__(self) -> None:
        super().__init__(name="counter")
        self.counts = self.add_variable(shape=(2, 2), initializer="zeros", dtype="int64", name="counts")
        self.total = self.add_variable(shape=(), initializer="zeros", dtype="float32", name="total")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.counts.assign_add(tf.ones((2, 2), "int64"))

    def result(self) -> Any:
        return tf.reduce_sum(self.counts)


def assigned(metric: Counter, folder: Path, scope: Callable[[], Any]) -> None:
    metric.counts.assign(COUNTS)
    metric.total.assign(0.1)


def assigned_in_the_scope(metric: Counter, folder: Path, scope: Callable[[], Any]) -> None:
    with scope():
        metric.counts.assign(LARGE)
        metric.total.assign(0.1)


def assigned_in_a_function(metric: Counter, folder: Path, scope: Callable[[], Any]) -> None:
    @tf.function
    def assign() -> None:
        metric.counts.assign(COUNTS)
        metric.total.assign(0.1)

    with scope():
        assign()


def added(metric: Counter, folder: Path, scope: Callable[[], Any]) -> None:
    for row in np.eye(2, dtype=int):
        metric.counts.assign_add(COUNTS * row)
    metric.total.assign_sub(-0.1)


def restored(metric: Counter, folder: Path, scope: Callable[[], Any]) -> None:
    """From a checkpoint of TensorFlow."""
    metric.counts.assign(LARGE)
    metric.total.assign(0.1)
    checkpoint = tf.train.Checkpoint(counts=metric.counts.value, total=metric.total.value)
    path = checkpoint.save(str(folder / "state"))
    metric.counts.assign(COUNTS * 0)
    metric.total.assign(5.0)
    checkpoint.restore(path).assert_consumed()


WAYS: dict[str, tuple[Callable[[Counter, Path, Callable], None], np.ndarray]] = {
    "assigned": (assigned, COUNTS),
    "assigned in the scope": (assigned_in_the_scope, LARGE),
    "assigned in a tf.function": (assigned_in_a_function, COUNTS),
    "added": (added, COUNTS),
    "restored from TensorFlow's checkpoint": (restored, LARGE),
}


def read_back(strategy: Any, name: str, folder: Path) -> None:
    """Asserts that a metric has what it was given."""
    set_state, expected = WAYS[name]
    with strategy.scope():
        metric = Counter()
    set_state(metric, folder, strategy.scope)
    assert np.asarray(metric.counts).tolist() == expected.tolist(), name
    assert np.asarray(metric.total) == np.float32(0.1), name


def iou_of_a_callback(strategy: Any) -> float:
    """A metric that a callback fills with the whole confusion matrix of its own predictions."""
    with strategy.scope():
        metric = keras.metrics.MeanIoU(num_classes=2)
    metric.total_cm.assign(COUNTS)
    return float(metric.result())
