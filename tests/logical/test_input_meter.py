"""What compiled functions take from their iterators, and what replicas add up: counted where it happens."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks.compression.exchanges import noted_exchanges
from tests.models import in_scope, ready
from tests.tiers import daily
from tfdist.runtime.progress import Lap, ProgressReporter, TrainingMeter
from tfdist.supervision.events import EventLog

ROWS, BATCH = 50, 16  # batches of 16, 16, 16 and 2 rows


def built(strategy: tf.distribute.Strategy, *layers: keras.Layer, **options) -> keras.Model:
    strategy._input_meter.wanted = True
    model = in_scope(
        strategy,
        lambda: ready(keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(3)]), "sgd", "mse", **options),
    )
    return model


def train(model: keras.Model, rows: int = ROWS, epochs: int = 1, **options) -> None:
    model.fit(np.ones((rows, 4)), np.ones((rows, 3)), batch_size=BATCH, epochs=epochs, verbose=0, **options)


@pytest.mark.parametrize(
    ("devices", "steps_per_execution"),
    [(2, 3), *daily([(1, 10), (2, 1)])],
)
def test_batches_and_rows_are_counted_once(
    mirrored: tf.distribute.Strategy, devices: int, steps_per_execution: int
) -> None:
    import tfdist

    strategy = mirrored if devices == 2 else tfdist.MirroredStrategy(["CPU:0"])
    model = built(strategy, steps_per_execution=steps_per_execution)
    before = strategy._input_meter.read()
    train(model, epochs=2)
    waited, *counts = strategy._input_meter.read() - before
    assert counts == [2 * ROWS, 8, 0]
    assert waited > 0


def test_a_meter_leaves_out_the_first_execution_and_the_validation() -> None:
    now = [100.0]
    meter = TrainingMeter(None, clock=lambda: now[0])
    assert meter.lap() == Lap(0.0, 0)
    meter.epoch_begins()
    now[0] += 30  # tracing
    meter.step(3)
    assert meter.lap() == Lap(0.0, 0)
    now[0] += 2
    meter.step(7)
    now[0] += 1
    meter.step(9)
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
    with noted_exchanges() as sent:
        train(built(mirrored, keras.layers.Dense(5)))
    # 4 * 5 + 5 + 5 * 3 + 3 numbers, each tensor in rows of its own of 64 bytes.
    assert sent == [((2 + 1 + 1 + 1, 16), tf.float32)]
    with noted_exchanges() as sent:
        train(built(mirrored, keras.layers.BatchNormalization()))
    # The layer's statistics, then the gradients. Moving statistics of the global batch are the same everywhere.
    assert [shape for shape, _ in sent] == [(3, 4), (4, 16)]


@pytest.mark.parametrize("is_read", [False, True])
def test_a_fit_is_measured_only_for_readers(mirrored: tf.distribute.Strategy, is_read: bool, tmp_path) -> None:
    log = EventLog(None, "one", str(tmp_path / "events")) if is_read else None
    reporter = ProgressReporter(None, log)
    model = built(mirrored)
    mirrored._input_meter.wanted = False
    train(model, epochs=1, callbacks=[reporter])
    assert mirrored._input_meter.wanted is is_read


def test_a_loop_of_ones_own_may_leave_out_the_begin_of_the_training(tmp_path) -> None:
    reporter = ProgressReporter(None, EventLog(None, "one", str(tmp_path / "events")))
    reporter.set_params({"epochs": 1, "steps": None})
    reporter.on_epoch_begin(0)
    reporter.on_train_batch_begin(0)
    reporter.on_train_batch_end(0, {"loss": 0.5})
    reporter.on_epoch_end(0)
    reporter.on_train_end()
    assert reporter._total == 1 and not (tmp_path / "events").exists()


def test_one_process_without_a_strategy_has_rows_of_arrays(tmp_path) -> None:
    """And no waiting, which nobody has measured."""
    import tfdist
    from tests.cluster.test_tensorboard import scalars

    model = ready(keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]), "sgd", "mse")
    train(model, epochs=2, callbacks=[tfdist.callbacks.TensorBoard(tmp_path)])
    found = scalars(tmp_path)
    counted = [
        found["train/epoch_examples_per_second"][epoch][0] * found["train/epoch_seconds"][epoch][0] for epoch in (0, 1)
    ]
    assert counted == pytest.approx([ROWS - BATCH, ROWS], rel=1e-5)
    assert "train/epoch_data_wait" not in found
