"""A training loop as in TensorFlow's tutorial on custom training, run under any strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
BATCH, ROWS_OF_MASK = 6, 64

OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.5),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.05),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.05),
    "accumulation": lambda: keras.optimizers.SGD(0.1, momentum=0.5, gradient_accumulation_steps=3),
    "EMA": lambda: keras.optimizers.AdamW(0.01, use_ema=True, ema_overwrite_frequency=3),
    "loss scaling": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, clipnorm=0.05)),
    "loss scaling alone": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.5)),
}


def train(strategy: tf.distribute.Strategy, optimizer: str, compiled: bool) -> list[float]:
    """Trains for two epochs.

    Returns:
        The losses of the epochs, the metric, and all weights, as flat numbers.
    """
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
        chosen = OPTIMIZERS[optimizer]()
        seen = keras.metrics.MeanSquaredError()
        loss_of_rows = keras.losses.MeanSquaredError(reduction=None)
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)

    def step(data: tuple) -> tf.Tensor:
        x, y = data
        with tf.GradientTape() as tape:
            predictions = model(x, training=True)
            loss = tf.nn.compute_average_loss(loss_of_rows(y, predictions), global_batch_size=BATCH)
            scaled = chosen.scale_loss(loss)
        weights = model.trainable_variables
        chosen.apply_gradients(zip(tape.gradient(scaled, weights), weights, strict=True))
        seen.update_state(y, predictions)
        return loss

    def train_step(data: Any) -> tf.Tensor:
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(step, args=(data,)), axis=None)

    run = tf.function(train_step) if compiled else train_step
    batches = strategy.experimental_distribute_dataset(dataset)
    losses = [sum(float(run(data)) for data in batches) for _ in range(2)]
    weights = np.concatenate([np.ravel(w) for w in model.get_weights()])
    return [*losses, float(seen.result()), *weights.tolist()]


def counted(strategy: tf.distribute.Strategy, is_argument: bool) -> list[list[int]]:
    """How many batches loops in a function see, and the sum of the squares of their rows, in two epochs.

    The function is given the distributed dataset, or finds it.
    """
    batches = strategy.experimental_distribute_dataset(tf.data.Dataset.range(20).batch(8))

    @tf.function
    def epoch(dataset: Any) -> Any:
        steps, total = 0, tf.constant(0, tf.int64)
        for batch in dataset if is_argument else batches:
            squares = strategy.run(lambda rows: tf.reduce_sum(rows**2), (batch,))
            total += strategy.reduce(tf.distribute.ReduceOp.SUM, squares, axis=None)
            steps += 1
        return steps, total

    return [[int(number) for number in epoch(batches)] for _ in range(2)]


def masks(strategy: tf.distribute.Strategy, compiled: bool) -> list[list[int]]:
    """For each replica of this process, what Dropout has dropped."""
    with strategy.scope():
        dropout = keras.layers.Dropout(0.5, seed=3)
        dropout.build((1, ROWS_OF_MASK))

    def draw() -> tf.Tensor:
        return tf.cast(dropout(tf.ones((1, ROWS_OF_MASK)), training=True) == 0, tf.int32)[0]

    def on_replicas() -> Any:
        return strategy.run(draw)

    found = (tf.function(on_replicas) if compiled else on_replicas)()
    return [mask.numpy().tolist() for mask in strategy.experimental_local_results(found)]


def drawn(strategy: tf.distribute.Strategy, compiled: bool) -> list[list[list[float]]]:
    """What replicas of this process draw from `keras.random` without a seed, twice; then what the program draws."""
    keras.utils.set_random_seed(5)

    def draw() -> tf.Tensor:
        return keras.random.normal((3,))

    def on_replicas() -> Any:
        return strategy.run(draw)

    run = tf.function(on_replicas) if compiled else on_replicas
    found = [strategy.experimental_local_results(run()) for _ in range(2)]
    return [[numbers.numpy().tolist() for numbers in some] for some in (*found, [draw()])]


def noise(strategy: tf.distribute.Strategy, compiled: bool) -> list[list[float]]:
    """What replicas of this process draw from `tf.random`, without a seed of the operation."""

    def on_replicas() -> Any:
        return strategy.run(lambda: tf.random.normal((3,)))

    found = (tf.function(on_replicas) if compiled else on_replicas)()
    return [numbers.numpy().tolist() for numbers in strategy.experimental_local_results(found)]


def made_on_replicas(strategy: tf.distribute.Strategy, compiled: bool) -> list[str]:
    """How a layer is called, and computes, that a step makes at first; and the name of the next one."""
    keras.utils.clear_session()
    keras.layers.Dense(1)
    made: list[keras.layers.Layer] = []

    def step() -> tf.Tensor:
        if not made:
            made.append(keras.layers.Dense(2))
        return made[0](tf.ones((2, 3)))

    def on_replicas() -> Any:
        return strategy.run(step)

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        with keras.name_scope("outer"):
            found = (tf.function(on_replicas) if compiled else on_replicas)()
    finally:
        keras.config.set_dtype_policy(before)
    dtypes = {output.dtype.name for output in strategy.experimental_local_results(found)}
    return [*dtypes, made[0].kernel.path, keras.layers.Dense(1).name]
