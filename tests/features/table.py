"""The feature table: what a Keras user does with a model, and that a strategy computes what one process does.

`FEATURES` maps a name (the row of docs/features.md) to a function of a strategy that raises AssertionError unless
training under it equals training in one process. Every row runs on two logical devices and on two processes, some also
on two processes with two devices each.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdist
from tests.models import ready
from tests.unit.pages import blocks_of
from tfdist.testing import assert_transparent, differences, train_and_observe

FEATURES: dict[str, Callable[[tf.distribute.Strategy], dict[str, float]]] = {}
BATCH = 16


def feature(name: str) -> Callable:
    """Adds a function to the table."""

    def add(function: Callable) -> Callable:
        FEATURES[name] = function
        return function

    return add


def rows(n: int = 96, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """`n` rows of 8 features with a binary label."""
    x = np.random.RandomState(seed).randn(n, 8).astype("float32")
    return x, (x.sum(1, keepdims=True) > 0).astype("float32")


def batches(x: object, y: object, size: int = BATCH) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(size)


def mlp(*extra: Callable[[], layers.Layer], optimizer: Callable | None = None, **compile_arguments: object) -> Callable:
    """Returns a function that builds and compiles a small classifier; `extra` makes layers in its middle."""

    def build() -> keras.Model:
        hidden = [layers.Dense(16, activation="relu"), *(make() for make in extra)]
        model = keras.Sequential([keras.Input((8,)), *hidden, layers.Dense(1, activation="sigmoid", dtype="float32")])
        arguments = {"loss": "binary_crossentropy", "metrics": ["accuracy"], **compile_arguments}
        model.compile(optimizer=optimizer() if optimizer else keras.optimizers.SGD(0.1, momentum=0.9), **arguments)
        return model

    return build


def simple(name: str, build: Callable, data: object = None, **arguments: object) -> None:
    """Adds a row that needs nothing but a model, data and arguments of `assert_transparent`."""
    if data is None or isinstance(data, tuple):
        arguments = {"batch_size": BATCH, **arguments}
    FEATURES[name] = lambda strategy: assert_transparent(strategy, build, rows() if data is None else data, **arguments)


def _many_metrics() -> list:
    metrics = keras.metrics
    return [
        "accuracy",
        metrics.AUC(name="auc"),
        metrics.Precision(name="precision"),
        metrics.F1Score(threshold=0.5, name="f1"),
        metrics.RootMeanSquaredError(name="rmse"),
    ]


# Inputs
simple("numpy arrays", mlp())
simple("tf.data, repeat and steps_per_epoch", mlp(), lambda: batches(*rows()).repeat(), steps_per_epoch=6)
simple(
    "tf.data, shuffled with a seed",
    mlp(),
    lambda: tf.data.Dataset.from_tensor_slices(rows()).shuffle(96, seed=3).batch(BATCH),
)
simple("numpy arrays, shuffled by fit", mlp(), shuffle=True)
simple("sample_weight", mlp(), (*rows(90), np.linspace(0.1, 2, 90).astype("float32")))
simple("validation dataset, uneven", mlp(), validation_data=lambda: batches(*rows(37, seed=2)))
simple("validation_split", mlp(), validation_split=0.25)

# Batches that do not divide
simple("last batch of one row (81 rows)", mlp(), rows(81))
simple("one row in all", mlp(), rows(1))


@feature("batches of 5 and of 3 rows, plain SGD")
def _uneven_sgd(strategy: tf.distribute.Strategy) -> dict[str, float]:
    # Adam would not see a wrong factor of the gradient.
    build = mlp(optimizer=lambda: keras.optimizers.SGD(0.1))
    return assert_transparent(strategy, build, lambda: batches(*rows(21), 8).concatenate(batches(*rows(19), 8)))


@feature("float64, uneven")
def _float64(strategy: tf.distribute.Strategy) -> dict[str, float]:
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        return assert_transparent(
            strategy,
            lambda: ready(
                keras.Sequential([keras.Input((8,)), layers.Dense(16, "tanh"), layers.Dense(1)]),
                keras.optimizers.SGD(0.1, momentum=0.9),
                "mse",
                metrics=["mae"],
            ),
            rows(83),
            batch_size=BATCH,
            tolerance=1e-13,
        )
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


# Model and loss
simple("metrics of all kinds", lambda: mlp(metrics=_many_metrics())(), rows(90), validation_data=rows(48, seed=2))
simple("BatchNormalization", mlp(layers.BatchNormalization), rows(90))
simple("BatchNormalization(synchronized=True)", mlp(lambda: layers.BatchNormalization(synchronized=True)), rows(81))
simple(
    "L2 regularisation and constraints",
    mlp(lambda: layers.Dense(8, "relu", kernel_regularizer="l2", kernel_constraint="max_norm")),
    rows(81),
)
simple(
    "loss reduced by sum",
    lambda: mlp(loss=keras.losses.BinaryCrossentropy(reduction="sum"), optimizer=lambda: keras.optimizers.SGD(0.005))(),
    rows(81),
)
simple(
    "loss reduced by mean_with_sample_weight",
    lambda: mlp(loss=keras.losses.BinaryCrossentropy(reduction="mean_with_sample_weight"))(),
    (*rows(81), np.linspace(0.1, 2, 81).astype("float32")),
)

# Optimizer
simple("Adam", mlp(optimizer=lambda: keras.optimizers.Adam(0.01)))
simple("clipnorm", mlp(optimizer=lambda: keras.optimizers.SGD(0.1, clipnorm=0.05)), rows(81))
simple("global_clipnorm", mlp(optimizer=lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.1)), rows(81))
simple("clipvalue", mlp(optimizer=lambda: keras.optimizers.SGD(0.1, clipvalue=0.01)), rows(81))
simple(
    "AdamW, weight decay, EMA",
    mlp(
        optimizer=lambda: keras.optimizers.AdamW(
            0.01, weight_decay=0.01, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3
        )
    ),
)
simple(
    "gradient_accumulation_steps",
    mlp(optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2, clipnorm=0.1)),
    rows(90),
)

# Execution
simple("steps_per_execution, uneven", mlp(steps_per_execution=4), rows(90), validation_data=rows(33, seed=2))
simple("jit_compile=True (XLA), with BatchNormalization", mlp(layers.BatchNormalization, jit_compile=True), rows(90))
simple("run_eagerly", mlp(run_eagerly=True), rows(40), epochs=1)


@feature("activity_regularizer")
def _activity_regularizer(strategy: tf.distribute.Strategy) -> dict[str, float]:
    if keras.__version__.startswith("3.12."):
        raise unittest.SkipTest("Keras 3.12 adds activity penalties up over the rows; tfdist averages them")
    build = mlp(lambda: layers.Dense(8, "relu", activity_regularizer="l2"))
    return assert_transparent(strategy, build, rows(81), batch_size=BATCH)


@feature("mixed_float16")
def _mixed_float16(strategy: tf.distribute.Strategy) -> dict[str, float]:
    previous = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        # Losses are rounded to float16 in another order; loss scaling itself must not differ at all.
        return assert_transparent(strategy, mlp(), rows(90), batch_size=BATCH, tolerance=2e-3)
    finally:
        keras.config.set_dtype_policy(previous)


@feature("Embedding and Adam (sparse gradients)")
def _embedding(strategy: tf.distribute.Strategy) -> dict[str, float]:
    return _with_embedding(strategy, lambda: keras.optimizers.Adam(0.05), 81)


@feature("Embedding and SGD (sparse gradients), uneven")
def _embedding_sgd(strategy: tf.distribute.Strategy) -> dict[str, float]:
    return _with_embedding(strategy, lambda: keras.optimizers.SGD(0.5), 83)


def _with_embedding(strategy: tf.distribute.Strategy, optimizer: Callable, count: int) -> dict[str, float]:
    x = np.random.RandomState(0).randint(0, 20, (count, 6))
    y = (x.sum(1, keepdims=True) > 57).astype("float32")

    def build() -> keras.Model:
        stack = [layers.Embedding(20, 4), layers.GlobalAveragePooling1D(), layers.Dense(1, activation="sigmoid")]
        return ready(keras.Sequential([keras.Input((6,), dtype="int32"), *stack]), optimizer(), "binary_crossentropy")

    return assert_transparent(strategy, build, (x, y), batch_size=BATCH)


@feature("masked sequences, a loss per time step")
def _masked(strategy: tf.distribute.Strategy) -> dict[str, float]:
    random = np.random.RandomState(0)
    x = random.randint(1, 20, (81, 7)) * (np.arange(7) < random.randint(1, 8, (81, 1)))
    y = (x % 2)[..., None].astype("float32")

    def build() -> keras.Model:
        stack = [
            layers.Embedding(20, 4, mask_zero=True),
            layers.LSTM(5, return_sequences=True),
            layers.Dense(1, activation="sigmoid"),
        ]
        return ready(
            keras.Sequential([keras.Input((7,), dtype="int32"), *stack]),
            keras.optimizers.SGD(0.1),
            "binary_crossentropy",
            metrics=["accuracy"],
        )

    return assert_transparent(strategy, build, (x, y), batch_size=BATCH)


def _sequences(name: str, outputs: Callable, loss: object, optimizer: Callable | None = None) -> None:
    """Adds a row that trains on batches of sequences, padded to the longest of each batch.

    Args:
        name: of the row.
        outputs: takes the inputs of a model, and returns its outputs: numbers for each time step.
        loss: for `compile`; with "ctc" in its name its targets are three labels a sequence.
        optimizer: makes the optimizer.
    """
    random = np.random.RandomState(0)
    lengths = random.randint(5, 9, 41)
    steps = [random.randn(length, 4).astype("float32") for length in lengths]
    labels = random.randint(1, 3, (41, 3))

    def examples() -> object:
        for x, own in zip(steps, labels, strict=True):
            yield x, own if loss == "ctc" else x[:, :3]

    def data() -> tf.data.Dataset:
        target = tf.TensorSpec([3], tf.int64) if loss == "ctc" else tf.TensorSpec([None, 3], tf.float32)
        specification = tf.TensorSpec([None, 4], tf.float32), target
        made = tf.data.Dataset.from_generator(examples, output_signature=specification)
        # In one process Keras counts steps too many of data of unknown size.
        return made.apply(tf.data.experimental.assert_cardinality(41)).padded_batch(BATCH)

    def build() -> keras.Model:
        inputs = keras.Input((None, 4))
        return ready(
            keras.Model(inputs, outputs(inputs)), optimizer() if optimizer else keras.optimizers.SGD(0.1), loss
        )

    FEATURES[name] = lambda strategy: assert_transparent(strategy, build, data)


def _encoder_and_decoder(inputs: object) -> object:
    _, *state = layers.LSTM(4, return_state=True)(inputs)
    return layers.Dense(3)(layers.LSTM(4, return_sequences=True)(inputs, initial_state=state))


def _transformer(inputs: object) -> object:
    attended = layers.MultiHeadAttention(2, 3)(inputs, inputs)
    normal = layers.LayerNormalization()(layers.Add()([inputs, attended]))
    return layers.Dense(3)(layers.Dense(8, activation="relu")(normal))


_sequences("a Transformer's block, padded batches", _transformer, "mse")
_sequences("sequence to sequence (LSTM), padded batches", _encoder_and_decoder, "mse")
_sequences("CTC", lambda inputs: layers.Dense(3)(layers.GRU(4, return_sequences=True)(inputs)), "ctc")
_sequences(
    "EinsumDense and clipnorm, padded batches",
    lambda inputs: layers.Dense(3)(layers.EinsumDense("btc,cd->btd", (None, 5), activation="tanh")(inputs)),
    "mse",
    lambda: keras.optimizers.SGD(0.1, clipnorm=0.1),
)


@feature("dict inputs, several outputs and losses")
def _dicts(strategy: tf.distribute.Strategy) -> dict[str, float]:
    x, y = rows(81)

    def build() -> keras.Model:
        a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
        hidden = layers.Dense(8, activation="relu")(layers.concatenate([a, b]))
        outputs = {"p": layers.Dense(1, activation="sigmoid", name="p")(hidden), "q": layers.Dense(2, name="q")(hidden)}
        model = keras.Model({"a": a, "b": b}, outputs)
        losses, weights = {"p": "binary_crossentropy", "q": "mse"}, {"p": 1.0, "q": 0.3}
        model.compile("sgd", losses, loss_weights=weights, metrics={"p": ["accuracy"], "q": ["mae"]})
        return model

    return assert_transparent(strategy, build, lambda: batches({"a": x[:, :4], "b": x[:, 4:]}, {"p": y, "q": x[:, :2]}))


@feature("PyDataset")
def _pydataset(strategy: tf.distribute.Strategy) -> dict[str, float]:
    x, y = rows(90)

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, i: int) -> tuple:
            return x[i * BATCH : (i + 1) * BATCH], y[i * BATCH : (i + 1) * BATCH]

    return assert_transparent(strategy, mlp(), Batches)


@feature("Python generator (no batch is lost)")
def _generator(strategy: tf.distribute.Strategy) -> dict[str, float]:
    x, y = rows(96)

    def forever() -> object:
        i = 0
        while True:
            yield x[i * BATCH : (i + 1) * BATCH], y[i * BATCH : (i + 1) * BATCH]
            i = (i + 1) % 6

    return assert_transparent(strategy, mlp(), forever, steps_per_epoch=4, epochs=3)


@feature("custom train_step, written for one process")
def _train_step(strategy: tf.distribute.Strategy) -> dict[str, float]:
    class Net(keras.Model):
        def train_step(self, data: tuple) -> dict:
            x, y = data
            with tf.GradientTape() as tape:
                prediction = self(x, training=True)
                loss = keras.ops.mean(keras.ops.square(prediction - y)) + self.compute_loss(y=y, y_pred=prediction)
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            self._loss_tracker.update_state(loss, sample_weight=tf.shape(x)[0])
            return {**self.compute_metrics(x, y, prediction), "mine": loss * 2.0}

    def build() -> keras.Model:
        inputs = keras.Input((8,))
        outputs = layers.Dense(1, activation="sigmoid")(layers.Dense(16, activation="relu")(inputs))
        return ready(Net(inputs, outputs), keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=["accuracy"])

    return assert_transparent(strategy, build, rows(81), batch_size=BATCH)


def _custom(
    train_step: Callable[[keras.Model, object, object, object, object], dict],
    *extra: Callable[[], layers.Layer],
    metrics: tuple = (),
    **attributes: Callable[[], object],
) -> Callable[[], keras.Model]:
    """Returns a function that builds a model with a `train_step` as in Keras' guide, which ends in `train_step`.

    Args:
        train_step: receives the model, x, y, predictions and loss, and returns the logs.
        *extra: make layers before the last one.
        metrics: for `compile`; Keras expects that a step updates them.
        **attributes: functions that make attributes of the model.
    """

    class Net(keras.Model):
        def train_step(self, data: tuple) -> dict:
            x, y = data
            with tf.GradientTape() as tape:
                prediction = self(x, training=True)
                loss = self.compute_loss(y=y, y_pred=prediction)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return train_step(self, x, y, prediction, loss)

    def build() -> keras.Model:
        inputs = keras.Input((8,))
        hidden = layers.Dense(16, activation="relu")(inputs)
        for make in extra:
            hidden = make()(hidden)
        model = Net(inputs, layers.Dense(1, activation="sigmoid")(hidden))
        for name, make in attributes.items():
            setattr(model, name, make())
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "binary_crossentropy", metrics=list(metrics) or None)
        return model

    return build


@feature("BatchNormalization in a custom train_step, uneven")
def _train_step_batch_norm(strategy: tf.distribute.Strategy) -> dict[str, float]:
    def logs(model: keras.Model, x: object, y: object, prediction: object, loss: object) -> dict:
        return model.compute_metrics(x, y, prediction)

    norm = layers.BatchNormalization
    build = _custom(logs, norm, lambda: layers.Dense(8, "relu"), norm, metrics=("accuracy",))
    return assert_transparent(strategy, build, rows(83), batch_size=15)


@feature("metrics that a train_step logs under other names")
def _renamed_metrics(strategy: tf.distribute.Strategy) -> dict[str, float]:
    def logs(model: keras.Model, x: object, y: object, prediction: object, loss: object) -> dict:
        model.hit.update_state(y, prediction)
        model.others["auc"].update_state(y, prediction)
        model.mean_loss.update_state(loss)
        return {"hits": model.hit.result(), "area": model.others["auc"].result(), "l": model.mean_loss.result()}

    build = _custom(
        logs,
        hit=lambda: keras.metrics.BinaryAccuracy(name="hit"),
        others=lambda: {"auc": keras.metrics.AUC(name="auc")},
        mean_loss=lambda: keras.metrics.Mean(name="mean_loss"),
    )

    class Stop(keras.callbacks.EarlyStopping):
        def on_train_begin(self, logs: dict | None = None) -> None:
            super().on_train_begin(logs)
            # Keras 3.14 leaves what the fit before has found, which is the one it is compared with.
            self.best = self.best_weights = None

    # What it monitors has to be the same everywhere: otherwise other weights are restored on each rank.
    stop = Stop("hits", mode="max", patience=9, restore_best_weights=True)
    return assert_transparent(strategy, build, rows(83), batch_size=15, epochs=6, callbacks=[stop])


@feature("metrics and other values in the logs of a train_step")
def _mixed_logs(strategy: tf.distribute.Strategy) -> dict[str, float]:
    def logs(model: keras.Model, x: object, y: object, prediction: object, loss: object) -> dict:
        model.hit.update_state(y, prediction)
        return {"batch_loss": loss, "hits": model.hit.result(), "step": model.optimizer.iterations.value}

    build = _custom(logs, hit=lambda: keras.metrics.BinaryAccuracy(name="hit"))
    return assert_transparent(strategy, build, rows(83), batch_size=15)


class Deriving(keras.Model):
    """Logs numbers that it computes from metrics, and from the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.out = layers.Dense(1, activation="sigmoid")
        self.error, self.hit = keras.metrics.Mean(name="error"), keras.metrics.BinaryAccuracy(name="hit")

    def call(self, x: object) -> object:
        return self.out(x)

    def train_step(self, data: tuple) -> dict:
        with tf.GradientTape() as tape:
            prediction = self(data[0], training=True)
            loss = self.compute_loss(y=data[1], y_pred=prediction)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return self.logged(data[1], prediction)

    def test_step(self, data: tuple) -> dict:
        return self.logged(data[1], self(data[0]))

    def logged(self, y: tf.Tensor, prediction: tf.Tensor) -> dict:
        error = keras.ops.square(prediction - y)
        self.error.update_state(error)
        self.hit.update_state(y, prediction)
        both = {"sum": self.hit.result() + self.error.result(), "above": keras.ops.mean(error) - self.error.result()}
        return {
            "root": keras.ops.sqrt(self.error.result()),
            "perplexity": keras.ops.exp(self.error.result()),
            "both": both,
        }

    @property
    def metrics(self) -> list:
        return [self.error, self.hit]


