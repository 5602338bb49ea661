"""Steps and optimizers that tfdist would not know are refused, and say so."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.features.table import rows
from tfdist.testing import assert_transparent


def test_a_step_that_is_no_method(mirrored):
    with mirrored.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.train_step = lambda data: {"loss": 0.0}
    with pytest.raises(
        ValueError, match=r"whose train_step is .*, not a method of its class.*Expected: a plain method"
    ):
        model.fit(*rows(16), verbose=0)


def test_an_optimizer_that_is_no_attribute_of_the_model(mirrored):
    elsewhere = []

    class Net(keras.Sequential):
        def train_step(self, data: tuple) -> dict:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self(data[0], training=True))
            elsewhere[0].apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    with mirrored.scope():
        model = Net([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        elsewhere.append(keras.optimizers.SGD())
        elsewhere[0].build(model.trainable_variables)
    with pytest.raises(RuntimeError, match=r"which is not an attribute of the model.*Expected: `self.my_optimizer = "):
        model.fit(*rows(16), verbose=0)


@pytest.mark.exhaustive
def test_a_layer_that_mixes_the_trainer_in(mirrored):
    """As Keras' own tests have it: a layer, not a `keras.Model`, that can fit."""
    trainer = next(parent for parent in keras.Model.__mro__ if "train_step" in vars(parent))

    class Trained(trainer, keras.layers.Dense):
        def __init__(self) -> None:
            keras.layers.Dense.__init__(self, 1, kernel_initializer="ones")
            trainer.__init__(self)

    def trained() -> Trained:
        model = Trained()
        model.compile("sgd", "mse", metrics=["mae"])
        return model

    assert_transparent(mirrored, trained, rows(18), batch_size=4)


class Looping(keras.layers.Layer):
    """BatchNormalization of each time step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.normalize = kind, keras.layers.BatchNormalization()

    def build(self, shape: tuple) -> None:
        self.normalize.build((shape[0], shape[2]))

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        def once(step: tf.Tensor) -> tf.Tensor:
            return self.normalize(step, training=training)

        if self.kind == "loop":
            return tf.transpose(tf.map_fn(once, tf.transpose(x, [1, 0, 2])), [1, 0, 2])
        steps = tf.unstack(x, axis=1)
        if self.kind == "branch":
            return tf.stack([tf.cond(tf.reduce_sum(x) > -1e9, lambda s=s: once(s), lambda s=s: s) for s in steps], 1)
        return tf.stack([tf.function(once)(step) for step in steps], 1)

    def compute_output_shape(self, shape: tuple) -> tuple:
        return shape


class Cell(keras.layers.Layer):
    state_size = output_size = 4

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.normalize = keras.layers.Dense(4), keras.layers.BatchNormalization()

    def build(self, shape: tuple) -> None:
        self.dense.build(shape)
        self.normalize.build((shape[0], 4))

    def call(self, x: tf.Tensor, states: list, training: bool = False) -> tuple:
        state = self.normalize(self.dense(x), training=training) + states[0]
        return state, [state]


def normalizing(kind: str, **compile_arguments: object) -> keras.Model:
    """A model of sequences whose BatchNormalization is somewhere."""
    if kind in ("cell", "unrolled"):
        layer = keras.layers.RNN(Cell(), return_sequences=True, unroll=kind == "unrolled")
    else:
        layer = Looping(kind)
    model = keras.Sequential([keras.Input((3, 4)), layer, keras.layers.Dense(1)])
    model.compile("sgd", "mse", **compile_arguments)
    return model


def sequences() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).random((22, 3, 4), "float32")
    return x, x.sum(2, keepdims=True)


@pytest.mark.parametrize(
    "kind", ["loop", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("branch", "cell"))]
)
def test_statistics_of_the_global_batch_in_a_loop(mirrored, kind):
    with mirrored.scope():
        model = normalizing(kind)
    expected = r"Received: layer '.*' \(BatchNormalization\) in a loop or a branch(.|\n)*batch_norm='local'"
    with pytest.raises(NotImplementedError, match=expected):
        model.fit(*sequences(), batch_size=8, verbose=0)


@pytest.mark.parametrize("kind", ["loop", pytest.param("cell", marks=pytest.mark.exhaustive)])
def test_own_statistics_in_a_loop(mirrored, kind):
    strategy = tfdist.MirroredStrategy(list(mirrored.extended.worker_devices), batch_norm="local")
    with strategy.scope():
        model = normalizing(kind)
    model.fit(*sequences(), batch_size=8, verbose=0)
    for variable in model.non_trainable_variables:
        np.testing.assert_array_equal(*(part.numpy() for part in variable.value.values))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["unrolled", "function"])
def test_statistics_of_the_global_batch_without_a_loop(mirrored, kind):
    assert_transparent(mirrored, lambda: normalizing(kind, steps_per_execution=2), sequences(), batch_size=8)
