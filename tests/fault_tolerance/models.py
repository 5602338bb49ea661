"""The models of these tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tests.fault_tolerance.job import Job

_CAPACITY = 1000


@keras.saving.register_keras_serializable("tests")
class RowLog(keras.layers.Layer):
    """Takes the first column off, the rows' numbers, and keeps those of all training steps as a weight.

    A backup holds it as it holds all weights: after a resumed fit it tells what the surviving steps have read.
    """

    def build(self, input_shape: Any) -> None:
        self.log = self.add_weight(shape=(_CAPACITY,), dtype="int32", initializer="zeros", trainable=False)
        self.count = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        if training:
            rows = tf.cast(x[:, 0], "int32")
            places = self.count + tf.range(tf.size(rows))
            self.log.assign(tf.tensor_scatter_nd_update(self.log.value, places[:, None], rows))
            self.count.assign_add(tf.size(rows))
        return x[:, 1:]


class Smooth(tf.Module):
    """A mean that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = tf.Variable(0.0, trainable=False)

    def update(self, value: Any) -> tf.Tensor:
        """Takes a value into the mean; returns what it was before."""
        before = self.mean.read_value()
        self.mean.assign(0.9 * before + 0.1 * tf.reduce_mean(value))
        return before


class Damped(keras.layers.Layer):
    """Scales by a mean that its module keeps, and that Keras does not list among the variables of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Smooth()

    def call(self, x: Any) -> Any:
        return x / (1.0 + self.module.update(tf.abs(x)))


def rows_of(model: keras.Model) -> list[int] | None:
    """The rows of all training steps in their order, if the model keeps them."""
    for layer in model._flatten_layers():
        if isinstance(layer, RowLog) and layer.built:
            return layer.log.numpy()[: int(layer.count)].tolist()
    return None


def _layers(width: int = 8, dropout: float = 0.3, log_rows: bool = True) -> list[keras.layers.Layer]:
    # Several replicas cannot write one log.
    first = RowLog() if log_rows else keras.layers.Rescaling(0.1)
    hidden = [keras.layers.Dense(width, activation="relu"), keras.layers.BatchNormalization()]
    return [keras.Input((5,)), first, *hidden, keras.layers.Dropout(dropout), keras.layers.Dense(1)]


def _compiled(layers: list[keras.layers.Layer], job: Job, optimizer: Any = None, **options: Any) -> keras.Model:
    model = keras.Sequential([*layers, keras.layers.Activation("sigmoid", dtype="float32")])
    options = {"jit_compile": False, "metrics": ["accuracy", "auc"], "loss": "binary_crossentropy", **options}
    model.compile(optimizer or keras.optimizers.Adam(0.02), steps_per_execution=job.steps_per_execution, **options)
    return model


def _half_precision(job: Job) -> keras.Model:
    keras.mixed_precision.set_global_policy("mixed_float16")
    # The scale doubles after 5 finite steps: within and across epochs.
    optimizer = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.Adam(0.02), dynamic_growth_steps=5)
    return _compiled(_layers(), job, optimizer)


def _smooth(job: Job) -> keras.Model:
    """Nothing in it magnifies how sums are rounded, which depends on the number of replicas, as do Dropout's masks."""
    layers = [keras.Input((5,)), keras.layers.Rescaling(0.1), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
    return _compiled(layers, job, keras.optimizers.SGD(0.05, momentum=0.9))


def _matrices(job: Job) -> keras.Model:
    """Its kernel is worth compressing, and as `_smooth`, all numbers of replicas train it alike."""
    hidden = [keras.layers.Dense(40, "tanh"), keras.layers.Dense(40, "tanh")]
    layers = [keras.Input((5,)), keras.layers.Rescaling(0.1), *hidden, keras.layers.Dense(1)]
    return _compiled(layers, job, keras.optimizers.SGD(0.05, momentum=0.9))


def _deep(job: Job) -> keras.Model:
    """It can be cut into blocks."""
    hidden = [keras.layers.Dense(24, "relu") for _ in range(4)]
    return _compiled([keras.Input((5,)), keras.layers.Rescaling(0.1), *hidden, keras.layers.Dense(1)], job)


def _damped(job: Job) -> keras.Model:
    layers = [keras.Input((5,)), keras.layers.Rescaling(0.1), keras.layers.Dense(4), Damped(), keras.layers.Dense(1)]
    return _compiled(layers, job, metrics=["accuracy"])


class Adversaries(keras.Model):
    """Two networks with an optimizer each, trained by a step of their own, as a GAN is."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = keras.Sequential([keras.layers.Dropout(0.2), keras.layers.Dense(1)])
        self.maker = keras.Sequential([keras.layers.Dense(4)])
        self.seed = keras.random.SeedGenerator(3)

    def compile(self, optimizer: Any, maker_optimizer: Any, **options: Any) -> None:
        super().compile(optimizer, **options)
        self.maker_optimizer = maker_optimizer

    def build(self, input_shape: Any = None) -> None:
        for part, optimizer, width in ((self.critic, self.optimizer, 4), (self.maker, self.maker_optimizer, 2)):
            part.build((None, width))
            optimizer.build(part.trainable_variables)
        self.built = True

    def train_step(self, data: Any) -> dict[str, Any]:
        real = data[0][:, 1:]
        noise = keras.random.normal((tf.shape(real)[0], 2), seed=self.seed)
        with tf.GradientTape(persistent=True) as tape:
            made = self.critic(self.maker(noise), training=True)
            loss = tf.reduce_mean(tf.nn.softplus(-self.critic(real, training=True)) + tf.nn.softplus(made))
            fooled = tf.reduce_mean(tf.nn.softplus(-made))
        for part, optimizer, of in ((self.critic, self.optimizer, loss), (self.maker, self.maker_optimizer, fooled)):
            optimizer.apply(tape.gradient(of, part.trainable_variables), part.trainable_variables)
        return {"loss": loss}


def _adversaries(job: Job) -> keras.Model:
    model = Adversaries()
    optimizers = keras.optimizers.Adam(0.01), keras.optimizers.RMSprop(0.01)
    model.compile(*optimizers, steps_per_execution=job.steps_per_execution, jit_compile=False)
    model.build()
    return model


def _light(job: Job, log_rows: bool = True, dropout: float = 0.3, **options: Any) -> keras.Model:
    """A model that is traced in no time, for tests that are about something else."""
    layers = [
        keras.Input((5,)),
        RowLog() if log_rows else keras.layers.Rescaling(0.1),
        keras.layers.Dropout(dropout),
        keras.layers.Dense(1),
    ]
    return _compiled(layers, job, **{"metrics": ["accuracy"], **options})


def _cosine(job: Job) -> keras.Model:
    rate = keras.optimizers.schedules.CosineDecay(0.02, 15 * job.epochs)
    return _light(job, optimizer=keras.optimizers.Adam(rate))


class Plain(keras.layers.Layer):
    """A layer without a configuration of its own, which is not its arguments either."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function = function

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.function(x)


def _unserialisable(job: Job) -> keras.Model:
    layers = [keras.Input((5,)), RowLog(), Plain(lambda x: 2 * x), keras.layers.Lambda(lambda x: x / 2)]
    loss = lambda y, p: tf.reduce_mean(tf.square(y - p), -1)  # noqa: E731
    return _compiled([*layers, keras.layers.Dense(1)], job, metrics=["accuracy"], loss=loss)


def _after_others(job: Job) -> keras.Model:
    """As the first model of a process, but for the counters in its layers' names."""
    _light(job)
    return _light(job)


MODELS: dict[str, Callable[[Job], keras.Model]] = {
    "light": _light,
    "light, after others": _after_others,
    "light, another rate": lambda job: _light(job, optimizer=keras.optimizers.Adam(0.05)),
    "light, another loss": lambda job: _light(job, loss="mse"),
    "light, cosine": _cosine,
    "unserialisable": _unserialisable,
    "dense": lambda job: _compiled(_layers(), job),
    "wider": lambda job: _compiled(_layers(width=9), job),
    "light, replicated": lambda job: _light(job, log_rows=False),
    "replicated": lambda job: _compiled(_layers(log_rows=False), job),
    "smooth": _smooth,
    "matrices": _matrices,
    "deep": _deep,
    "without Dropout": lambda job: _compiled(_layers(dropout=0, log_rows=False), job),
    "large": lambda job: _compiled(_layers(width=300_000, dropout=0, log_rows=False), job),
    "float16": _half_precision,
    "accumulation": lambda job: _compiled(_layers(), job, keras.optimizers.Adam(0.02, gradient_accumulation_steps=4)),
    "two optimizers": _adversaries,
    "damped": _damped,
}
