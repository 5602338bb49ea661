"""How scripts read the variables of a model: each reading is one line that somebody has written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.cluster.attempt import attempt


class Counting(keras.layers.Layer):
    """Has a counter of Keras' and variables of TensorFlow's."""

    def build(self, shape: Any) -> None:
        self.counter = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="counter")
        self.raw_counter = tf.Variable(3, trainable=False)
        self.raw_factor = tf.Variable(0.5, trainable=False)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x * self.raw_factor


class Model(keras.Model):
    """A subclassed model with a metric, a seed and a counter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = keras.random.SeedGenerator(4)
        self.counting, self.normalization = Counting(), keras.layers.BatchNormalization()
        # It draws, but drops nothing: replicas have masks of their own.
        self.dropout, self.out = keras.layers.Dropout(1e-9, seed=5), keras.layers.Dense(1)

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        return self.out(self.dropout(self.normalization(self.counting(x)), training=training))


def _summary(model: keras.Model) -> str:
    lines: list[str] = []
    model.summary(print_fn=lambda line, **_: lines.append(line))
    return "\n".join(lines)


READINGS: dict[str, Callable[[Model], Any]] = {
    "int(counter)": lambda m: int(m.counting.counter),
    "float(counter)": lambda m: float(m.counting.counter),
    "np.asarray(counter)": lambda m: np.asarray(m.counting.counter),
    "counter.numpy()": lambda m: m.counting.counter.numpy(),
    "int(counter.value)": lambda m: int(m.counting.counter.value),
    "np.asarray(counter.value)": lambda m: np.asarray(m.counting.counter.value),
    "int(tf.Variable)": lambda m: int(m.counting.raw_counter),
    "float(tf.Variable)": lambda m: float(m.counting.raw_factor),
    "complex(tf.Variable)": lambda m: complex(m.counting.raw_factor).real,
    "np.asarray(tf.Variable)": lambda m: np.asarray(m.counting.raw_factor),
    "np.array(tf.Variable, float64)": lambda m: np.array(m.counting.raw_factor, "float64"),
    "tf.Variable.numpy()": lambda m: m.counting.raw_counter.numpy(),
    "float(learning_rate)": lambda m: float(m.optimizer.learning_rate),
    "np.asarray(learning_rate)": lambda m: np.asarray(m.optimizer.learning_rate),
    "float(np.array(learning_rate))": lambda m: float(np.array(m.optimizer.learning_rate)),
    "float(learning_rate.value)": lambda m: float(m.optimizer.learning_rate.value),
    "convert_to_numpy(learning_rate)": lambda m: keras.ops.convert_to_numpy(m.optimizer.learning_rate),
    "f-string": lambda m: f"{float(m.optimizer.learning_rate):.5f}",
    "repr(learning_rate)": lambda m: repr(m.optimizer.learning_rate).split(", ")[-1],
    "int(iterations)": lambda m: int(m.optimizer.iterations),
    "iterations.numpy()": lambda m: m.optimizer.iterations.numpy(),
    "slots": lambda m: [np.asarray(v) for v in m.optimizer.variables],
    "slots, numpy()": lambda m: [v.numpy() for v in m.optimizer.variables],
    "get_weights()": lambda m: m.get_weights(),
    "layer.get_weights()": lambda m: m.normalization.get_weights(),
    "np.asarray of variables": lambda m: [np.asarray(v) for v in m.variables],
    "np.asarray of values": lambda m: [np.asarray(v.value) for v in m.variables],
    "get_state_tree()": lambda m: m.get_state_tree(value_format="numpy_array")["trainable_variables"],
    "seed": lambda m: np.asarray(m.seeds.state),
    "seed of a Dropout, numpy()": lambda m: m.dropout.seed_generator.state.numpy(),
    "summary()": _summary,
    "norm": lambda m: float(keras.ops.norm(m.out.kernel)),
    "tf.norm": lambda m: float(tf.norm(m.out.kernel)),
    "kernel * 2": lambda m: np.asarray(m.out.kernel * 2),
    "kernel[0]": lambda m: np.asarray(m.out.kernel[0]),
    "kernel > 0": lambda m: bool(keras.ops.any(m.out.kernel > 100)),
    "model(x)": lambda m: m(np.ones((3, 4), "float32")).numpy(),
    "metric.result()": lambda m: [float(metric.result()) for metric in m.metrics if metric.name == "loss"],
    "get_metrics_result()": lambda m: {name: float(value) for name, value in m.get_metrics_result().items()},
    "metrics_variables": lambda m: [np.asarray(v) for v in m.metrics_variables],
}


def readings(model: Model) -> dict[str, Any]:
    """What each reading returns as a list of numbers (or a text), or how it fails."""
    return {name: attempt(name, lambda read=read: plain(read(model))) for name, read in READINGS.items()}


def plain(value: Any) -> Any:
    if isinstance(value, str):
        return value
    return [np.asarray(leaf, "float64").tolist() for leaf in keras.tree.flatten(value)]


def trained() -> Model:
    """A model that was fitted and evaluated, where it was called from: inside of a scope, or outside."""
    x = np.random.RandomState(0).rand(32, 4).astype("float32")
    keras.utils.set_random_seed(3)
    model = Model()
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    model.fit(x, x[:, :1], batch_size=8, verbose=0)
    model.evaluate(x, x[:, :1], batch_size=8, verbose=0)
    return model
