"""Models of all kinds, cut into stages: layers with masks, states and losses, and training steps of the user's own."""

from __future__ import annotations

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdist
from tests.logical.pipelines import assert_same, assert_trains_equally, numbers, pipeline
from tests.models import ready
from tfdist.layer_graph.graph import functional_of
from tfdist.strategies.pipeline.step import MASKED, why_not_decomposable

pytestmark = pytest.mark.usefixtures("four_devices")

X, Y = numbers(37, 8), numbers(37, 3, seed=2)


def transformer() -> keras.Model:
    """With SGD: the gradient of a key's bias is zero, and Adam would make steps of its rounding errors."""
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(20, 8)(inputs)
    for _ in range(2):
        attended = layers.MultiHeadAttention(2, 4)(layers.LayerNormalization()(x), x, use_causal_mask=True)
        x = layers.Add()([x, attended])
        hidden = layers.Dense(16, "gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(8)(hidden)])
    return ready(
        keras.Model(inputs, layers.Dense(20)(x)),
        keras.optimizers.SGD(0.02),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )


def recurrent() -> keras.Model:
    """Masked steps do not count in the loss: how many there are only the whole batch knows."""
    inputs = keras.Input((6,), dtype="int32")
    x = layers.SimpleRNN(8, return_sequences=True)(layers.Embedding(20, 8, mask_zero=True)(inputs))
    return ready(
        keras.Model(inputs, layers.Dense(3, "softmax")(layers.Dense(8, "tanh")(x))),
        keras.optimizers.Adam(0.01),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )


def tokens() -> np.ndarray:
    """Sentences of one to six words, padded with zeros."""
    words = np.random.RandomState(3).randint(1, 20, (37, 6))
    return np.where(np.arange(6) <= np.arange(37)[:, None] % 6, words, 0)


class Penalty(layers.Layer):
    """Adds a loss of its own, a mean over the rows."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


class Pairwise(keras.Model):
    """A loss that compares all rows of a batch with each other."""

    def train_step(self, data: tuple) -> dict:
        x, y = data
        with tf.GradientTape() as tape:
            made = self(x, training=True)
            gaps = tf.reduce_sum((made[:, None] - made[None]) ** 2, -1)
            wanted = tf.reduce_sum((y[:, None] - y[None]) ** 2, -1)
            loss = tf.reduce_mean(tf.sqrt(tf.abs(gaps - wanted) + 1e-3))
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
        )
        return {"pairs": loss}


def pairwise() -> keras.Model:
    inputs = keras.Input((8,))
    x = layers.Dense(8, "tanh")(layers.Dense(16, "relu", kernel_regularizer="l2")(inputs))
    return ready(Pairwise(inputs, layers.Dense(3, use_bias=False)(x)), keras.optimizers.Adam(0.01), "mse")


class Augmented(layers.Layer):
    """Trains unless it is asked not to, as Keras' layers of augmentation do."""

    def call(self, x: tf.Tensor, training: bool = True) -> tf.Tensor:
        return 2.0 * x if training else x


class Told(layers.Layer):
    """Trains if it is asked to, or the layer before it trains."""

    def call(self, x: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        return 3.0 * x if training else x


class Untold(keras.Model):
    """Calls itself without a word about training."""

    def train_step(self, data: tuple) -> dict:
        with tf.GradientTape() as tape:
            loss = self.compute_loss(*data, self(data[0]))
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


def untold() -> keras.Model:
    """In the stages after `Augmented`, layers train as well."""
    inputs = keras.Input((8,))
    x = Augmented()(Told()(layers.Dense(8, "tanh")(inputs)))
    x = Told()(layers.Dense(8, "tanh")(x))
    return ready(Untold(inputs, layers.Dense(3)(layers.Dense(8, "tanh")(x))), keras.optimizers.SGD(0.02), "mse")


def monte_carlo() -> keras.Model:
    """Drops out whenever it is called: other masks in every step."""
    inputs = keras.Input((8,))
    x = layers.Dropout(0.5, seed=3)(layers.Dense(16, "relu")(inputs), training=True)
    return ready(Untold(inputs, layers.Dense(3)(layers.Dense(8, "tanh")(x))), keras.optimizers.SGD(0.02), "mse")


class Gan(keras.Model):
    """Generator and discriminator, each with an optimizer, trained in turn. Calling it runs both."""

    def __init__(self) -> None:
        noise, picture = keras.Input((4,)), keras.Input((8,))
        generator = keras.Model(noise, layers.Dense(8)(layers.Dense(16, "relu")(noise)))
        discriminator = keras.Model(picture, layers.Dense(1)(layers.Dense(16, "relu")(picture)))
        super().__init__(noise, discriminator(generator(noise)))
        self.generator, self.discriminator = generator, discriminator
        self.second_optimizer = keras.optimizers.Adam(0.02)

    def train_step(self, pictures: tf.Tensor) -> dict:
        noise = pictures[:, :4]
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        with tf.GradientTape() as tape:
            real, made = self.discriminator(pictures, training=True), self(noise, training=True)
            first = loss(tf.ones_like(real), real) + loss(tf.zeros_like(made), made)
        variables = self.discriminator.trainable_variables
        self.second_optimizer.apply_gradients(zip(tape.gradient(first, variables), variables, strict=True))
        with tf.GradientTape() as tape:
            second = loss(tf.ones_like(made), self(noise, training=True))
        variables = self.generator.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(second, variables), variables, strict=True))
        return {"discriminator": first, "generator": second}

    def test_step(self, pictures: tf.Tensor) -> dict:
        return {"mean": tf.reduce_mean(self(pictures[:, :4], training=False))}

    def predict_step(self, pictures: tf.Tensor) -> tf.Tensor:
        return self(pictures[:, :4], training=False)


