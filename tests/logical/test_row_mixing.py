"""Losses whose value for a batch is not the mean of its rows' are told from others, and warned of once."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.steps.losses_that_mix_rows import mixes_rows

FEW = tf.TensorSpec((4, 3))
X, Y = np.ones((8, 4), "float32"), np.eye(8, 3, dtype="float32")


def root(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(y_true - y_pred)))


def own_mean(y_true: Any, y_pred: Any) -> Any:
    return tf.reduce_mean(tf.square(y_true - y_pred))


def half_mean(y_true: Any, y_pred: Any) -> Any:
    return tf.reduce_mean(tf.cast(tf.square(y_true - y_pred), tf.float16))


def own_sum(y_true: Any, y_pred: Any) -> Any:
    return tf.reduce_sum(tf.square(y_true - y_pred))


def warned(strategy: tf.distribute.Strategy, loss: Any, **options: Any) -> list[str]:
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "sigmoid")])
        model.compile("sgd", loss, **options)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.fit(X, Y, batch_size=4, epochs=2, verbose=0, validation_data=(X, Y))
        model.fit(X, Y, batch_size=4, verbose=0)
    return [str(w.message) for w in found if "mixes the rows" in str(w.message)]


@pytest.mark.parametrize(
    "loss",
    [
        root,
        own_sum,
        *(pytest.param(loss, marks=pytest.mark.exhaustive) for loss in ("dice", "tversky", keras.losses.Dice())),
    ],
)
def test_losses_that_mix_rows(mirrored, loss):
    (message,) = warned(mirrored, loss)
    assert message.startswith("Received: loss '")
    assert "Expected: a loss that has a value for each row" in message


@pytest.mark.parametrize(
    "loss",
    [
        "mse",
        *(
            pytest.param(loss, marks=pytest.mark.exhaustive)
            for loss in (
                "categorical_crossentropy",
                "cosine_similarity",
                own_mean,
                half_mean,
                keras.losses.MeanSquaredError(reduction="sum"),
                keras.losses.BinaryFocalCrossentropy(),
            )
        ),
    ],
)
def test_losses_that_do_not(mirrored, loss):
    assert warned(mirrored, loss) == []


@pytest.mark.exhaustive
def test_a_loss_that_is_not_hashable(mirrored):
    class Own(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return tf.reduce_mean(tf.square(y_true - y_pred), -1)

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Own)

    assert warned(mirrored, Own()) == []


@pytest.mark.exhaustive
def test_nothing_is_said_in_one_process():
    assert warned(tf.distribute.get_strategy(), "dice") == []


@pytest.mark.exhaustive
def test_one_loss_for_two_outputs(mirrored):
    loss = keras.losses.Dice()
    with mirrored.scope():
        x = keras.Input((4,))
        model = keras.Model(x, [keras.layers.Dense(3)(x), keras.layers.Dense(3)(x)])
        model.compile("sgd", [loss, loss])
    with pytest.warns(UserWarning, match="loss 'dice', which mixes the rows"):
        model.fit(X, [Y, Y], batch_size=4, verbose=0)


def test_a_loss_that_keeps_something_is_not_tried(mirrored):
    class Counting(keras.losses.Loss):
        def __init__(self, aggregation: str) -> None:
            super().__init__()
            self.calls = keras.Variable(0.0, trainable=False, aggregation=aggregation)
            self.seeds = keras.random.SeedGenerator(1)

        def call(self, y_true: Any, y_pred: Any) -> Any:
            self.calls.assign(self.calls + 1)
            return tf.reduce_mean(tf.square(y_true - y_pred)) + keras.random.uniform((), seed=self.seeds)

    for aggregation in ("none", "only_first_replica"):
        with mirrored.scope():
            loss = Counting(aggregation)
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
            model.compile("sgd", loss)
        model.fit(X, Y, batch_size=8, verbose=0)
        assert [float(part) for part in loss.calls.value.values] == [1.0, 1.0]
        assert int(np.asarray(loss.seeds.state)[1]) == 1


def test_a_loss_of_the_rows_of_all_replicas(mirrored):
    """What the warning asks for."""

    def contrastive(y_true: Any, y_pred: Any) -> Any:
        context = tf.distribute.get_replica_context()
        everyone = y_pred if context is None else context.all_gather(y_pred, axis=0)
        return tf.reduce_mean(tf.square(tf.reduce_mean(everyone, 0) - y_pred))

    assert warned(mirrored, contrastive) == []


def test_large_predictions_are_not_tried():
    def fails(y_true: Any, y_pred: Any) -> Any:
        raise AssertionError("called")

    few = tf.TensorSpec((4, 1 << 30))
    assert not mixes_rows(fails, few, few)


def test_targets_that_are_numbers_of_classes():
    classes, scores = tf.TensorSpec((4,), tf.int32), tf.TensorSpec((4, 5))
    assert not mixes_rows(keras.losses.sparse_categorical_crossentropy, classes, scores)
    assert mixes_rows(keras.losses.circle, classes, scores)


def test_what_cannot_be_tried_says_nothing():
    def fails(y_true: Any, y_pred: Any) -> Any:
        raise TypeError("only eight rows")

    def draws(y_true: Any, y_pred: Any) -> Any:
        return tf.random.uniform(())

    assert not mixes_rows(fails, FEW, FEW)
    assert not mixes_rows(draws, FEW, FEW)
