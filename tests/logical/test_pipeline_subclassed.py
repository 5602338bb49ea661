"""Models with a `call` of their own: cut where that calls layers in a fixed order, refused where it does more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.logical.pipelines import assert_same, assert_trains_equally, both, numbers, pipeline
from tests.models import assert_arrays, ready
from tests.tiers import daily

pytestmark = pytest.mark.usefixtures("four_devices")

REGRESSION = numbers(37, 8), numbers(37, 3, seed=2)


class Net(keras.Model):
    """A residual network, with further layers in its middle."""

    def __init__(self, *middle: keras.Layer) -> None:
        super().__init__(name="net")
        self.first, self.second, self.last = layers.Dense(8, "tanh"), layers.Dense(8, "tanh"), layers.Dense(3)
        self.middle = list(middle)

    def call(self, x: Any) -> Any:
        hidden = self.first(x)
        for layer in self.middle:
            hidden = layer(hidden)
        return self.last(ops.relu(self.second(hidden) + 0.5 * hidden))


class Asking(Net):
    """Hands on whether it trains."""

    def call(self, x: Any, training: bool = False) -> Any:
        hidden = self.first(x)
        for layer in self.middle:
            hidden = layer(hidden, training=training)
        return self.last(self.second(hidden))


class Stepping(Net):
    """Has a step of its own, in which `call` is not given `training`."""

    def train_step(self, data: tuple) -> dict:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(data[0], training=True) - data[1]) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


class Named(keras.Model):
    """Takes and returns dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.both = layers.Dense(8), layers.Dense(8), layers.Dense(3)

    def call(self, inputs: dict) -> dict:
        joined = ops.concatenate([self.left(inputs["a"]), ops.tanh(self.right(inputs["b"]))], axis=-1)
        return {"sum": self.both(joined), "joined": joined}


def sgd(make: Callable[[], keras.Model], loss: Any = "mse") -> Callable[[], keras.Model]:
    return lambda: ready(make(), keras.optimizers.SGD(0.1, momentum=0.9), loss)


@pytest.mark.parametrize("memory", [None, pytest.param("recompute", marks=pytest.mark.nightly)])
def test_equals_one_process(memory):
    strategy = pipeline(memory=memory)
    assert_trains_equally(sgd(Net), REGRESSION, strategy)
    assert all(f"/device:CPU:{stage}" in strategy.summary() for stage in range(2))


@pytest.mark.nightly
def test_layers_with_a_state():
    def build() -> keras.Model:
        model = Asking(layers.Dropout(0.3), layers.BatchNormalization())
        model(REGRESSION[0][:1])
        return ready(model, "sgd", "mse")

    assert_trains_equally(build, REGRESSION, stateful=True, whole=False)


@pytest.mark.parametrize("kind", daily([Net, Asking, Stepping], str(Net)))
def test_dropout_where_it_is_called(kind):
    """With one micro-batch, a pipeline draws what one process draws: nothing where `call` takes no `training`."""
    assert_trains_equally(sgd(lambda: kind(layers.Dropout(0.5))), REGRESSION, pipeline(2, 1))


@pytest.mark.nightly
def test_dictionaries():
    x = {"a": numbers(37, 8), "b": numbers(37, 4, seed=3)}
    y = {"sum": numbers(37, 3, seed=2), "joined": numbers(37, 16, seed=4)}

    def train(model: keras.Model) -> list:
        history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
        return [history["loss"], model.predict(x, verbose=0)]

    assert_same(*both(train, sgd(Named, {"sum": "mse", "joined": "mae"})))


