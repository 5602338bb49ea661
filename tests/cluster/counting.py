"""Models whose weights count what happened to each row of the data, exactly."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers

ROWS, SIZE, EPOCHS = 48, 8, 3


class Seen(layers.Layer):
    """One weight a row of the data; its gradient is the number of times that the row was seen."""

    def build(self, shape: tuple) -> None:
        self.seen = self.add_weight(shape=(shape[-1], 1), initializer="zeros", name="seen")

    def call(self, x: Any) -> Any:
        return keras.ops.matmul(x, self.seen)


class Masks(layers.Layer):
    """One weight a row and feature; its gradient is the Dropout mask that the row got."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = layers.Dropout(0.5)

    def build(self, shape: tuple) -> None:
        self.masks = self.add_weight(shape=(shape[-1], 64), initializer="zeros", name="masks")

    def call(self, x: Any, training: bool = False) -> Any:
        own = keras.ops.matmul(x, self.masks)
        return keras.ops.sum(own * self.dropout(keras.ops.ones_like(own), training=training), -1, keepdims=True)


def counting_model(strategy: Any, layer: type, rows: int, learning_rate: float) -> keras.Model:
    """A model whose weights become minus what its layer has counted: the loss is the output itself."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((rows,)), layer()])
        model.compile(keras.optimizers.SGD(learning_rate), lambda y_true, y_pred: y_pred)
    return model


def one_hot_rows() -> tuple[np.ndarray, np.ndarray]:
    """Data whose rows `Seen` tells apart."""
    return np.eye(ROWS, dtype="float32"), np.zeros((ROWS, 1), "float32")


def times_seen(strategy: Any, *data: Any, rows: int = ROWS, **arguments: object) -> list[float]:
    """How often `fit` sees each of `rows` rows in `EPOCHS` epochs of batches of `SIZE` rows."""
    model = counting_model(strategy, Seen, rows, float(SIZE))
    model.fit(*data, epochs=EPOCHS, verbose=0, **arguments)
    return (-model.get_weights()[0][:, 0]).tolist()


def masks_of_rows(strategy: Any, rows: int) -> np.ndarray:
    """The Dropout masks that each of `rows` rows gets in one step."""
    keras.utils.set_random_seed(5)
    model = counting_model(strategy, Masks, rows, float(rows))
    model.fit(np.eye(rows, dtype="float32"), np.zeros((rows, 1)), batch_size=rows, shuffle=False, verbose=0)
    return -model.get_weights()[0]
