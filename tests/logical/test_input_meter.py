"""What compiled functions take from their iterators, and what replicas add up: counted where it happens."""

from __future__ import annotations

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.runtime.meters.training import Lap, TrainingMeter
from tfdist.steps.collectives import ExchangeTimer, Gathered

ROWS, BATCH = 50, 16  # batches of 16, 16, 16 and 2 rows


def built(strategy: tf.distribute.Strategy, *layers: keras.Layer, **options) -> keras.Model:
    strategy._input_meter.wanted = True
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(3)])
        model.compile("sgd", "mse", **options)
    return model


def train(model: keras.Model, rows: int = ROWS, epochs: int = 1, **options) -> None:
    model.fit(np.ones((rows, 4)), np.ones((rows, 3)), batch_size=BATCH, epochs=epochs, verbose=0, **options)


@pytest.mark.parametrize(
    ("devices", "steps_per_execution"),
    [
        (1, 10),
        (2, 1),
        (2, 3),
        pytest.param(1, 3, marks=pytest.mark.exhaustive),
        pytest.param(2, 10, marks=pytest.mark.exhaustive),
    ],
)
def test_batches_and_rows_are_counted_once(
    mirrored: tf.distribute.Strategy, devices: int, steps_per_execution: int
) -> None:
    import tfdist

    strategy = mirrored if devices == 2 else tfdist.MirroredStrategy(["CPU:0"])
    model = built(strategy, steps_per_execution=steps_per_execution)
    before = strategy._input_meter.read()
    train(model, epochs=2)
    taken = strategy._input_meter.read() - before
    assert (taken.batches, taken.rows, taken.manual) == (8, 2 * ROWS, 0)
    assert taken.seconds > 0


def test_waiting_is_what_the_dataset_makes_it(mirrored: tf.distribute.Strategy) -> None:
    def rows(number: tf.Tensor, seconds: float) -> tuple[tf.Tensor, tf.Tensor]:
        def late(number: np.ndarray) -> np.ndarray:
            time.sleep(seconds)
            return number

        number = tf.ensure_shape(tf.numpy_function(late, [number], tf.int64), [])
        return tf.fill([8, 4], tf.cast(number, tf.float32)), tf.ones((8, 3))

    model = built(mirrored)
    waited = []
    for seconds in (0.05, 0.0):
        dataset = tf.data.Dataset.range(10).map(lambda number, seconds=seconds: rows(number, seconds))
        before = mirrored._input_meter.read()
        model.fit(dataset, verbose=0)
        waited.append((mirrored._input_meter.read() - before).seconds)
    assert waited[0] > 0.4 and waited[0] > 2 * waited[1]


def test_a_meter_leaves_out_the_first_execution_and_the_validation() -> None:
    now = [100.0]
    meter = TrainingMeter(None, 10, clock=lambda: now[0])
    assert meter.lap() == Lap(0.0, 0)
    meter.epoch_begins()
    now[0] += 30  # tracing
    meter.step(3)
    assert meter.lap() == Lap(0.0, 0)
    now[0] += 2
    meter.step(7)
    now[0] += 1
    meter.step(11)  # an execution of four steps, of which there were two left
    meter.pause()
    now[0] += 50  # validation
    meter.pause()
    lap = meter.lap()
    assert (lap.seconds, lap.steps, lap.waited, lap.rows) == (3.0, 6, None, None)
    assert lap.steps_per_second == 2.0 and lap.data_wait is None
    meter.epoch_begins()
    now[0] += 4
    meter.step(3)
    assert meter.lap() == Lap(4.0, 4)


def test_the_sums_of_a_step(mirrored: tf.distribute.Strategy) -> None:
    model = built(mirrored, keras.layers.Dense(5))
    train(model)
    # 4 * 5 + 5 + 5 * 3 + 3 numbers, each tensor in rows of its own of 64 bytes.
    assert mirrored._sums_of_step[model] == (((2 + 1 + 1 + 1, 16), tf.float32),)
    assert ExchangeTimer(mirrored, mirrored._sums_of_step[model]).seconds() > 0
    # The timer's own sums are none of a step's.
    assert len(mirrored._sums_of_step[model]) == 1
    normalized = built(mirrored, keras.layers.BatchNormalization())
    train(normalized)
    # The layer's statistics, then the gradients. Moving statistics of the global batch are the same everywhere.
    assert [shape for shape, _ in mirrored._sums_of_step[normalized]] == [(3, 4), (4, 16)]


def test_what_a_step_gathers(mirrored: tf.distribute.Strategy) -> None:
    import tfdist

    with mirrored.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, kernel_constraint="max_norm")])
        model.compile(tfdist.ShardedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    train(model)
    exchanged = mirrored._sums_of_step[model]
    # The gradients' sum, and the new weights: not once more because of a constraint.
    assert [isinstance(one, Gathered) for one in exchanged] == [False, True]
    assert ExchangeTimer(mirrored, exchanged).seconds() > 0


def test_a_single_replica_adds_up_nothing() -> None:
    import tfdist

    strategy = tfdist.MirroredStrategy(["CPU:0"])
    model = built(strategy)
    train(model)
    assert model not in strategy._sums_of_step


def test_one_process_without_a_strategy_has_rows_of_arrays(tmp_path) -> None:
    """And no waiting, which nobody has measured."""
    import tfdist
    from tests.cluster.test_tensorboard import scalars

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    train(model, epochs=2, callbacks=[tfdist.callbacks.TensorBoard(tmp_path)])
    found = scalars(tmp_path)
    counted = [
        found["train/epoch_examples_per_second"][epoch][0] * found["train/epoch_seconds"][epoch][0] for epoch in (0, 1)
    ]
    assert counted == pytest.approx([ROWS - BATCH, ROWS], rel=1e-5)
    assert not {"train/epoch_data_wait", "train/epoch_communication"} & set(found)