class Recurrent(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.steps, self.after = layers.Dense(8), layers.GRU(8), layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.after(self.steps(self.before(x)))


@pytest.mark.nightly
def test_other_lengths():
    def train(model: keras.Model) -> list:
        model.fit(numbers(16, 6, 4), REGRESSION[1][:16], epochs=2, shuffle=False, verbose=0)
        model.fit(numbers(16, 4, 4), REGRESSION[1][:16], epochs=2, shuffle=False, verbose=0)
        return [model.predict(numbers(8, length, 4), verbose=0) for length in (6, 4)]

    assert_same(*both(train, sgd(Recurrent)))


class Reading(keras.Model):
    """Hands on masks."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.steps = layers.Embedding(9, 8, mask_zero=True), layers.GRU(8, return_sequences=True)
        self.last = layers.GRU(8)
        self.after = layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.after(self.last(self.steps(self.table(x))))


@pytest.mark.nightly
def test_masks():
    ids = np.random.RandomState(0).randint(1, 9, (37, 6))
    ids[:, 4:] = 0
    assert_trains_equally(sgd(Reading), (ids, REGRESSION[1]))


def test_a_first_predict_builds_it():
    assert_same(*both(lambda model: model.predict(REGRESSION[0], verbose=0), sgd(Net)))


class Factored(Net):
    factor = 1.0

    def call(self, x: Any) -> Any:
        return self.factor * self.last(self.second(self.first(x)))


def test_an_attribute_that_changes_between_fits():
    """It counts when a step is traced, as in one process."""

    def train(model: keras.Model) -> list:
        seen = [model.fit(*REGRESSION, batch_size=16, shuffle=False, verbose=0).history["loss"]]
        model.factor = 3.0
        seen.append(model.predict(REGRESSION[0], verbose=0))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return [*seen, model.fit(*REGRESSION, batch_size=16, shuffle=False, verbose=0).history["loss"]]

    assert_same(*both(train, sgd(Factored)))


class Branching(Net):
    def call(self, x: Any, training: bool = False) -> Any:
        hidden = self.first(x)
        return self.last(self.second(hidden) if training else hidden)


class Frozen(Net):
    def call(self, x: Any) -> Any:
        return self.last(self.middle[0](self.first(x), training=False))


class Scaled(Net):
    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(3,), initializer="ones")

    def call(self, x: Any) -> Any:
        return self.scale * self.last(self.first(x))


class Counted(Net):
    def build(self, shape: Any) -> None:
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        self.count.assign_add(1.0)
        return self.last(self.first(x))


class CountedByTensorFlow(Net):
    def __init__(self) -> None:
        super().__init__()
        self.count = tf.Variable(0.0, trainable=False)

    def call(self, x: Any) -> Any:
        self.count.assign_add(1.0)
        return self.last(self.first(x))


class Keeping(Net):
    def call(self, x: Any) -> Any:
        self.hidden = self.first(x)
        return self.last(self.hidden)


class Noisy(Net):
    def call(self, x: Any) -> Any:
        return self.last(self.first(x + tf.random.normal((8,))))


class NoisyByKeras(Net):
    def call(self, x: Any) -> Any:
        return self.last(self.first(x + keras.random.normal((8,))))


class Positions(Net):
    """Calls a layer with what is not given: its weights would not be trained."""

    def call(self, x: Any) -> Any:
        return self.last(self.first(x) + self.second(ops.ones((1, 8))))


class Penalizing(Net):
    def call(self, x: Any) -> Any:
        hidden = self.first(x)
        self.add_loss(ops.mean(hidden))
        return self.last(hidden)


@pytest.mark.parametrize(
    "kind",
    [Branching, Scaled, Counted, CountedByTensorFlow, Keeping, Noisy, NoisyByKeras, Positions, Penalizing],
)
def test_a_call_that_does_more_is_refused(kind):
    assert_is_refused(sgd(kind))


def test_a_layer_that_never_trains_is_refused():
    assert_is_refused(sgd(lambda: Frozen(layers.BatchNormalization())))


def assert_is_refused(build: Callable[[], keras.Model]) -> None:
    strategy = pipeline()
    with strategy.scope():
        model = build()
        model(REGRESSION[0][:1], training=True)
    before = [*model.get_weights(), *([float(model.count)] if hasattr(model, "count") else [])]
    with pytest.raises(ValueError, match="which has a call method of its own or no known input shape"):
        model.fit(*REGRESSION, verbose=0)
    assert_arrays(before, [*model.get_weights(), *([float(model.count)] if hasattr(model, "count") else [])])


@pytest.mark.nightly
def test_alone_it_is_called_as_it_is():
    """Outside of steps, the model's own `call` runs."""

    def train(model: keras.Model) -> list:
        model.fit(*REGRESSION, batch_size=16, shuffle=False, verbose=0)
        return [model(REGRESSION[0][:2]), model(REGRESSION[0][:2], training=False)]

    assert_same(*both(train, sgd(Asking)))
