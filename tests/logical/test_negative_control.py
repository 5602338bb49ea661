"""The comparison with one process must fail when a strategy is wrong: each test here breaks one thing."""

from __future__ import annotations

import contextlib
import functools

import keras
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.features import reference
from tests.features.table import BATCH, FEATURES, batches, mlp, rows
from tests.logical.conftest import DEVICES
from tfdist.steps import batch_normalization, keras_step, layer_state, step_logs, step_overrides
from tfdist.strategies import global_batches
from tfdist.testing import assert_transparent, run_local

STOCK_DIFFERS = ("BatchNormalization", "tf.data, shuffled with a seed", "last batch of one row (81 rows)")


def assert_noticed(
    strategy: tf.distribute.Strategy, *names: str, build: object = None, known: str = "", **arguments: object
) -> None:
    """Asserts that the comparison fails, and names what differs.

    Args:
        strategy: is wrong.
        *names: of what must differ. Without one of "evaluate" or "predict", the model is only fitted.
        build: makes the model.
        known: a name for `build` and `data`, where several tests compare with what one process makes of them.
        **arguments: of `assert_transparent`.
    """
    arguments = {"data": rows(), "batch_size": BATCH, "epochs": 1, **arguments}
    whole = any(name.startswith(("evaluate", "predict")) for name in names)
    with (
        contextlib.nullcontext() if whole else reference.only_fit(),
        reference.remembered(f"{known}, {whole}", reference.folder()) if known else contextlib.nullcontext(),
        pytest.raises(AssertionError) as error,
    ):
        assert_transparent(strategy, build or mlp(), **arguments)
    message = str(error.value)
    assert message.startswith(f"{type(strategy).__name__} with 2 replicas does not equal one process."), message
    for name in names:
        assert f"\n  {name}" in message, message


def test_gradients_that_are_not_reduced(mirrored, monkeypatch):
    monkeypatch.setattr(step_overrides, "all_reduce_sum", lambda values, *_, **__: list(values))
    assert_noticed(mirrored, "weight 0", "history 1 (loss)", "predict 0", known="mlp")


def test_gradients_that_are_added_without_weights(mirrored, monkeypatch):
    monkeypatch.setattr(keras_step.KerasStep, "relative_weight", property(lambda step: tf.constant(2.0)))
    assert_noticed(mirrored, "weight 0", known="mlp")


class TestEqualWeights:
    """Every replica counts the same, whatever its number of rows."""

    @pytest.fixture(autouse=True)
    def equal_weights(self, monkeypatch):
        monkeypatch.setattr(keras_step.KerasStep, "relative_weight", property(lambda step: tf.constant(1.0)))

    def test_noticed_where_the_last_batch_does_not_divide(self, mirrored):
        assert_noticed(mirrored, "weight 0", data=rows(83), known="mlp, 83 rows")

    def test_right_where_all_batches_divide(self, mirrored):
        with reference.only_fit():
            gaps = assert_transparent(mirrored, mlp(), rows(96), batch_size=BATCH)
        assert max(gaps.values()) < 1e-5


def test_stand_in_rows_that_count(mirrored, monkeypatch):
    """81 rows: the second replica has none of the last batch's single row."""
    original = global_batches.share_of

    def share_of(*arguments: object, **more: object) -> global_batches.GlobalBatch:
        part = original(*arguments, **more)
        return part._replace(rows=tf.maximum(part.rows, 1))

    monkeypatch.setattr(global_batches, "share_of", share_of)
    assert_noticed(mirrored, "weight 0", "history 1 (loss)", data=rows(81), known="mlp, 81 rows")


def test_batch_norm_of_each_replicas_rows(mirrored):
    local = tfdist.MirroredStrategy(DEVICES, batch_norm="local")
    build = mlp(layers.BatchNormalization)
    assert_noticed(local, "weight 0", build=build, known="BatchNormalization")
    with reference.only_fit(), reference.remembered("BatchNormalization, False", reference.folder()):
        gaps = assert_transparent(mirrored, build, rows(), batch_size=BATCH, epochs=1)
    assert max(gaps.values()) < 1e-5


