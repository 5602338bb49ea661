"""What a pipeline refuses: with what it received, what it expected, and what to do."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.logical.pipelines import labelled, mlp, pipeline

pytestmark = pytest.mark.usefixtures("four_devices")


def refusal(build: object, strategy: tfdist.PipelineStrategy | None = None, rows: int = 16, **arguments: int) -> str:
    """The message with which `fit` is refused."""
    with (strategy or pipeline()).scope():
        model = build()
    with pytest.raises(ValueError) as error:
        model.fit(*labelled(rows), **{"batch_size": 16, "verbose": 0, **arguments})
    return str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"schedule": "1F1B"},
            "Received: schedule='1F1B'. Expected one of 'auto', 'gpipe', '1f1b', 'eager-1f1b', 'interleaved'.",
        ),
        ({"balance": "speed"}, "Received: balance='speed'. Expected one of 'flops', 'memory', 'time'."),
        (
            {"weight_gradients": "sum"},
            "Received: weight_gradients='sum'. Expected one of 'accumulate', 'batched'.",
        ),
        ({"num_microbatches": 0}, "Received: num_microbatches=0. Expected: a whole number, at least 1."),
        ({"num_microbatches": 2.5}, "Received: num_microbatches=2.5. Expected: a whole number, at least 1."),
        (
            {"chunks_per_device": 2},
            "Received: chunks_per_device=2 with schedule='auto'. Expected: schedule='interleaved', the only one that "
            "gives a device several chunks of the model.",
        ),
    ],
)
def test_arguments(arguments, message):
    with pytest.raises(ValueError) as error:
        pipeline(**arguments)
    assert str(error.value) == message


@pytest.mark.parametrize("device", ["CPU:9", "GPU:7", "/job:worker/task:3/CPU:0", "nothing"])
def test_unknown_device(device):
    with pytest.raises(ValueError) as error:
        tfdist.PipelineStrategy(["CPU:0", device])
    message = str(error.value)
    assert message.startswith(f"Received: device '{device}'. Expected: one of /device:CPU:0, /device:CPU:1, ")
    assert message.endswith(
        "For more CPU devices in one process call tf.config.set_logical_device_configuration before anything else; for "
        "workers' devices start the program with `tfdist run --stages N`."
    )


def test_fewer_layers_than_stages():
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((8,)), layers.Dense(4), layers.Dense(3)])
        model.compile("sgd", "mse")
        return model

    message = refusal(build, pipeline(4))
    assert message.startswith("The model has too few layers to cut. Received: 2 layers, 4 stages.")
    assert "at most 2 stages" in message and "Use fewer devices" in message


@pytest.mark.parametrize(
    ("method", "received"), [("fit", "batches of 2 rows"), ("train_on_batch", "a batch of 2 rows")]
)
def test_batch_smaller_than_the_number_of_micro_batches(method, received):
    with pipeline().scope():
        model = mlp()()
    before = model.get_weights()
    x, y = labelled(8)
    with pytest.raises(ValueError) as error:
        model.train_on_batch(x[:2], y[:2]) if method == "train_on_batch" else model.fit(x, y, batch_size=2, verbose=0)
    assert str(error.value) == (
        f"Received: {received}, for 4 micro-batches. Expected: at least one row a micro-batch. Use a larger batch "
        "size, or PipelineStrategy(num_microbatches=...) with a smaller number."
    )
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


class Net(keras.Model):
    """A model without a graph of layers."""

    def __init__(self) -> None:
        super().__init__(name="net")
        self.first, self.second = layers.Dense(8), layers.Dense(3)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.second(self.first(x))


def test_model_without_a_graph():
    def build() -> keras.Model:
        model = Net()
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    message = refusal(build)
    assert message.startswith(
        "Received: model 'net' of class Net, which has a call method of its own or no known input"
    )
    assert "Expected: a Sequential model with an Input, or a functional one, `keras.Model(inputs, outputs)`" in message


@pytest.mark.parametrize(
    ("cuts", "fragments"),
    [
        (["secnd"], ["cuts names 'secnd', but the model has no such layer.", "Did you mean 'second'?"]),
        (["first", "second"], ["Received: 2 cuts, which make 3 pieces. Expected: 1 cuts, for 2 devices"]),
        (["third"], ["cuts names the layer 'third', after which no layer follows"]),
        ("first", ["cuts is the text 'first', but must be a list of names of layers: pass ['first']."]),
    ],
)
def test_cuts(cuts, fragments):
    def build() -> keras.Model:
        named = [layers.Dense(8, name="first"), layers.Dense(8, name="second"), layers.Dense(3, name="third")]
        model = keras.Sequential([keras.Input((8,)), *named])
        model.compile("sgd", "mse")
        return model

    message = refusal(build, pipeline(cuts=cuts))
    for fragment in fragments:
        assert fragment in message


def test_cut_between_the_calls_of_a_layer_with_state():
    def build() -> keras.Model:
        inputs = keras.Input((8,))
        norm = layers.BatchNormalization()
        x = norm(layers.Dense(8, name="between")(norm(inputs)))
        model = keras.Model(inputs, layers.Dense(3)(x))
        model.compile("sgd", "mse")
        return model

    message = refusal(build, pipeline(cuts=["between"]))
    assert "between two calls of a layer that has a state (statistics, or seeds)." in message
    assert message.endswith("Its calls have to be on one stage. Expected: a cut elsewhere.")


def test_scopes_and_cuts():
    def build() -> keras.Model:
        inputs = keras.Input((8,))
        with tfdist.stage(0):
            x = layers.Dense(8, name="first")(inputs)
        with tfdist.stage(1):
            x = layers.Dense(3)(x)
        model = keras.Model(inputs, x)
        model.compile("sgd", "mse")
        return model

    assert refusal(build, pipeline(cuts=["first"])) == (
        "Received: cuts=... and layers in tfdist.stage() scopes. Expected: one of the two."
    )
    assert "Received: 2 cuts" not in refusal(build, pipeline(3))
    assert refusal(build, pipeline(3)).startswith("Received: 1 cuts, which make 2 pieces. Expected: 2 cuts, for 3 dev")


@pytest.mark.parametrize("where", ["outside", "another strategy"])
def test_optimizer_of_another_scope(where):
    with tf.distribute.get_strategy().scope() if where == "outside" else pipeline().scope():
        optimizer = keras.optimizers.Adam(name="stray")
    message = refusal(mlp(optimizer=lambda: optimizer))
    assert message == (
        "Received: optimizer 'stray', created outside of this strategy's scope. Its variables would not follow the "
        "model's to the stages. Expected: an optimizer created in the scope, `with strategy.scope(): optimizer = ...`, "
        "or its name, `compile('adam', ...)`."
    )


class Foreign(layers.Layer):
    """Counts its calls in a variable that TensorFlow knows, and Keras does not."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = [tf.Variable(0.0)]

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x + self.counter[0]


class Borrowing(layers.Layer):
    """Changes a variable of another layer."""

    def __init__(self, other: layers.Layer):
        super().__init__()
        self._other = lambda: other

    def call(self, x: tf.Tensor) -> tf.Tensor:
        self._other().count.assign(self._other().count + 1.0)
        return x * 1.0


class Counter(layers.Layer):
    """Owns a variable that is not trained."""

    def build(self, _: tuple) -> None:
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x * 1.0


def test_variable_that_keras_does_not_know():
    message = refusal(mlp(Foreign))
    assert message.startswith(
        "Received: a layer that reads a TensorFlow variable or a lookup table which is not one of its own variables"
    )
    assert "a variable would not be trained. Expected: variables made by `self.add_weight(...)`" in message


def test_layer_that_changes_the_variable_of_another_stage():
    def build() -> keras.Model:
        inputs = keras.Input((8,))
        counter = Counter()
        x = layers.Dense(8, name="before")(counter(inputs))
        model = keras.Model(inputs, layers.Dense(3)(Borrowing(counter)(x)))
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    message = refusal(build, pipeline(cuts=["before"]))
    assert "in which a layer changes a variable that it does not own; that would be lost." in message
    assert "Expected: layers change their own variables only" in message
