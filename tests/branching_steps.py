"""Models whose `train_step` applies an optimizer in a branch, as people write them for one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

X = np.random.default_rng(0).normal(size=(44, 4)).astype("float32")
X[9] = 30.0
Y = X.sum(1, keepdims=True)


class Linear(keras.Model):
    """One layer; a step that subclasses complete."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = keras.layers.Dense(1)

    def build(self, shape: Any) -> None:
        self.layer.build(shape)
        self.built = True

    def call(self, x: Any) -> Any:
        return self.layer(x)

    def of_loss(self, data: Any) -> tuple[Any, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        return loss, tape.gradient(loss, self.trainable_variables)


class Accumulates(Linear):
    """Applies the mean gradient of each two batches."""

    def build(self, shape: Any) -> None:
        super().build(shape)
        self.count = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)
        self.sums = [self.add_weight(shape=v.shape, initializer="zeros", trainable=False) for v in self.layer.weights]

    def train_step(self, data: Any) -> dict[str, Any]:
        loss, gradients = self.of_loss(data)
        self.count.assign_add(1)
        for total, gradient in zip(self.sums, gradients, strict=True):
            total.assign_add(gradient)

        def apply() -> bool:
            self.optimizer.apply([total / 2 for total in self.sums], self.trainable_variables)
            for total in self.sums:
                total.assign(tf.zeros_like(total))
            return True

        tf.cond(tf.equal(self.count % 2, 0), apply, lambda: False)
        return {"loss": loss}


class LeavesOut(Linear):
    """Leaves out batches whose loss is not finite, or large."""

    largest = np.inf

    def train_step(self, data: Any) -> dict[str, Any]:
        loss, gradients = self.of_loss(data)

        def apply() -> float:
            self.optimizer.apply(gradients, self.trainable_variables)
            return 1.0

        is_good = keras.ops.isfinite(loss) if np.isinf(self.largest) else loss < self.largest
        return {"applied": keras.ops.cond(is_good, apply, lambda: 0.0)}


class LeavesOutLarge(LeavesOut):
    """The one with a bound that a replica's own rows may not exceed."""

    largest = 300.0


class ReturnsNothing(LeavesOut):
    """The same, with branches that return nothing."""

    def train_step(self, data: Any) -> dict[str, Any]:
        loss, gradients = self.of_loss(data)
        apply = lambda: self.optimizer.apply(gradients, self.trainable_variables)  # noqa: E731
        tf.cond(tf.math.is_finite(loss), apply, lambda: None)
        return {"loss": loss}


class Decides(Linear):
    """Applies its optimizer where a function of the rows and the loss says so."""

    def __init__(self, decide: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.decide = decide

    def train_step(self, data: Any) -> dict[str, Any]:
        loss, gradients = self.of_loss(data)

        def apply() -> bool:
            self.optimizer.apply(gradients, self.trainable_variables)
            return True

        tf.cond(self.decide(data[0], loss), apply, lambda: False)
        return {"loss": loss}


# In some batches replicas would decide otherwise than one process does.
DECISIONS: dict[str, Callable[[Any, Any], Any]] = {
    "a whole number of a mean": lambda x, loss: tf.cast(tf.reduce_mean(x[:, 0]) * 10, tf.int32) > 0,
    "a sum of flags": lambda x, loss: tf.reduce_sum(tf.cast(x[:, 0] > 0.9, tf.float32)) > 1,
    "a count": lambda x, loss: tf.math.count_nonzero(x[:, 0] > 0.9) >= 2,
    "how many rows": lambda x, loss: tf.shape(x)[0] >= 8,
    "the root of a mean": lambda x, loss: tf.sqrt(tf.reduce_mean(tf.square(x[:, 0]))) < 0.9,
    "two": lambda x, loss: (tf.reduce_sum(x[:, 0]) > 0) & tf.reduce_all(tf.math.is_finite(x)) & tf.math.is_finite(loss),
}


class DrawsInBranch(Linear):
    """Draws random numbers in the branch without a seed; they count nothing."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data

        def apply() -> Any:
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x) + 0.0 * keras.random.normal((1,)))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return loss

        return {"loss": tf.cond(tf.reduce_all(tf.math.is_finite(x)), apply, lambda: 0.0)}


class ChoosesAtRandom(Linear):
    """Applies its optimizer to some batches, which random numbers choose."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = keras.random.SeedGenerator(3)

    def train_step(self, data: Any) -> dict[str, Any]:
        loss, gradients = self.of_loss(data)

        def apply() -> float:
            self.optimizer.apply(gradients, self.trainable_variables)
            return 1.0

        chosen = keras.random.uniform((), seed=self.seeds) < 0.6
        return {"loss": loss, "applied": keras.ops.cond(chosen, apply, lambda: 0.0)}


class TwoOptimizers(Linear):
    """Trains the first layer at every third step, on a loss of its own in the branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = keras.layers.Dense(4)
        self.first_optimizer = keras.optimizers.Adam(0.05)

    def build(self, shape: Any) -> None:
        self.first.build(shape)
        super().build(shape)

    def call(self, x: Any) -> Any:
        return self.layer(self.first(x))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        self.optimizer.apply(tape.gradient(loss, self.layer.weights), self.layer.weights)

        def train_first() -> Any:
            with tf.GradientTape() as tape:
                own = self.compute_loss(x, y, self(x), sample_weight=tf.ones(tf.shape(x)[:1]))
            self.first_optimizer.apply(tape.gradient(own, self.first.weights), self.first.weights)
            return own

        return {"own": tf.cond(tf.equal(self.optimizer.iterations % 3, 0), train_first, lambda: 0.0)}


class Loops(Linear):
    """Applies its optimizer in a loop of TensorFlow."""

    def train_step(self, data: Any) -> dict[str, Any]:
        def body(i: Any) -> Any:
            _, gradients = self.of_loss(data)
            self.optimizer.apply(gradients, self.trainable_variables)
            return i + 1

        return {"steps": tf.while_loop(lambda i: i < 2, body, [0])[0]}


KINDS: dict[str, Callable[[], Linear]] = {
    kind.__name__: kind
    for kind in (
        *(Accumulates, LeavesOut, LeavesOutLarge, ReturnsNothing),
        *(DrawsInBranch, ChoosesAtRandom, TwoOptimizers),
    )
}
KINDS |= {name: functools.partial(Decides, decide) for name, decide in DECISIONS.items()}


def train(strategy: tf.distribute.Strategy, name: str) -> list[float]:
    """The weights after two epochs, and how many updates there were; a row of the second batch is not finite."""
    keras.utils.set_random_seed(0)
    x = X.copy()
    if name in ("LeavesOut", "ReturnsNothing"):
        x[9] = np.nan
    with strategy.scope():
        model = KINDS[name]()
        model.build((None, 4))
        model.compile(keras.optimizers.Adam(0.05), "mse")
    model.fit(x, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    weights = np.concatenate([np.ravel(weight) for weight in model.get_weights()])
    return [*weights.tolist(), int(np.asarray(model.optimizer.iterations.value))]