def test_gradients_of_statistics_without_weights(mirrored, monkeypatch):
    """Those that come back from the other replicas belong to losses of other weights."""
    monkeypatch.setattr(batch_normalization, "_of_all_losses", batch_normalization.all_reduce)
    with reference.only_fit(), pytest.raises(AssertionError, match=r"does not equal one process(.|\n)*weight 0"):
        FEATURES["BatchNormalization in a custom train_step, uneven"](mirrored)


def test_metrics_of_a_step_that_are_taken_for_keras_own(mirrored, monkeypatch):
    monkeypatch.setattr(step_logs, "read_by_keras", lambda step, logs: True)
    noticed = pytest.raises(AssertionError, match=r"does not equal one process(.|\n)*history \d \(hits\)")
    with reference.only_fit(), noticed:
        FEATURES["metrics that a train_step logs under other names"](mirrored)


def test_moving_statistics_that_are_not_averaged(mirrored, monkeypatch):
    """Only this: weights do not depend on them, what `predict` returns does."""
    monkeypatch.setattr(layer_state.ReplicaState, "take_averaged", lambda self: [])
    monkeypatch.setattr(step_overrides, "global_moments", lambda layer: layer._moments)
    build = mlp(layers.BatchNormalization)
    assert_noticed(mirrored, "weight", "predict 0", build=build, known="BatchNormalization")


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(lambda data: data.skip(1), id="first batch dropped"),
        pytest.param(lambda data: data.take(5), id="last batch dropped"),
        pytest.param(lambda data: data.map(lambda x, y: (x[:-1], y[:-1])), id="one row of each batch dropped"),
        pytest.param(lambda data: data.unbatch().batch(BATCH // 2), id="other batch size"),
    ],
)
def test_data_that_is_not_the_users(mirrored, monkeypatch, broken):
    original = global_batches.rows_of_worker
    monkeypatch.setattr(global_batches, "rows_of_worker", lambda data, *arguments: original(broken(data), *arguments))
    assert_noticed(mirrored, "weight 0", data=lambda: batches(*rows()), batch_size=None, known="mlp, batches")


def test_metrics_of_one_replica(mirrored, monkeypatch):
    """A metric that adds nothing up on the second replica."""
    original = keras.metrics.MeanMetricWrapper.update_state

    def update_state(
        self: keras.metrics.Metric, y_true: object, y_pred: object, sample_weight: object = None
    ) -> object:
        context = tf.distribute.get_replica_context()
        if context is not None and context.num_replicas_in_sync > 1 and keras_step.local_replica() == 1:
            y_true, y_pred = y_true[:0], y_pred[:0]
        return original(self, y_true, y_pred, sample_weight)

    monkeypatch.setattr(keras.metrics.MeanMetricWrapper, "update_state", update_state)
    assert_noticed(mirrored, "history 0 (accuracy)", "evaluate 0 (accuracy)", known="mlp")


def stock_rows() -> dict[str, str]:
    """What `tf.distribute.MirroredStrategy` makes of some rows of the feature table, in a process of its own."""
    strategy = tf.distribute.MirroredStrategy()
    found = {}
    for name in ("numpy arrays", *STOCK_DIFFERS):
        try:
            with reference.only_fit():
                FEATURES[name](strategy)
            found[name] = "equal"
        except AssertionError as error:
            found[name] = str(error)
    return found


@functools.cache
def stock_results() -> dict[str, str]:
    return run_local(stock_rows, 1, devices_per_worker=2, timeout=120)[0]


@pytest.mark.exhaustive
def test_stock_strategy_is_right_where_all_batches_divide():
    assert stock_results()["numpy arrays"] == "equal"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", STOCK_DIFFERS)
def test_stock_strategy_differs(name):
    assert "MirroredStrategy with 2 replicas does not equal one process" in stock_results()[name]