DERIVED = "numbers that a train_step and a test_step compute from metrics"


@feature(DERIVED)
def _derived_logs(strategy: tf.distribute.Strategy) -> dict[str, float]:
    def build() -> keras.Model:
        return ready(Deriving(), keras.optimizers.SGD(0.1, momentum=0.9), "binary_crossentropy")

    return assert_transparent(strategy, build, rows(83), batch_size=15, validation_data=rows(41, seed=2))


@feature("two optimizers in a train_step (GAN)")
def _gan(strategy: tf.distribute.Strategy) -> dict[str, float]:
    class Pair(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = layers.Dense(8), layers.Dense(8)
            self.second_optimizer = keras.optimizers.SGD(0.05, clipnorm=0.1)
            self.tracker = keras.metrics.Mean(name="gap")

        def call(self, x: object) -> object:
            return self.second(self.first(x))

        def train_step(self, data: tuple) -> dict:
            x, _ = data
            for layer, optimizer in ((self.first, self.optimizer), (self.second, self.second_optimizer)):
                with tf.GradientTape() as tape:
                    loss = keras.ops.mean(keras.ops.square(self(x) - x))
                optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
            self.tracker.update_state(loss, sample_weight=tf.shape(x)[0])
            return {"gap": self.tracker.result()}

        def test_step(self, data: tuple) -> dict:
            x, _ = data
            self.tracker.update_state(keras.ops.mean(keras.ops.square(self(x) - x)), sample_weight=tf.shape(x)[0])
            return {"gap": self.tracker.result()}

        @property
        def metrics(self) -> list:
            return [self.tracker]

    return assert_transparent(
        strategy, lambda: ready(Pair(), keras.optimizers.SGD(0.1, momentum=0.9)), rows(81), batch_size=BATCH
    )


@feature("labelled and unlabelled rows, of other numbers, in one batch (FixMatch)")
def _two_batch_sizes(strategy: tf.distribute.Strategy) -> dict[str, float]:
    class Consistent(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.out = layers.Dense(3)
            self.tracker = keras.metrics.Mean(name="both")

        def call(self, x: object) -> object:
            return self.out(x)

        def both(self, data: tuple) -> tf.Tensor:
            (x, y), unlabelled = data
            crossentropy = keras.losses.binary_crossentropy(y, tf.nn.sigmoid(self(x)[:, :1]))
            spread = tf.reduce_sum(tf.square(tf.nn.softmax(self(unlabelled))), -1)
            return tf.reduce_mean(crossentropy) + 0.3 * tf.reduce_mean(spread)

        def train_step(self, data: tuple) -> dict:
            with tf.GradientTape() as tape:
                loss = self.both(data)
                scaled = self.optimizer.scale_loss(loss)
            self.optimizer.apply(tape.gradient(scaled, self.trainable_variables), self.trainable_variables)
            self.tracker.update_state(loss)
            return {"both": self.tracker.result()}

        def test_step(self, data: tuple) -> dict:
            self.tracker.update_state(self.both(data))
            return {"both": self.tracker.result()}

        def predict_step(self, data: tuple) -> tf.Tensor:
            return self(data[0][0])

        @property
        def metrics(self) -> list:
            return [self.tracker]

    def data() -> tf.data.Dataset:
        x, y = rows(22)
        more, _ = rows(96, seed=2)
        return tf.data.Dataset.zip((batches(x, y, 4), tf.data.Dataset.from_tensor_slices(more).batch(12)))

    return assert_transparent(strategy, lambda: ready(Consistent(), keras.optimizers.SGD(0.1, momentum=0.9)), data)


@feature("state that layers and a train_step keep (centre, counts, momentum encoder, memory bank)")
def _kept_state(strategy: tf.distribute.Strategy) -> dict[str, float]:
    def of_all(x: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        return x if context is None else context.all_gather(x, axis=0)

    class Counted(layers.Layer):
        def build(self, shape: tuple) -> None:
            state = {"trainable": False, "initializer": "zeros"}
            self.average = self.add_weight(shape=(8,), name="average", **state)
            self.total = self.add_weight(shape=(), name="total", aggregation="sum", **state)
            self.scale = self.add_weight(shape=(8,), name="scale", aggregation="mean", **state)

        def call(self, x: object, training: bool = False) -> object:
            before = tf.identity(self.average)
            if training:
                self.average.assign(0.9 * self.average + 0.1 * keras.ops.mean(x, 0))
                self.total.assign_add(keras.ops.sum(keras.ops.abs(x)) / 100)
                self.scale.assign(0.5 * self.scale + keras.ops.mean(keras.ops.abs(x), 0))
            return x - before / (1 + self.scale)

    class Kept(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.counted, self.out = Counted(), layers.Dense(1, activation="sigmoid")
            self.slow = layers.Dense(1, activation="sigmoid", trainable=False)
            self.centre = self.add_weight(shape=(1,), trainable=False, initializer="zeros", name="centre")
            self.bank = tf.Variable(tf.zeros((20, 8)), trainable=False, name="bank")

        def call(self, x: object, training: bool = False) -> object:
            x = self.counted(x, training=training)
            near = keras.ops.mean(keras.ops.square(self.bank))
            return 0.9 * self.out(x) + 0.1 * keras.ops.sigmoid(self.slow(x) - self.centre + near)

        def train_step(self, data: tuple) -> dict:
            logs = super().train_step(data)
            x, _ = data
            self.centre.assign(0.9 * self.centre + 0.1 * keras.ops.mean(self.slow(x), 0))
            for slow, fast in zip(self.slow.weights, self.out.weights, strict=True):
                slow.assign(0.9 * slow + 0.1 * fast)
            # In another order than in one process, which has its rows as they come.
            self.bank.assign(tf.concat([of_all(x), self.bank], 0)[:20])
            return logs

    return assert_transparent(
        strategy,
        lambda: ready(Kept(), keras.optimizers.SGD(0.1, momentum=0.9), "binary_crossentropy", metrics=["accuracy"]),
        rows(80),
        batch_size=10,
    )


ASSIGNED = "tf.Variables that layers and a train_step assign"


@feature(ASSIGNED)
def _assigned(strategy: tf.distribute.Strategy) -> dict[str, float]:
    class Centred(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.centres = [tf.Variable(tf.zeros(8), trainable=False, name="centre")]
            self.calls = tf.Variable(0, trainable=False, name="calls")

        def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
            (centre,) = self.centres
            before = tf.identity(centre)
            if training:
                self.calls.assign_add(1)
                centre.assign(0.9 * before + 0.1 * tf.reduce_mean(x, 0))
            return x - before

    class Kept(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.centred, self.out = Centred(), layers.Dense(1, activation="sigmoid")
            self.largest = tf.Variable(0.0, trainable=False, name="largest")

        def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
            return self.out(self.centred(x, training=training))

        def train_step(self, data: tuple) -> dict:
            logs = super().train_step(data)
            self.largest.assign_add(0.1 * tf.reduce_mean(data[0]))
            return logs

        def predict_step(self, data: tf.Tensor) -> tf.Tensor:
            kept = tf.concat([self.centred.centres[0], [self.largest, tf.cast(self.centred.calls, tf.float32)]], 0)
            return tf.concat([self(data), tf.ones_like(data[:, :1]) * kept], 1)

    return assert_transparent(
        strategy, lambda: ready(Kept(), keras.optimizers.SGD(0.1), "binary_crossentropy"), rows(83), batch_size=15
    )


@feature("a train_step without call, layers built in it (as in Keras' VAE and DCGAN examples)")
def _without_call(strategy: tf.distribute.Strategy) -> dict[str, float]:
    class Autoencoder(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = keras.Sequential([layers.Dense(4, activation="tanh")])
            self.decoder, self.critic = layers.Dense(8), keras.Sequential([layers.Dense(4), layers.Dense(1)])
            self.gap, self.rows = keras.metrics.Mean(name="gap"), keras.metrics.Sum(name="rows")

        def compile(self, optimizer: object, critic_optimizer: object, loss_fn: object) -> None:
            super().compile()
            self.optimizer, self.critic_optimizer, self.loss_fn = optimizer, critic_optimizer, loss_fn

        def restored(self, data: tuple) -> tuple:
            x, _ = data
            return x, self.decoder(self.encoder(x))

        def train_step(self, data: tuple) -> dict:
            with tf.GradientTape() as tape:
                x, restored = self.restored(data)
                loss = self.loss_fn(x, restored)
            weights = self.encoder.trainable_weights + self.decoder.trainable_weights
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            with tf.GradientTape() as tape:
                critique = keras.ops.mean(keras.ops.square(self.critic(x) - 1))
            weights = self.critic.trainable_weights
            self.critic_optimizer.apply_gradients(zip(tape.gradient(critique, weights), weights, strict=True))
            return self.counted(loss, x)

        def test_step(self, data: tuple) -> dict:
            x, restored = self.restored(data)
            return self.counted(self.loss_fn(x, restored), x)

        def predict_step(self, data: object) -> object:
            return self.decoder(self.encoder(data))

        def counted(self, loss: object, x: object) -> dict:
            self.gap.update_state(loss)
            self.rows.update_state(tf.shape(x)[0])
            return {"gap": self.gap.result(), "rows": self.rows.result()}

        @property
        def metrics(self) -> list:
            return [self.gap, self.rows]

    return assert_transparent(
        strategy,
        lambda: ready(
            Autoencoder(), keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1), keras.losses.MeanSquaredError()
        ),
        rows(81),
        batch_size=BATCH,
    )


@feature("metric functions that return one value a batch")
def _scalar_metrics(strategy: tf.distribute.Strategy) -> dict[str, float]:
    def gap(y_true: object, y_pred: object) -> object:
        return keras.ops.mean(keras.ops.abs(y_true - y_pred))

    return assert_transparent(strategy, mlp(metrics=[gap, keras.losses.Huber()]), rows(83), batch_size=BATCH)


@feature("BatchNormalization of data far from zero")
def _far_from_zero(strategy: tf.distribute.Strategy) -> dict[str, float]:
    x, y = rows(83)

    def build() -> keras.Model:
        stack = [layers.BatchNormalization(momentum=0.5), layers.Dense(1, activation="sigmoid")]
        return ready(keras.Sequential([keras.Input((8,)), *stack]), "sgd", "binary_crossentropy")

    # Float32 itself has steps of 1e-4 at 1000.
    return assert_transparent(strategy, build, (x + 1000, y), batch_size=BATCH, tolerance=5e-3)


@feature("ragged input")
def _ragged(strategy: tf.distribute.Strategy) -> dict[str, float]:
    random = np.random.RandomState(0)
    lengths = random.randint(1, 6, 81)
    x = tf.RaggedTensor.from_row_lengths(random.randn(lengths.sum()).astype("float32"), lengths)
    y = np.asarray(tf.reduce_sum(x, 1) > 0, "float32")[:, None]

    class RowSums(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.out = layers.Dense(1, activation="sigmoid")

        def build(self, shape: tuple) -> None:
            self.out.build((None, 1))

        def call(self, x: object) -> object:
            return self.out(tf.reduce_sum(x, axis=1)[:, None])

    return assert_transparent(
        strategy,
        lambda: ready(RowSums(), keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=["accuracy"]),
        lambda: batches(x, y),
    )


@feature("sparse input")
def _sparse(strategy: tf.distribute.Strategy) -> dict[str, float]:
    x, y = rows(81)
    sparse = tf.sparse.from_dense(np.where(np.abs(x) > 1, x, 0))

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((8,), sparse=True), layers.Dense(1, activation="sigmoid")])
        # On GPUs Keras would ask XLA to compile it, which has not all that sparse tensors need.
        model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=["accuracy"], jit_compile=False)
        return model

    return assert_transparent(strategy, build, lambda: batches(sparse, y))


@feature("train_on_batch, test_on_batch, predict_on_batch")
def _on_batch(strategy: tf.distribute.Strategy) -> dict[str, float]:
    x, y = rows(17)

    def observe(strategy: tf.distribute.Strategy) -> list[np.ndarray]:
        with strategy.scope():
            keras.utils.set_random_seed(7)
            model = mlp(layers.BatchNormalization, metrics=["accuracy", keras.metrics.AUC()])()
        seen = [model.train_on_batch(x[:n], y[:n]) for n in (16, 17, 1)]
        seen += [model.test_on_batch(x, y), model.predict_on_batch(x)]
        assert seen[-1].shape == (17, 1), f"predict_on_batch of 17 rows returned {seen[-1].shape}"
        return [np.asarray(value) for value in [*seen, *model.get_weights()]]

    expected, received = observe(tf.distribute.get_strategy()), observe(strategy)
    gaps = {str(i): float(np.abs(a - b).max()) for i, (a, b) in enumerate(zip(expected, received, strict=True))}
    assert max(gaps.values()) < 1e-5, f"Largest absolute differences by position: {gaps}"
    return gaps


@feature("distribute_datasets_from_function")
def _from_function(strategy: tf.distribute.Strategy) -> dict[str, float]:
    x, y = rows()

    def of_worker(context: tf.distribute.InputContext) -> tf.data.Dataset:
        pieces = batches(x, y, context.get_per_replica_batch_size(BATCH)).repeat()
        return pieces.shard(context.num_input_pipelines, context.input_pipeline_id)

    expected = train_and_observe(tf.distribute.get_strategy(), mlp(), lambda: batches(x, y), steps_per_epoch=6)
    received = train_and_observe(
        strategy, mlp(), lambda: strategy.distribute_datasets_from_function(of_worker), steps_per_epoch=6
    )
    # Which replica gets which rows of a step is up to the function: predictions come in another order.
    gaps = differences(expected, received)
    gaps = {name: gap for name, gap in gaps.items() if name.startswith(("history", "evaluate"))}
    assert max(gaps.values()) < 1e-5, f"Largest absolute differences: {gaps}"
    return gaps


@feature("TextVectorization and ragged.to_tensor without a length, unmasked")
def _longest_rows(strategy: tf.distribute.Strategy) -> dict[str, float]:
    random = np.random.RandomState(0)
    texts = np.array([" ".join(random.choice(list("abcd"), random.randint(1, 9))) for _ in range(41)])[:, None]

    class Padding(layers.Layer):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            return tf.cast(tf.strings.bytes_split(tf.squeeze(x, 1)).to_tensor("") == "a", tf.float32)[:, :, None]

        def compute_output_shape(self, shape: tuple) -> tuple:
            return (shape[0], None, 1)

    def build() -> keras.Model:
        inputs = keras.Input((1,), dtype="string")
        words = layers.Embedding(6, 4)(layers.TextVectorization(vocabulary=list("abcd"))(inputs))
        letters = layers.Dense(4)(Padding()(inputs))
        pooled = [layers.GlobalAveragePooling1D()(x) for x in (words, letters)]
        return ready(
            keras.Model(inputs, layers.Dense(1)(layers.Concatenate()(pooled))), keras.optimizers.SGD(0.1), "mse"
        )

    data = tf.data.Dataset.from_tensor_slices((texts, np.arange(41, dtype="float32")[:, None] / 41)).batch(BATCH)
    return assert_transparent(strategy, build, lambda: data)


def _pairs(loss: str) -> Callable[[tf.distribute.Strategy], dict[str, float]]:
    """A `train_step` with a loss of pairs of rows, as docs/own-loops.md writes it."""
    (source,) = (block.text for block in blocks_of("docs/own-loops.md", "python") if f"def {loss}(" in block.text)
    names: dict[str, Callable] = {"tf": tf}
    exec(source, names)

    class Pairs(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = layers.Dense(6), layers.Dense(6)
            self.tracker = keras.metrics.Mean(name="value")

        def call(self, x: tf.Tensor) -> tuple:
            return keras.ops.normalize(self.one(x[:, :5])), keras.ops.normalize(self.other(x[:, 3:]))

        def train_step(self, data: tuple) -> dict:
            with tf.GradientTape() as tape:
                value = names[loss](*self(data[0], training=True))
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(value, variables), variables)
            self.tracker.update_state(value, sample_weight=tf.shape(data[0])[0])
            return {"value": self.tracker.result()}

        def test_step(self, data: tuple) -> dict:
            self.tracker.update_state(names[loss](*self(data[0])), sample_weight=tf.shape(data[0])[0])
            return {"value": self.tracker.result()}

    return lambda strategy: assert_transparent(
        # Without shuffling, the last batch has 5 rows: other numbers on some replicas, and one or more on each of four.
        strategy,
        lambda: ready(Pairs(), keras.optimizers.SGD(0.1)),
        rows(85),
        batch_size=BATCH,
    )


class PositiveLoss(keras.Model):
    """A detector: its loss and its penalty are divided by how many rows of the whole batch are positive."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = layers.Dense(16, "relu"), layers.Dense(1)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        hidden = self.hidden(x)
        active = keras.ops.cast(hidden[:, :1] > 0.2, "float32")
        self.add_loss(0.1 * _mean_over(hidden**2 * active, active))
        return self.out(hidden)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True) -> tf.Tensor:
        return _mean_over(keras.ops.square(y - y_pred) * y, y) + sum(self.losses)


def _mean_over(values: tf.Tensor, which: tf.Tensor) -> tf.Tensor:
    return tfdist.global_sum(tf.reduce_sum(values)) / tf.maximum(tfdist.global_sum(tf.reduce_sum(which)), 1)


simple(
    "global_sum in compute_loss and add_loss, uneven",
    lambda: ready(PositiveLoss(), keras.optimizers.SGD(0.1), "mse"),
    rows(81),
    shuffle=False,
)


for _loss in ("clip_loss", "simclr_loss"):
    FEATURES[f"all_gather in the loss of a train_step ({_loss.removesuffix('_loss')})"] = _pairs(_loss)
