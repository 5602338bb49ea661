"""`keras.random` functions without a seed, in layers and steps: other numbers on each replica, the same in each run."""

from __future__ import annotations

import random

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.tiers import daily
from tfdist.strategies import global_seeds

X = np.zeros((8, 4), "float32")


class Noise(keras.layers.Layer):
    """Adds numbers to which nobody has given a seed."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x + keras.random.normal(tf.shape(x))


class NoisyStep(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.out = keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.out(x)

    def train_step(self, data: tuple) -> dict:
        x, y = data
        return super().train_step((x + keras.random.uniform(tf.shape(x)), y))


def noisy_layers() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), Noise(), keras.layers.Dense(1, kernel_initializer="ones")])


def losses(strategy: tf.distribute.Strategy, build: object, **arguments: object) -> list[float]:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = build()
        model.compile("sgd", "mse", **arguments)
    return model.fit(X, X[:, :1], batch_size=8, epochs=3, verbose=0).history["loss"]


@pytest.mark.parametrize("build", [noisy_layers, NoisyStep])
@pytest.mark.parametrize("arguments", daily([{}, {"run_eagerly": True}], "{}"), ids=str)
def test_each_run_draws_the_same(mirrored, build, arguments):
    first, again = (losses(mirrored, build, **arguments) for _ in range(2))
    assert first == again
    assert len(set(first)) == 3, "each epoch draws others"


def test_another_strategy_and_none_come_after_it(mirrored):
    one = tfdist.MirroredStrategy(["CPU:0"])
    for strategy in (mirrored, one, tf.distribute.get_strategy(), mirrored):
        assert np.isfinite(losses(strategy, noisy_layers)).all()
    # Without a new seed in between, too.
    for strategy in (mirrored, one, tf.distribute.get_strategy(), mirrored):
        with strategy.scope():
            model = noisy_layers()
            model.compile("sgd", "mse")
        assert np.isfinite(model.fit(X, X[:, :1], batch_size=8, verbose=0).history["loss"]).all()


def test_what_nobody_draws_from_changes_nothing(mirrored):
    keras.utils.set_random_seed(3)
    before = random.getstate()
    global_seeds.make(mirrored)
    assert random.getstate() == before
    assert not global_seeds.is_used(global_seeds.current())
    losses(mirrored, noisy_layers)
    assert global_seeds.is_used(global_seeds.current())
