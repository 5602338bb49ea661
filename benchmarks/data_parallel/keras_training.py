"""The training that Keras 3 and tf_keras have in common; the module `keras` or `tf_keras` is an argument."""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf

from benchmarks.data_parallel.measure import StepClock, result
from benchmarks.data_parallel.models import (
    LEARNING_RATE,
    MODELS,
    MOMENTUM,
    Conv,
    Dense,
    Flatten,
    Layer,
    Pool,
    make_batch,
)
from benchmarks.data_parallel.workload import Workload


def train(keras: Any, strategy: tf.distribute.Strategy | None, workload: Workload) -> dict:
    """Trains in one `fit`.

    Args:
        keras: `keras` or `tf_keras`.
        strategy: the strategy, or None for a process on its own.
        workload: what to train.

    Returns:
        See `benchmarks.data_parallel.measure.result`.
    """
    shape = MODELS[workload.model]
    # What a user writes: one dataset of global batches, the same in every process. Making one costs nothing.
    dataset = tf.data.Dataset.from_tensors(make_batch(shape, workload.global_batch)).repeat()
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential(
            [keras.Input(shape.input_shape), *(keras_layer(keras, layer) for layer in shape.layers)]
        )
        model.compile(
            optimizer=keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=workload.steps_per_execution,
            jit_compile=False,
        )
    clock = StepClock(workload.warmup, workload.windows, workload.steps)
    timer = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: clock.tick(batch + 1))
    # tf_keras would otherwise read loss and accuracy back after every step, which Keras 3 never does.
    timer._supports_tf_logs = True
    history = model.fit(
        dataset.with_options(options),
        steps_per_epoch=workload.total_steps,
        shuffle=False,
        verbose=0,
        callbacks=[timer],
    ).history
    return result(clock, float(history["loss"][0]), float(history["accuracy"][0]))


def keras_layer(keras: Any, layer: Layer) -> Any:
    """A layer of Keras 3 or of tf_keras."""
    match layer:
        case Conv(filters, size):
            return keras.layers.Conv2D(filters, size, activation="relu")
        case Pool(size):
            return keras.layers.MaxPooling2D(size)
        case Flatten():
            return keras.layers.Flatten()
        case Dense(units, relu):
            return keras.layers.Dense(units, activation="relu" if relu else None)
