"""`keras.random` functions without a seed, in layers and steps: other numbers on each replica, the same in each run."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.models import in_scope, ready, warned

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