def gan() -> keras.Model:
    return ready(Gan(), keras.optimizers.Adam(0.01))


def regression(loss: object) -> keras.Model:
    dense = [layers.Dense(16, "relu"), layers.Dense(8, "tanh"), layers.Dense(3)]
    return ready(keras.Sequential([keras.Input((8,)), *dense]), keras.optimizers.Adam(0.01), loss, metrics=["mae"])


def one_of_the_users_own() -> keras.Model:
    """A loss that is no mean over rows: the standard deviation over the batch comes in."""
    return regression(lambda y, p: tf.reduce_mean((y - p) ** 2) + tf.math.reduce_std(p))


def with_compute_loss() -> keras.Model:
    model = regression("mse")
    model.compute_loss = lambda **_: 0.0
    return model


def ignoring(loss: object = None) -> keras.Model:
    """A loss that leaves out labels: how many others there are only the whole batch knows."""
    loss = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    dense = [layers.Dense(16, "relu"), layers.Dense(8, "tanh"), layers.Dense(3)]
    return ready(keras.Sequential([keras.Input((8,)), *dense]), keras.optimizers.SGD(0.1), loss)


def ignoring_by_a_function() -> keras.Model:
    def loss(y: tf.Tensor, p: tf.Tensor) -> tf.Tensor:
        return keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True, ignore_class=0)

    return ignoring(loss)


# Rows to leave out are not even over micro-batches: all of the first one.
LABELS = np.where(np.arange(37) % 16 < 6, 0, 1 + np.arange(37) % 2)


def summed() -> keras.Model:
    return regression(keras.losses.MeanSquaredError(reduction="sum"))


def of_all_kinds() -> keras.Model:
    """Layers that are shared, nested, frozen, convolutional, regularized; operations, slices, and a loss of a layer."""
    layer, frozen = layers.Dense(8, "tanh"), layers.BatchNormalization(trainable=False)
    regularizers = {"kernel_regularizer": "l1l2", "bias_regularizer": "l2", "activity_regularizer": "l1"}
    inner = keras.Sequential([keras.Input((8,)), layers.Dense(8, "relu", **regularizers), layers.Dense(8, "tanh")])
    inputs = keras.Input((8,))
    x = ops.tanh(layer(inputs) * 2.0 + inputs)
    x = inner(Penalty()(frozen(inner(x))))
    x = ops.concatenate([x[:, :4], ops.square(layer(x)[:, 4:])], axis=-1)
    x = layers.Flatten()(layers.Conv1D(4, 3, padding="same")(layers.Reshape((4, 2))(x)))
    return ready(
        keras.Model(inputs, [layers.Dense(3)(layer(layers.Dense(8)(x))), inputs]),
        keras.optimizers.Adam(0.01),
        ["mse", None],
        metrics=[["mae"], None],
    )


CASES = {
    "layers of all kinds": (of_all_kinds, (X, [Y]), {"stages": 3, "num_microbatches": 3}),
    "GAN, 3 stages": (gan, (X,), {"stages": 3}),
    "recurrent, with masks, recomputed": (recurrent, (tokens(), tokens() % 3), {"stages": 3, "memory": "recompute"}),
    "transformer, 3 stages": (transformer, (tokens(), tokens()), {"stages": 3}),
    "pairwise loss, recomputed, batched": (
        pairwise,
        (X, Y),
        {"stages": 3, "memory": "recompute", "weight_gradients": "batched"},
    ),
}


# Daily are layers and losses of other tests of pipelines.
@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name):
    build, data, options = CASES[name]
    assert_trains_equally(build, data, pipeline(**options))


@pytest.mark.parametrize(
    ("build", "options"),
    [
        pytest.param(untold, {"stages": 4}, id="by default"),
        # One micro-batch draws what one process draws.
        pytest.param(monte_carlo, {"num_microbatches": 1}, id="where the layer is called"),
    ],
)
def test_layers_that_train_without_being_asked(build, options):
    assert_trains_equally(build, (X, Y), pipeline(**options), whole=False)


def test_interleaved_as_gpipe():
    """Where the loss needs the whole batch, the device still has two chunks."""
    assert_trains_equally(pairwise, (X, Y), pipeline(1, schedule="interleaved"), whole=False)


@pytest.mark.parametrize("build", [ignoring, pytest.param(ignoring_by_a_function, marks=pytest.mark.nightly)])
def test_labels_that_are_ignored(build):
    assert_trains_equally(build, (X, LABELS), whole=False)


