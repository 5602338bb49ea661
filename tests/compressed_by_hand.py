"""Compressed training written down once more, with NumPy and a loop over replicas, for tests to compare with."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compression import PowerSGD, TopK
from tfdist.compression.power_sgd import matrix_of

BATCH, ROWS, EPOCHS = 16, 58, 4


def data() -> tuple[np.ndarray, np.ndarray]:
    """The last batch has fewer rows."""
    random = np.random.default_rng(5)
    x = random.normal(size=(ROWS, 32)).astype("float32")
    return x, np.tanh(x[:, :3] @ random.normal(size=(3, 2))).astype("float32")


def network(optimizer: Callable[[], Any], normalized: bool = True, **options: Any) -> keras.Model:
    """Kernels that are worth compressing, one that is not, biases, and moving statistics."""
    keras.utils.set_random_seed(3)
    middle = [keras.layers.BatchNormalization()] if normalized else []
    dense = [keras.layers.Dense(64, "tanh"), *middle, keras.layers.Dense(48, "tanh"), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((32,)), *dense])
    model.compile(optimizer(), "mse", **options)
    return model


def trained(strategy: Any, optimizer: Callable[[], Any], normalized: bool = True, **options: Any) -> keras.Model:
    """The network after a fit under a strategy."""
    with strategy.scope():
        model = network(optimizer, normalized, **options)
    model.fit(*data(), batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    return model


class Low:
    """PowerSGD of the gradient of a whole batch, by another decomposition."""

    def __init__(self, method: PowerSGD) -> None:
        self.method, self.kept = method, {}

    def __call__(self, name: int, parts: Sequence[np.ndarray]) -> np.ndarray:
        gradient = np.sum(parts, 0, dtype="float64")
        slots = self.method.slots(gradient.shape)
        if slots is None:
            return gradient
        rest, factor = self.kept.get(name, (0.0, slots["factor"].initial))
        matrix = gradient.reshape(matrix_of(gradient.shape)) + rest
        left, _ = np.linalg.qr(matrix @ factor)
        sent = left @ (left.T @ matrix)
        self.kept[name] = matrix - sent, matrix.T @ left
        return sent.reshape(gradient.shape)


class Largest:
    """TopK, replica by replica."""

    def __init__(self, method: TopK, momentum: float = 0.0, nesterov: bool = False) -> None:
        self.method, self.momentum, self.nesterov, self.kept = method, momentum, nesterov, {}

    def __call__(self, name: int, parts: Sequence[np.ndarray]) -> np.ndarray:
        if self.method.slots(parts[0].shape) is None:
            # The optimizer's momentum is the method's: of what is not compressed, too.
            velocity = self.momentum * self.kept.get(name, 0.0) + np.sum(parts, 0, dtype="float64")
            self.kept[name] = velocity
            return np.sum(parts, 0) + self.momentum * velocity if self.nesterov else velocity
        total = np.zeros(parts[0].size)
        for replica, part in enumerate(parts):
            part = part.astype("float64").reshape(-1)
            rest, velocity = self.kept.get((name, replica), (0.0, 0.0))
            velocity = self.momentum * velocity + part
            rest = rest + (part + self.momentum * velocity if self.nesterov else velocity)
            chosen = np.argsort(-np.abs(rest))[: self.method.count(part.size)]
            total[chosen] += rest[chosen]
            rest[chosen] = velocity[chosen] = 0
            self.kept[name, replica] = rest, velocity
        return total.reshape(parts[0].shape)


def by_hand(
    compress: Callable[[int, list[np.ndarray]], np.ndarray],
    optimizer: Callable[[], Any],
    replicas: int = 1,
    normalized: bool = True,
) -> keras.Model:
    """The network after a loop of one process, in which each replica's part of a batch has a gradient of its own."""
    model = network(optimizer, normalized)
    x, y = data()
    for begin in list(range(0, ROWS, BATCH)) * EPOCHS:
        rows = min(BATCH, ROWS - begin)
        bounds = begin + np.cumsum([0, *(rows // replicas + (k < rows % replicas) for k in range(replicas))])
        gradients = []
        for low, high in itertools.pairwise(bounds):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x[low:high], training=True) - y[low:high])) * (high - low) / rows
            gradients.append([one.numpy() for one in tape.gradient(loss, model.trainable_variables)])
        summed = [compress(i, list(parts)) for i, parts in enumerate(zip(*gradients, strict=True))]
        model.optimizer.apply([tf.constant(total, tf.float32) for total in summed], model.trainable_variables)
    return model


def assert_close(received: keras.Model | Sequence[np.ndarray], expected: keras.Model, within: float = 2e-5) -> None:
    """Asserts equal weights, up to float32's rounding."""
    assert distance(received, expected) < within


def distance(received: keras.Model | Sequence[np.ndarray], expected: keras.Model) -> float:
    """The largest difference of a weight."""
    weights = received.get_weights() if isinstance(received, keras.Model) else received
    return max(np.abs(a - b).max() for a, b in zip(weights, expected.get_weights(), strict=True))


# Of strategies with processes.

POWER_SGD, TOP_K = PowerSGD(rank=2), TopK(0.05, momentum_correction=True)


def sgd(momentum: float = 0.0) -> Callable[[], Any]:
    """Makes the optimizer of these tests."""
    return lambda: keras.optimizers.SGD(0.05, momentum=momentum)


def trained_both(make: Callable[..., Any], **options: Any) -> dict[str, list[np.ndarray]]:
    """The weights after a fit with each method, under strategies of a class."""
    return {
        "PowerSGD": trained(make(compression=POWER_SGD, **options), sgd(0.9)).get_weights(),
        "TopK": trained(make(compression=TOP_K, **options), sgd(0.9), normalized=False).get_weights(),
    }


@functools.cache
def by_hand_on_two() -> dict[str, keras.Model]:
    """What `trained_both` should be on two replicas."""
    return {
        "PowerSGD": by_hand(Low(POWER_SGD), sgd(0.9)),
        "TopK": by_hand(Largest(TOP_K, 0.9), sgd(), replicas=2, normalized=False),
    }


def assert_both(found: Sequence[dict[str, list[np.ndarray]]]) -> None:
    """Asserts that two processes' `trained_both` is right, and bit by bit the same."""
    first, second = found
    for method, model in by_hand_on_two().items():
        assert_close(first[method], model)
        for a, b in zip(first[method], second[method], strict=True):
            np.testing.assert_array_equal(a, b)
