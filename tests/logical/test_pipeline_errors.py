"""What a pipeline refuses: with what it received, what it expected, and what to do."""

from __future__ import annotations

from collections.abc import Callable

import keras
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.logical.pipelines import assert_trains_equally, labelled, mlp, numbers, pipeline
from tests.models import in_scope, ready

pytestmark = pytest.mark.usefixtures("four_devices")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"schedule": "1F1B"},
            "Received: schedule='1F1B'. Expected one of 'auto', 'gpipe', '1f1b', 'eager-1f1b', 'interleaved', 'zb-h1'.",
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
        (
            {"schedule": "zb-h1", "weight_gradients": "batched"},
            "Received: weight_gradients='batched' with schedule='zb-h1', which computes gradients of weights while a "
            "stage would wait, not at the end. Expected: weight_gradients='accumulate', or another schedule.",
        ),
    ],
)
def test_arguments(arguments, message):
    with pytest.raises(ValueError) as error:
        pipeline(**arguments)
    assert str(error.value) == message


class Net(keras.Model):
    """A model without a graph of layers: it does something else, too."""

    def __init__(self) -> None:
        super().__init__(name="net")
        self.first, self.second = layers.Dense(8), layers.Dense(3)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.second(tf.nn.relu(self.first(x)))


class Foreign(layers.Layer):
    """Counts its calls in a variable that TensorFlow knows, and Keras does not."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = [tf.Variable(0.0)]

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x + self.counter[0]


def dense(*names: str) -> Callable[[], keras.Model]:
    return lambda: ready(
        keras.Sequential([keras.Input((8,)), *(layers.Dense(8, name=name) for name in names)]), "sgd", "mse"
    )


def norm_called_twice() -> keras.Model:
    inputs, norm = keras.Input((8,)), layers.BatchNormalization()
    x = norm(layers.Dense(8, name="between")(norm(inputs)))
    return ready(keras.Model(inputs, layers.Dense(3)(x)), "sgd", "mse")


REFUSED = {
    "no graph": (
        lambda: ready(Net(), "sgd", "sparse_categorical_crossentropy"),
        {},
        [
            "Received: model 'net' of class Net, which has a call method of its own or no known input",
            "Expected: a Sequential model with an Input, or a functional one, `keras.Model(inputs, outputs)`",
            "or have a call that does nothing but call layers and keras.ops, the same ones in training and inference.",
        ],
    ),
    "too many cuts": (
        dense("first", "second", "third"),
        {"cuts": ["first", "second"]},
        ["Received: 2 cuts, which make 3 pieces. Expected: 1 cuts, for 2 devices"],
    ),
    "a cut behind all layers": (
        dense("first", "second", "third"),
        {"cuts": ["third"]},
        ["'third' at position 0 of cuts=['third'], which leaves no layer"],
    ),
    "a cut between the calls of a layer with state": (
        norm_called_twice,
        {"cuts": ["between"]},
        [
            "between two calls of a layer that has a state (statistics, or seeds).",
            "Its calls have to be on one stage. Expected: a cut elsewhere.",
        ],
    ),
    "a variable that Keras does not know": (
        mlp(Foreign),
        {},
        [
            "Received: a layer that reads a TensorFlow variable or a lookup table which is not one of its own ",
            "a variable would not be trained. Expected: variables made by `self.add_weight(...)`",
        ],
    ),
}


def assert_refused(build: Callable[[], keras.Model], options: dict, words: list[str]) -> None:
    model = in_scope(pipeline(**options), build)
    with pytest.raises(ValueError) as error:
        model.fit(*labelled(16), batch_size=16, verbose=0)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("name", REFUSED)
def test_models(name):
    assert_refused(*REFUSED[name])


class Adding(layers.Dense):
    """Adds what was set from outside."""

    added = 0.0

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return super().call(x) + self.added


class Conditioned(keras.Model):
    def __init__(self, inputs: tf.Tensor, outputs: tf.Tensor) -> None:
        super().__init__(inputs, outputs)
        self.beside = layers.Dense(3)
        self.beside.build((None, 8))

    def train_step(self, data: tuple) -> dict:
        with tf.GradientTape() as tape:
            self.get_layer("adding").added = self.beside(data[0])
            loss = tf.reduce_mean(self(data[0], training=True) ** 2)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


def test_a_tensor_that_is_not_passed():
    """Its gradient would be lost: `beside` would not be trained."""

    def conditioned() -> keras.Model:
        inputs = keras.Input((8,))
        return ready(Conditioned(inputs, Adding(3, name="adding")(layers.Dense(8)(inputs))), "sgd")

    with pytest.raises(ValueError, match=r"a layer that reads a tensor that it was not passed \(.*\), among adding\."):
        in_scope(pipeline(num_microbatches=1), conditioned).fit(*labelled(16), verbose=0)


def of_any_length() -> keras.Model:
    """Takes any length but 128, which is what costs are counted with."""

    def halved(x: tf.Tensor) -> tf.Tensor:
        if x.shape[1] == 128:
            raise TypeError("too long")
        return 0.5 * x

    parts = [layers.Dense(4, "tanh", name="first"), layers.Lambda(halved, (None, 4)), layers.Dense(1)]
    return ready(keras.Sequential([keras.Input((None, 4)), *parts]), keras.optimizers.SGD(0.1), "mse")


def test_a_model_of_unknown_sizes_is_cut_by_hand():
    data = numbers(16, 6, 4), numbers(16, 6, 1, seed=2)
    message = r"dimensions that the model leaves open.*or say where to cut with cuts=\[\.\.\.\] of a PipelineStrategy"
    with pytest.raises(ValueError, match=message):
        in_scope(pipeline(), of_any_length).fit(*data, verbose=0)
    strategy = pipeline(cuts=["first"])
    assert_trains_equally(of_any_length, data, strategy, whole=False)
    assert "Predicted speed-up: unknown (at most 2)" in strategy.summary()
    with pytest.raises(ValueError, match=r"with blocks=\[\.\.\.\] otherwise"):
        tfdist.memory.apply(of_any_length(), "recompute")
    tfdist.memory.apply(of_any_length(), tfdist.memory.MemoryPolicy("recompute", ["first"]))


@pytest.mark.parametrize("where", ["outside of strategy.scope()", "in the scope of another PipelineStrategy"])
def test_optimizer_of_another_scope(where):
    with tf.distribute.get_strategy().scope() if where.startswith("outside") else pipeline().scope():
        optimizer = keras.optimizers.Adam(name="stray")
    message = f"Received: optimizer 'stray', created {where}. Its variables would not follow the"
    assert_refused(mlp(optimizer=lambda: optimizer), {}, [message])