def test_losses_of_keras_that_mask_their_values_are_known():
    """They are divided by how many values are left: that with `ignore_class`, and `circle`, which mixes rows."""
    source = inspect.getsource(inspect.getmodule(keras.losses.MeanSquaredError))
    assert source.count("set_keras_mask(") == 2


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        *((build, None) for build in (transformer, of_all_kinds)),
        (recurrent, MASKED),
        (one_of_the_users_own, "the loss '<lambda>' may look at several rows at once"),
        (summed, "the loss 'mean_squared_error' has reduction='sum'"),
        (
            ignoring,
            "the loss 'sparse_categorical_crossentropy' has ignore_class=0, and is divided by the number of all other "
            "labels",
        ),
        (ignoring_by_a_function, "the loss 'loss' may look at several rows at once"),
        (with_compute_loss, "the model has a compute_loss of its own"),
        (pairwise, "the model has a train_step of its own"),
        (gan, "the model has a train_step of its own"),
    ],
)
def test_why_a_loss_needs_the_whole_batch(build, reason):
    model = build()
    assert why_not_decomposable(model, functional_of(model)) == reason


@pytest.mark.nightly
def test_layers_in_scopes(float64):
    """Stages by `tfdist.stage`: an order of calls that is not Keras' own."""

    def build() -> keras.Model:
        inputs = keras.Input((8,))
        with tfdist.stage(0):
            left = layers.Dense(8, "relu", name="left")(inputs)
        with tfdist.stage(1):
            right = layers.Dense(8, "tanh", name="right")(inputs)
            outputs = layers.Dense(3, name="outputs")(layers.Add()([left, right]))
        return ready(keras.Model(inputs, outputs), "adam", "mse")

    assert_trains_equally(build, (X, Y), tolerance=1e-6, whole=False)


@pytest.fixture
def float64():
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_dtype_policy("float32")


class Noise(layers.Layer):
    """Draws in inference, too."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x + keras.random.normal(tf.shape(x), seed=self.seeds)


class Measured(layers.Dense):
    """Has metrics of its own: of values, and of one number for each batch."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.size, self.mean = (keras.metrics.Mean(name=f"{name}_of_{self.name}") for name in ("size", "mean"))

    def call(self, x: tf.Tensor) -> tf.Tensor:
        y = super().call(x)
        self.size.update_state(ops.abs(y))
        self.mean.update_state(ops.mean(y))
        return y


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_layers_with_metrics(replicas, recwarn):
    def build() -> keras.Model:
        first, second = (Measured(8, "tanh", name=name) for name in ("first", "second"))
        inputs = keras.Input((8,))
        # Both calls of a layer that has metrics are on one stage.
        outputs = layers.Dense(3)(layers.Dense(8)(first(second(first(inputs)))))
        return ready(keras.Model(inputs, outputs), keras.optimizers.SGD(0.1), "mse")

    strategy = tfdist.PipelineStrategy([f"CPU:{i}" for i in range(2 * replicas)], num_microbatches=3, replicas=replicas)
    assert_trains_equally(build, (X, Y), strategy, validation_data=(X[:11], Y[:11]))
    assert not [one for one in recwarn if "assigns when it is called" in str(one.message)]


class Sampled(keras.Model):
    """A loss of some of the rows, each of them several times."""

    def train_step(self, data: tuple) -> dict:
        x, y = data
        with tf.GradientTape() as tape:
            made, rows = self(x, training=True), tf.range(tf.shape(y)[0]) // 3
            loss = tf.reduce_mean((tf.gather(made, rows) - tf.gather(y, rows)) ** 2)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


def sampled() -> keras.Model:
    inputs = keras.Input((8,))
    outputs = layers.Dense(3)(layers.Dense(8, "tanh")(inputs))
    return ready(Sampled(inputs, outputs), keras.optimizers.SGD(0.1))


def test_losses_that_gather_rows():
    assert_trains_equally(sampled, (X, Y), whole=False)


class Reversed(layers.Layer):
    """Takes the rows in another order: TensorFlow has slices for the gradient."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return tf.gather(x, tf.range(tf.shape(x)[0])[::-1])


def test_gradients_of_activations_in_slices():
    def build() -> keras.Model:
        parts = [layers.Dense(8, "tanh", name="first"), Reversed(), layers.Dense(8, "tanh"), layers.Dense(3)]
        return ready(keras.Sequential([keras.Input((8,)), *parts]), keras.optimizers.SGD(0.1), "mse")

    assert_trains_equally(build, (X, Y), pipeline(num_microbatches=1, cuts=["first"]), whole=False)


def test_layers_that_draw_in_inference():
    def build() -> keras.Model:
        return ready(keras.Sequential([keras.Input((8,)), layers.Dense(8), Noise(), layers.Dense(3)]), "sgd", "mse")

    def use(strategy: tf.distribute.Strategy) -> list:
        with strategy.scope():
            keras.utils.set_random_seed(7)
            model = build()
        return [model.predict(numbers(16, 8), batch_size=8, verbose=0) for _ in range(2)]

    assert_same(use(tf.distribute.get_strategy()), use(pipeline(2, 1)))
