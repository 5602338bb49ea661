"""`keras.random` functions without a seed, in layers and steps: other numbers on each replica, the same in each run."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.features.reference import only_fit
from tests.features.table import rows
from tests.models import in_scope, ready, warned
from tests.tiers import daily
from tfdist.testing import assert_transparent

X = np.zeros((8, 4), "float32")


class Noise(keras.layers.Layer):
    """Adds numbers to which nobody has given a seed."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x + keras.random.normal(tf.shape(x))


def noisy_layers() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), Noise(), keras.layers.Dense(1, kernel_initializer="ones")])


def losses(strategy: tf.distribute.Strategy, build: object) -> list[float]:
    keras.utils.set_random_seed(3)
    model = in_scope(strategy, lambda: ready(build(), "sgd", "mse"))
    return model.fit(X, X[:, :1], batch_size=8, epochs=3, verbose=0).history["loss"]


@pytest.mark.nightly
def test_each_run_draws_the_same(mirrored):
    first, again = (losses(mirrored, noisy_layers) for _ in range(2))
    assert first == again
    assert len(set(first)) == 3, "each epoch draws others"
    for other in (tfdist.MirroredStrategy, tf.distribute.MirroredStrategy):
        with other(["CPU:0", "CPU:1"]).scope():
            one, two = (keras.random.normal((2,)).numpy().tolist() for _ in range(2))
        assert one != two, "in the scope of another strategy"


def test_predictions_of_replicas(mirrored):
    keras.utils.set_random_seed(3)
    model = in_scope(mirrored, noisy_layers)
    first, second = np.split(model.predict(X, batch_size=8, verbose=0), 2)
    assert not np.isin(first, second).any()


class FixedNoise(keras.layers.Layer):
    """Adds numbers from a whole number as seed."""

    def __init__(self, seed: object) -> None:
        super().__init__()
        self.seed = seed

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x + keras.random.normal(tf.shape(x), seed=self.seed)


def test_a_whole_number_as_seed_warns_once():
    strategy = tfdist.MirroredStrategy(["CPU:0", "CPU:1"])

    def build() -> keras.Model:
        return keras.Sequential([keras.Input((4,)), FixedNoise(3), keras.layers.Dense(1)])

    (said,) = warned(lambda: [losses(strategy, build) for _ in range(2)], "whole number")
    assert said.startswith("Received: seed=3, a whole number, for a function of keras.random in a step of 2 ")


class Langevin(keras.optimizers.SGD):
    """Adds noise to the gradient of each variable."""

    def __init__(self, learning_rate: float = 0.1) -> None:
        super().__init__(learning_rate)
        self.seeds = keras.random.SeedGenerator(5)

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        noise = keras.random.normal(gradient.shape, seed=self.seeds)
        super().update_step(gradient + 0.3 * noise, variable, learning_rate)


class NoiseBefore(Langevin):
    """Adds it before it updates anything."""

    update_step = keras.optimizers.SGD.update_step

    def apply(self, grads: list, trainable_variables: list | None = None) -> None:
        noisy = [one + 0.3 * keras.random.normal(one.shape, seed=self.seeds) for one in grads]
        super().apply(noisy, trainable_variables)


class NoiseOfTensorFlow(keras.optimizers.SGD):
    """Adds noise of which each replica would draw its own."""

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        super().update_step(gradient + tf.random.normal(gradient.shape), variable, learning_rate)


def small(optimizer: type, eagerly: bool = False) -> object:
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
        return ready(model, optimizer(), "mse", run_eagerly=eagerly)

    return build


@pytest.mark.parametrize("eagerly", daily([False, True], "False"))
@pytest.mark.parametrize("optimizer", [Langevin, NoiseBefore])
def test_an_optimizer_draws_the_same_on_all_replicas(mirrored, optimizer, eagerly):
    with only_fit():
        assert_transparent(mirrored, small(optimizer, eagerly), rows(21), batch_size=8)
    model = in_scope(mirrored, small(optimizer, eagerly))
    model.fit(*rows(21), batch_size=8, verbose=0)
    for weight in model.weights:
        np.testing.assert_array_equal(*(part.numpy() for part in weight.value.values))


def test_an_optimizer_that_draws_with_tf_random_is_refused(mirrored):
    model = in_scope(mirrored, small(NoiseOfTensorFlow))
    with pytest.raises(NotImplementedError, match=r"\(NoiseOfTensorFlow\), which draws random numbers with tf.random"):
        model.fit(*rows(21), batch_size=8, verbose=0)


def test_a_generator_and_initializers_do_not_warn(mirrored):
    class Lazy(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.noise = FixedNoise(keras.random.SeedGenerator(3))
            self.out = keras.layers.Dense(1, kernel_initializer=keras.initializers.RandomNormal(seed=3))

        def train_step(self, data: tuple) -> dict:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self.out(self.noise(data[0]))))
            weights = self.out.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

    assert not warned(lambda: losses(mirrored, Lazy), "whole number")
    built_by_its_step = in_scope(mirrored, lambda: keras.Sequential([keras.layers.Dense(1)]))
    assert not warned(lambda: built_by_its_step.predict(np.ones((8, 2)), verbose=0), "whole number")
