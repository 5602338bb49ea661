"""Small models and data whose metrics count what happened, exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.parameter_server.sections import largest

BATCH = 32
# The last batch is uneven: 650 = 20 * 32 + 10.
ROWS = 650
VOCABULARY = 50


def rows(n: int = ROWS, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Eight features and a binary label."""
    x = np.random.default_rng(seed).normal(size=(n, 8)).astype("float32")
    return x, (x.sum(1, keepdims=True) > 0).astype("float32")


def clicks(n: int = ROWS, seed: int = 0) -> tuple[list[np.ndarray], np.ndarray]:
    """Features, three ids and a label."""
    x, y = rows(n, seed)
    return [x, np.random.default_rng(seed + 1).integers(0, VOCABULARY, (n, 3))], y


def batches(x: Any, y: Any, size: int = BATCH) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(size)


class Count(keras.metrics.Metric):
    """Rows of an epoch."""

    def __init__(self, name: str = "count", **kwargs: Any):
        super().__init__(name=name, **kwargs)
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(tf.cast(tf.shape(y_true)[0], "float32"))

    def result(self) -> Any:
        # Not the variable itself, which Keras would read after the validation.
        return tf.identity(self.total.value)


class Sum(Count):
    """Sum of the labels of an epoch."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(tf.reduce_sum(tf.cast(y_true, "float32")))


class Largest(Count):
    """Largest label of an epoch: not a sum."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign(tf.maximum(self.total.value, tf.reduce_max(tf.cast(y_true, "float32"))))


class Moving(Count):
    """A moving average of the means of batches: not a sum."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign(0.9 * self.total.value + 0.1 * tf.reduce_mean(tf.cast(y_true, "float32")))


class Counting(keras.Sequential):
    """Its `train_step` counts, by one number a batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.energy, self.rows = keras.metrics.Sum(name="energy"), keras.metrics.Sum(name="rows")

    def train_step(self, data: tuple) -> dict:
        logs = super().train_step(data)
        self.energy.update_state(tf.reduce_sum(data[0]))
        self.rows.update_state(tf.cast(tf.shape(data[0])[0], "float32"))
        return logs | {"energy": self.energy.result(), "rows": self.rows.result()}


def dense_model(
    optimizer: Any = "adam", *extra: keras.layers.Layer, metrics: Sequence[Any] = (), **more: Any
) -> keras.Model:
    """A classifier of `rows`."""
    hidden = [keras.layers.Dense(16, "relu"), *extra]
    model = keras.Sequential([keras.Input((8,)), *hidden, keras.layers.Dense(1, "sigmoid")])
    arguments = {"loss": "binary_crossentropy", **more}
    model.compile(optimizer, metrics=["accuracy", Count(), *metrics], **arguments)
    return model


def click_model(optimizer: Any, **compile_arguments: Any) -> keras.Model:
    """A classifier of `clicks`, with an embedding and a regularizer."""
    features, ids = keras.Input((8,)), keras.Input((3,), dtype="int64")
    embedded = keras.layers.Flatten()(keras.layers.Embedding(VOCABULARY, 4)(ids))
    hidden = keras.layers.Dense(16, "relu", kernel_regularizer="l2")(keras.layers.Concatenate()([features, embedded]))
    model = keras.Model([features, ids], keras.layers.Dense(1, "sigmoid")(hidden))
    metrics = ["accuracy", keras.metrics.AUC(name="auc")]
    model.compile(optimizer, "binary_crossentropy", metrics=metrics, **compile_arguments)
    return model


def gaps(strategy: Any, build: Callable[[], keras.Model], x: Any, y: Any, **fit_arguments: Any) -> dict[str, float]:
    """Trains with a strategy and without one, and returns the largest differences."""
    fit_arguments = {"epochs": 3, "batch_size": BATCH, "shuffle": False, "verbose": 0, **fit_arguments}
    seen = []
    for scope in (tf.distribute.get_strategy().scope(), strategy.scope()):
        keras.utils.set_random_seed(3)
        with scope:
            model = build()
        history = model.fit(x, y, **fit_arguments).history
        evaluated = model.evaluate(x, y, batch_size=BATCH, verbose=0)
        predicted = model.predict(x, batch_size=BATCH, verbose=0)
        optimizer = [np.asarray(variable) for variable in model.optimizer.variables]
        seen.append((model.get_weights(), optimizer, list(history.values()), evaluated, [predicted]))
    names = ("weights", "optimizer", "history", "evaluate", "predict")
    return {name: largest(one, other) for name, one, other in zip(names, *seen, strict=True)}
