"""The comparison with one process must fail when a strategy is wrong: each test here breaks one thing."""

from __future__ import annotations

import contextlib

import keras
import pytest
import tensorflow as tf
from keras import layers

from tests.features import reference
from tests.features.table import BATCH, DERIVED, FEATURES, batches, mlp, rows
from tfdist.steps import derived_logs, keras_step
from tfdist.strategies.data_parallel import dataset, replica_step, state
from tfdist.strategies.data_parallel import strategy as data_parallel
from tfdist.testing import assert_transparent


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
    monkeypatch.setattr(replica_step, "all_reduce_sum", lambda values, *_, **__: list(values))
    assert_noticed(mirrored, "weight 0", "history 1 (loss)", "predict 0", known="mlp")


def test_logs_that_are_computed_from_the_metrics_of_a_replica(mirrored, monkeypatch):
    monkeypatch.setattr(derived_logs, "metric_of", lambda tensor: None)
    with pytest.raises(AssertionError, match=r"history \d \(val_root\)"):
        FEATURES[DERIVED](mirrored)


def test_replicas_that_count_the_same_whatever_their_rows(mirrored, monkeypatch):
    monkeypatch.setattr(keras_step.KerasStep, "relative_weight", property(lambda step: tf.constant(1.0)))
    assert_noticed(mirrored, "weight 0", data=rows(83), known="mlp, 83 rows")


def test_stand_in_rows_that_count(mirrored, monkeypatch):
    """81 rows: the second replica has none of the last batch's single row."""
    original = dataset.cut_for_replica

    def cut_for_replica(*arguments: object, **more: object) -> dataset.ReplicaBatch:
        part = original(*arguments, **more)
        return part._replace(rows=tf.maximum(part.rows, 1))

    monkeypatch.setattr(dataset, "cut_for_replica", cut_for_replica)
    assert_noticed(mirrored, "weight 0", "history 1 (loss)", data=rows(81), known="mlp, 81 rows")


@pytest.mark.nightly
def test_gathered_rows_whose_gradients_have_no_weights(mirrored, monkeypatch):
    monkeypatch.setattr(replica_step, "gather_with_weights", lambda step, gather: gather)
    with reference.only_fit(), pytest.raises(AssertionError, match="does not equal one process"):
        FEATURES["all_gather in the loss of a train_step (clip)"](mirrored)


@pytest.mark.nightly
def test_metrics_of_a_step_that_are_taken_for_keras_own(mirrored, monkeypatch):
    monkeypatch.setattr(replica_step, "are_read_by_keras", lambda step, logs: True)
    # The devices of one process would add up their metrics all the same.
    monkeypatch.setattr(data_parallel, "metric_of", lambda tensor: None)
    noticed = pytest.raises(AssertionError, match=r"does not equal one process(.|\n)*history \d \(hits\)")
    with reference.only_fit(), noticed:
        FEATURES["metrics that a train_step logs under other names"](mirrored)


def test_moving_statistics_that_are_not_averaged(mirrored, monkeypatch):
    """Only this: weights do not depend on them, what `predict` returns does."""
    monkeypatch.setattr(state.ReplicaState, "take_averaged", lambda self: [])
    monkeypatch.setattr(replica_step, "global_moments", lambda layer: layer._moments)
    build = mlp(layers.BatchNormalization)
    assert_noticed(mirrored, "weight", "predict 0", build=build, known="BatchNormalization")


def test_first_batch_is_dropped(mirrored, monkeypatch):
    original = dataset.cut_for_worker
    monkeypatch.setattr(dataset, "cut_for_worker", lambda data, *arguments: original(data.skip(1), *arguments))
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
