"""What the tests of pipelines share: strategies, data, what is expected, and its comparison with what a pipeline does.

Most models are compared with one process that sees whole batches. Where a layer has a state that changes in training
(BatchNormalization's statistics, Dropout's seeds), a pipeline cannot equal that, and is compared with `micro_batched`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdist
from tests.features.reference import only_fit
from tests.models import assert_arrays
from tfdist.testing import differences, train_and_observe

BATCH = 16


def pipeline(stages: int = 2, num_microbatches: int = 4, **options: Any) -> tfdist.PipelineStrategy:
    return tfdist.PipelineStrategy([f"CPU:{i}" for i in range(stages)], num_microbatches=num_microbatches, **options)


def numbers(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.RandomState(seed).normal(size=shape).astype("float32")


def labelled(rows: int = 37, features: int = 8, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Rows and their classes; 37 rows are two batches of 16 and one of 5."""
    return numbers(rows, features), np.random.RandomState(2).randint(0, classes, rows)


def mlp(*extra: Callable[[], layers.Layer], optimizer: Callable | None = None, **compile_arguments: Any) -> Callable:
    """Returns a function that builds and compiles a small classifier; `extra` makes layers in its middle."""

    def build() -> keras.Model:
        hidden = [layers.Dense(16, "relu"), *(make() for make in extra), layers.Dense(16, "tanh")]
        model = keras.Sequential(
            [keras.Input((8,)), *hidden, layers.Dense(16), layers.Dense(3, "softmax", dtype="float32")]
        )
        arguments = {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"], **compile_arguments}
        model.compile(optimizer() if optimizer else keras.optimizers.SGD(0.1, momentum=0.9), **arguments)
        return model

    return build


def micro_batched(build: Callable[[], keras.Model], count: int) -> Callable[[], keras.Model]:
    """The same model, which one process trains one micro-batch after the other, with one update at the end."""

    def build_micro_batched() -> keras.Model:
        model = build()

        def train_step(data: Any) -> dict[str, Any]:
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
            rows, variables = len(tf.nest.flatten(x)[0]), model.trainable_variables
            total, predictions, sums = 0.0, [], [tf.zeros_like(v) for v in variables]
            for indices in filter(len, np.array_split(np.arange(rows), count)):
                part = [rows_of(value, indices[0], indices[-1] + 1) for value in (x, y, sample_weight)]
                weight = len(indices) / rows
                with tf.GradientTape() as tape:
                    predicted = model(part[0], training=True)
                    loss = model.compute_loss(part[0], part[1], predicted, part[2], training=True)
                gradients = tape.gradient(loss, variables, unconnected_gradients="zero")
                sums = [s + weight * tf.convert_to_tensor(g) for s, g in zip(sums, gradients, strict=True)]
                total += weight * loss
                predictions.append(predicted)
            model._loss_tracker.update_state(total, sample_weight=rows)
            model.optimizer.apply_gradients(zip(sums, variables, strict=True))
            joined = tf.nest.map_structure(lambda *pieces: tf.concat(pieces, 0), *predictions)
            return model.compute_metrics(x, y, joined, sample_weight)

        model.train_step, model.run_eagerly = train_step, True
        return model

    return build_micro_batched


def rows_of(structure: Any, begin: int, end: int) -> Any:
    return tf.nest.map_structure(lambda value: None if value is None else value[begin:end], structure)


def observe(
    strategy: Any, build: Callable[[], keras.Model], data: Any, whole: bool = True, **arguments: Any
) -> dict[str, np.ndarray]:
    """What training leaves; names without those of layers, which carry counters.

    Args:
        strategy: one of these, or that of one process.
        build: makes the model.
        data: arrays, or a function that returns what `fit` takes.
        whole: whether `evaluate` and `predict` are called, too; what they do depends on the stages only.
        **arguments: of `train_and_observe`.
    """
    if not callable(data):
        arguments = {"batch_size": BATCH, **arguments}
    with contextlib.nullcontext() if whole else only_fit():
        seen = train_and_observe(strategy, build, data, **arguments)
    return {name.split(" (")[0]: value for name, value in seen.items()}


def one_process(build: Callable[[], keras.Model], data: Any, **arguments: Any) -> dict[str, np.ndarray]:
    return observe(tf.distribute.get_strategy(), build, data, **arguments)


def assert_equal(expected: Mapping[str, Any], received: Mapping[str, Any], tolerance: float = 1e-5) -> None:
    gaps = differences(expected, received)
    assert gaps, "nothing was compared"
    wrong = {name: gap for name, gap in gaps.items() if not gap <= tolerance}
    assert not wrong, wrong


def assert_trains_equally(
    build: Callable[[], keras.Model],
    data: Any,
    strategy: tfdist.PipelineStrategy | None = None,
    *,
    stateful: bool = False,
    tolerance: float = 1e-5,
    **arguments: Any,
) -> None:
    """Compares weights, history, metrics and predictions of a pipeline with those of one process.

    With `whole=False`, weights and history only.
    """
    strategy = strategy or pipeline()
    reference = micro_batched(build, strategy._options.num_microbatches) if stateful else build
    expected = one_process(reference, data, **arguments)
    assert_equal(expected, observe(strategy, build, data, **arguments), tolerance)


def after_one_step(
    strategy: Any, build: Callable[[], keras.Model], data: Any, steps: int = 1
) -> tuple[keras.Model, dict[str, np.ndarray]]:
    """Weights, the optimizer's variables and the loss after some steps on the same batch; only `fit` is traced."""
    with strategy.scope():
        keras.utils.set_random_seed(7)
        model = build()
    history = model.fit(*data, batch_size=len(tf.nest.flatten(data)[0]), epochs=steps, shuffle=False, verbose=0)
    seen = {f"weight {i}": v.numpy() for i, v in enumerate(model.weights)}
    seen |= {f"optimizer {i}": np.asarray(v) for i, v in enumerate(model.optimizer.variables)}
    return model, seen | {f"history {i}": np.asarray(v) for i, v in enumerate(history.history.values())}


def both(train: Callable[[keras.Model], Any], build: Callable[[], keras.Model]) -> list[tuple[Any, list[np.ndarray]]]:
    """What a function in the scope returns for a model of one process, and for one of a pipeline; and the weights."""
    results = []
    for strategy in (tf.distribute.get_strategy(), pipeline()):
        with strategy.scope():
            keras.utils.set_random_seed(7)
            model = build()
            results.append((train(model), model.get_weights()))
    return results


def assert_same(expected: Any, received: Any) -> None:
    expected, received = ([x for x in tf.nest.flatten(of) if x is not None] for of in (expected, received))
    assert len(expected) == len(received) > 0
    assert_arrays(expected, received, tolerance=1e-5)
