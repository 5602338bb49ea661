"""`keras.random` functions without a seed, in layers and steps: other numbers on each replica, the same in each run."""

from __future__ import annotations

import random

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.tiers import daily
from tfdist.inspection import global_seeds

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


@pytest.mark.parametrize("build", [noisy_layers, pytest.param(NoisyStep, marks=pytest.mark.exhaustive)])
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


@pytest.mark.parametrize("other", [tfdist.MirroredStrategy, tf.distribute.MirroredStrategy])
def test_in_the_scope_of_another_strategy(mirrored, other):
    losses(mirrored, noisy_layers)
    with other(["CPU:0", "CPU:1"]).scope():
        drawn = [keras.random.normal((2,)).numpy().tolist() for _ in range(2)]
    assert drawn[0] != drawn[1]


def test_one_replica_notes_that_it_draws():
    """What nobody has drawn from is in no backup."""
    strategy = tfdist.MirroredStrategy(["CPU:0"])
    losses(strategy, NoisyStep)
    assert global_seeds.is_used(global_seeds.current())


def test_a_strategy_has_one(mirrored):
    """A step that was traced goes on drawing from it, whatever comes in between."""
    losses(mirrored, noisy_layers)
    own = global_seeds.current()
    losses(tfdist.MirroredStrategy(["CPU:0"]), noisy_layers)
    assert global_seeds.current() is not own
    state = global_seeds.current().state.numpy()
    global_seeds.make(mirrored)
    assert global_seeds.current() is own
    np.testing.assert_array_equal(own.state.numpy(), state)


def test_predictions_of_replicas(mirrored):
    keras.utils.set_random_seed(3)
    with mirrored.scope():
        model = noisy_layers()
    first, second = np.split(model.predict(X, batch_size=8, verbose=0), 2)
    assert not np.isin(first, second).any()


def test_what_nobody_draws_from_changes_nothing(mirrored):
    keras.utils.set_random_seed(3)
    before = random.getstate()
    strategy = tfdist.MirroredStrategy(list(mirrored.extended.worker_devices))
    global_seeds.make(strategy)
    assert random.getstate() == before
    assert not global_seeds.is_used(global_seeds.current())
    losses(strategy, noisy_layers)
    assert global_seeds.is_used(global_seeds.current())
