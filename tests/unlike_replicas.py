"""Models of which each replica calls other layers; one process does with the same rows what a replica does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tfdist.steps.keras_step import current_step, global_replica

ROWS, BATCH = 44, 8
X = np.random.default_rng(0).normal(size=(ROWS, 6)).astype("float32")
# The last column says which expert a row is for. The last two batches have rows for one, then for none.
X[:, -1] = np.arange(ROWS) % BATCH < BATCH // 2
X[-12:, -1], X[-4:, -1] = 1, 2
Y = X[:, :5].sum(1, keepdims=True)


def number_of_replica() -> int:
    return global_replica() if current_step() is not None else -1


class Chooses(keras.layers.Layer):
    """Replica 0 takes one layer and replica 1 the other."""

    def __init__(self, make: Callable[[], Any] = lambda: layers.Dense(6, activation="tanh")) -> None:
        super().__init__()
        self.both = [make(), make()]

    def build(self, shape: Any) -> None:
        for layer in self.both:
            layer.build(shape)

    def call(self, x: Any, training: bool = False) -> Any:
        replica = number_of_replica()
        if replica >= 0:
            return self.both[replica](x)
        half = (tf.shape(x)[0] + 1) // 2
        return tf.concat([self.both[0](x[:half]), self.both[1](x[half:])], 0)


class Experts(keras.layers.Layer):
    """Calls those layers that a row needs; run eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = [layers.Dense(6, activation="tanh"), layers.Dense(6)]

    def build(self, shape: Any) -> None:
        for layer in self.experts:
            layer.build(shape)

    def compute_output_shape(self, shape: Any) -> Any:
        return shape

    def call(self, x: Any) -> Any:
        result = tf.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = tf.where(x[:, -1] == number)
            if len(rows):
                result += tf.scatter_nd(rows, expert(tf.gather(x, rows[:, 0])), tf.shape(x, tf.int64))
        return result + x


class Tokens(keras.layers.Layer):
    """An embedding, of which gradients are sparse, and one more layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = layers.Embedding(5, 6)

    def build(self, shape: Any) -> None:
        self.table.build(None)

    def call(self, x: Any) -> Any:
        return tf.reduce_mean(self.table(tf.cast(tf.abs(x) * 2, tf.int32) % 5), 1)


class Moves(keras.layers.Layer):
    """A layer with a moving mean of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(6)

    def build(self, shape: Any) -> None:
        self.dense.build(shape)
        self.mean = self.add_weight(shape=(6,), initializer="zeros", trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            # Of what half of the rows make, half counts.
            rate = 0.1 if number_of_replica() >= 0 else 0.05
            self.mean.assign((1 - rate) * self.mean + rate * tf.reduce_mean(x, 0))
        return self.dense(x)


class Steps(keras.Sequential):
    """A `train_step` as people write it; subclasses apply the gradients."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.apply(tape.gradient(loss, self.trainable_variables))
        return {"loss": loss}

    def apply(self, gradients: list) -> None:
        raise NotImplementedError


class Filters(Steps):
    """Leaves out what has no gradient by itself."""

    def apply(self, gradients: list) -> None:
        pairs = zip(gradients, self.trainable_variables, strict=True)
        self.optimizer.apply_gradients([(g, v) for g, v in pairs if g is not None])


class Twice(Steps):
    """Applies two gradients to each weight."""

    def apply(self, gradients: list) -> None:
        pairs = [(g, v) for g, v in zip(gradients, self.trainable_variables, strict=True) if g is not None]
        self.optimizer.apply_gradients([*pairs, *((0.5 * g, v) for g, v in pairs)])


class AppliesNothing(Steps):
    """Applies no gradients at first."""

    def apply(self, gradients: list) -> None:
        self.optimizer.apply([], [])
        self.optimizer.apply(gradients, self.trainable_variables)


class InAFunction(Steps):
    """Applies them in a tf.function of its own."""

    def apply(self, gradients: list) -> None:
        @tf.function
        def apply(gradients: list) -> None:
            self.optimizer.apply(gradients, self.trainable_variables)

        apply(gradients)


def _between(make: Callable[[], Any], kind: type[keras.Sequential] = keras.Sequential) -> Callable[[], keras.Model]:
    return lambda: kind([keras.Input((6,)), layers.Dense(6), make(), layers.Dense(1)])


# By name: the model, and whether it runs eagerly.
KINDS: dict[str, tuple[Callable[[], keras.Model], bool]] = {
    "one of two": (_between(Chooses), False),
    "one of two, eager": (_between(Chooses), True),
    "an expert for some rows, eager": (lambda: keras.Sequential([keras.Input((6,)), Experts(), layers.Dense(1)]), True),
    "one of two embeddings": (_between(lambda: Chooses(Tokens)), False),
    "an embedding for one": (lambda: keras.Sequential([keras.Input((6,)), Chooses(Tokens), layers.Dense(1)]), False),
    "a moving mean in each": (_between(lambda: Chooses(Moves)), False),
    "a moving mean in each, and no gradients": (_between(lambda: Chooses(Moves), AppliesNothing), False),
    "gradients without None": (_between(Chooses, Filters), False),
    "each weight twice": (_between(lambda: layers.Dense(6, activation="tanh"), Twice), False),
    "each weight of one of two twice": (_between(Chooses, Twice), False),
    "in a tf.function": (_between(lambda: layers.Dense(6, activation="tanh"), InAFunction), False),
}
# Not every replica exchanges statistics of the same layer.
APART = _between(lambda: Chooses(layers.BatchNormalization))


def make(strategy: tf.distribute.Strategy, build: Callable[[], keras.Model], eager: bool = False) -> keras.Model:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = build()
        optimizer = keras.optimizers.AdamW(0.02, weight_decay=0.1, clipnorm=1.0)
        model.compile(optimizer, "mse", run_eagerly=eager)
    return model


def train(strategy: tf.distribute.Strategy, name: str) -> tuple[list[np.ndarray], list[str]]:
    """The losses and weights after two epochs, and what was warned of."""
    model = make(strategy, *KINDS[name])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history["loss"]
    said = [str(one.message) for one in caught if "other branches" in str(one.message)]
    return [np.array(losses), *model.get_weights()], said


def difference(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    return max(float(np.max(np.abs(one - other))) for one, other in zip(found, expected, strict=True))
