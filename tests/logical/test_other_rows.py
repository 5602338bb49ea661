"""Components of a batch with other numbers of rows than the rest: cut like it, with a warning."""

from __future__ import annotations

import functools
import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.models import in_scope, ready, warned
from tests.tiers import daily
from tfdist.strategies.data_parallel import dataset

ROWS = np.random.RandomState(0).randn(44, 4).astype("float32")
ANCHORS = ROWS[:8] + 1


@pytest.fixture(autouse=True)
def nothing_said_before():
    dataset._WARNED.clear()


class Distances(layers.Layer):
    """How far the rows are from the nearest anchor."""

    def call(self, inputs: dict) -> Any:
        apart = ops.expand_dims(inputs["image"], 1) - ops.expand_dims(inputs["anchors"], 0)
        return ops.min(ops.sum(apart**2, -1), 1, keepdims=True)


class Nearest(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.distances, self.dense = Distances(), layers.Dense(1)

    def call(self, inputs: dict) -> Any:
        return self.dense(self.distances(inputs))


def with_anchors(anchors: np.ndarray = ANCHORS, **options: bool) -> tf.data.Dataset:
    batches = tf.data.Dataset.from_tensor_slices((ROWS, ROWS[:, :1])).batch(16, **options)
    return batches.map(lambda x, y: ({"image": x, "anchors": tf.constant(anchors)}, y))


def said(strategy: tf.distribute.Strategy, data: tf.data.Dataset) -> list[str]:
    model = in_scope(strategy, lambda: ready(Nearest(), "sgd", "mse"))
    fit = functools.partial(model.fit, data, epochs=2, verbose=0)
    return warned(lambda: [fit(), fit(), model.evaluate(data, verbose=0)], "numbers of rows")


@pytest.mark.parametrize("drop_remainder", daily([True, False], "False"))
def test_anchors_beside_rows(mirrored, drop_remainder):
    """Without `drop_remainder` the number of the others is known in the step only; the last batch has 12."""
    (message,) = said(mirrored, with_anchors(drop_remainder=drop_remainder))
    assert re.search("8 in '0/anchors', 16 in '0/image', 16 in '1'.*1/2 of the rows.*a constant or a weight", message)


def test_own_loops(mirrored):
    with pytest.warns(UserWarning, match="8 in '0/anchors'"):
        next(iter(mirrored.experimental_distribute_dataset(with_anchors(drop_remainder=True))))


def test_one_row_is_for_all(mirrored):
    assert said(mirrored, with_anchors(ANCHORS[:1], drop_remainder=True)) == []


def test_as_many_rows_in_all(mirrored):
    assert said(mirrored, with_anchors(np.resize(ANCHORS, (16, 4)), drop_remainder=True)) == []
