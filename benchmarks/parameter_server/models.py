"""The models and their data, for Keras 3 and tf_keras; the module `keras` or `tf_keras` is an argument."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing

from benchmarks.parameter_server.trials import Case, Trial

SLEEP_MICROSECONDS = 40_000
_FEATURES, _BATCH = 32, 32
_IDS, _ID_BATCH, _ID_BATCHES, _WIDTH = 4, 1024, 64, 32


def build(keras: Any, trial: Trial) -> Any:
    """The compiled model; call it in the strategy's scope."""
    case = trial.case
    keras.utils.set_random_seed(1)
    if case.model == "embedding":
        layers = [
            keras.Input((_IDS,), dtype="int32"),
            keras.layers.Embedding(case.rows, _WIDTH),
            keras.layers.Flatten(),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(1),
        ]
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
    else:
        units = 1024 if case.model == "wide" else 64
        layers = [
            keras.Input((_FEATURES,)),
            keras.layers.Dense(units, activation="relu"),
            keras.layers.Dense(units, activation="relu"),
            *([_sleeping_layer(keras)] if case.model == "sleep" else []),
            keras.layers.Dense(1),
        ]
        loss = keras.losses.MeanSquaredError()
    model = keras.Sequential(layers)
    model.compile(
        optimizer=_optimizer(keras, case.optimizer),
        loss=loss,
        steps_per_execution=trial.steps_per_execution,
        jit_compile=False,
    )
    return model


def dataset(case: Case) -> tf.data.Dataset:
    """Batches without end, from memory.

    The ids of the embedding are uniformly distributed, so that a batch has as many different ones as can be.
    """
    generator = np.random.default_rng(1)
    if case.model == "embedding":
        ids = generator.integers(0, case.rows, (_ID_BATCHES, _ID_BATCH, _IDS), dtype=np.int32)
        clicks = generator.integers(0, 2, (_ID_BATCHES, _ID_BATCH, 1)).astype(np.float32)
        return tf.data.Dataset.from_tensor_slices((ids, clicks)).repeat()
    rows = generator.standard_normal((_BATCH, _FEATURES), dtype=np.float32)
    return tf.data.Dataset.from_tensors((rows, rows.sum(1, keepdims=True))).repeat()


def _optimizer(keras: Any, name: str) -> Any:
    if name == "lazy_adam":
        from tfdist.optimizers import LazyAdam

        return LazyAdam(1e-3)
    classes = {"sgd": keras.optimizers.SGD, "adagrad": keras.optimizers.Adagrad, "adam": keras.optimizers.Adam}
    return classes[name](learning_rate=1e-3)


def _sleeping_layer(keras: Any) -> Any:
    class Sleep(keras.layers.Layer):
        """Passes its input on after a while. A worker runs no Python, but a dataset within a step can sleep."""

        def call(self, inputs: Any) -> Any:
            # Without take, it would sleep again when it looks for a second element. To `reduce` it costs 5 ms.
            pause = tf.data.Dataset.range(1).apply(testing.sleep(SLEEP_MICROSECONDS)).take(1)
            with tf.control_dependencies([pause.get_single_element()]):
                return tf.identity(inputs)

        def compute_output_shape(self, input_shape: Any) -> Any:
            return input_shape

    return Sleep()
