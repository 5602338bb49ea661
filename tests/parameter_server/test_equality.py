"""Everything is as in one process: with one execution at a time, and in synchronous training."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest

from tests.logical.test_loss_scaling import CASES
from tests.parameter_server.sections import found, largest, run_sections
from tfdist.testing import run_local

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(330)]

_DEADLINE = 300
# What tests/parameter_server/test_features.py has not; of equality `make test` runs what is there.
SECTIONS = ("Adagrad", "dropout", "tied embedding")
IN_SYNC = (
    *(*SECTIONS, "finished outside", "another variable", "loss scaling", "a vector of losses"),
    *("sums of a step", "a moving average", "rows that are mixed", "metrics that a callback resets"),
)
OUTSIDE = ("names", "a head")


def equality(mode: str, wanted: tuple[str, ...]) -> dict[str, Any]:
    """In the chief: the largest differences, by section."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist
    from tests.cluster.attempt import error_of
    from tests.logical.test_loss_scaling import left_out
    from tests.logical.test_outside_of_the_scope import trained
    from tests.logical.test_row_trial import MinibatchDeviation
    from tests.models import warned
    from tests.parameter_server.models import (
        VOCABULARY,
        Counting,
        Moving,
        click_model,
        clicks,
        dense_model,
        gaps,
        rows,
    )

    strategy = tfdist.ParameterServerStrategy(mode=mode, max_inflight=1, start_timeout=120)
    # The last batch is uneven: 138 = 4 * 32 + 10.
    x, y = clicks(138)

    def adagrad() -> dict[str, float]:
        return gaps(strategy, lambda: click_model(keras.optimizers.Adagrad(0.1)), x, y, validation_data=clicks(40, 5))

    def dropout() -> dict[str, float]:
        layers = keras.layers
        return gaps(strategy, lambda: dense_model("adam", layers.Dropout(0.3), layers.GaussianNoise(0.1)), *rows(138))

    class Late(keras.layers.Layer):
        """Counts its calls, and takes its time for batches of large numbers."""

        def build(self, shape: Any) -> None:
            self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, x: Any) -> Any:
            steps = tf.cast(tf.reduce_max(x), tf.int32)
            with tf.control_dependencies(tf.while_loop(lambda i: i < steps, lambda i: [i + 1], [0])):
                self.count.assign_add(1.0)
            return 0.0 * x + self.count

    def predictions_in_order() -> list[float]:
        with strategy.scope():
            model = keras.Sequential([keras.Input((1,)), Late()])
        return model.predict(np.array([[2e5], [0], [0], [0]], "float32"), batch_size=1, verbose=0)[:, 0].tolist()

    def another_variable() -> tuple[str, str]:
        with strategy.scope():
            count = tf.Variable(0.0, trainable=False, name="count")

        class Counting(keras.layers.Layer):
            def call(self, x: Any) -> Any:
                return x + 0.0 * count.assign_add(1.0)

        with strategy.scope():
            model = dense_model("sgd", Counting())
        return error_of(model.fit, *rows(16), verbose=0)

    def unreduced() -> keras.losses.Loss:
        return keras.losses.BinaryCrossentropy(reduction="none")

    def counting() -> keras.Model:
        model = Counting([keras.Input((8,)), keras.layers.Dense(1, "sigmoid")])
        model.compile("sgd", "binary_crossentropy")
        return model

    def mixed_rows() -> list[str]:
        with strategy.scope():
            model = dense_model("sgd", MinibatchDeviation())
        return warned(lambda: model.fit(*rows(64), batch_size=32, verbose=0), "Received: ")

    def resetting() -> list[list[float]]:
        def reset(batch: int, logs: Any) -> None:
            if batch == 1:
                for metric in model.metrics:
                    metric.reset_state()

        counts = []
        for scope in (tf.distribute.get_strategy().scope(), strategy.scope()):
            with scope:
                model = dense_model("sgd")
            after = keras.callbacks.LambdaCallback(on_train_batch_end=reset)
            # Otherwise all logs are of the last batch.
            with mock.patch.object(strategy, "_max_inflight", 4):
                history = model.fit(*rows(138), batch_size=32, verbose=0, callbacks=[after]).history
            counts.append(history["count"])
        return counts

    def tied() -> keras.Model:
        # The table is read by rows and as a whole.
        ids, table = keras.Input((3,), dtype="int64"), keras.layers.ReversibleEmbedding(VOCABULARY, 4)
        mean = keras.ops.mean(table(ids), axis=1)
        model = keras.Model(ids, table(mean, reverse=True))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
        return model

    sections = {
        "Adagrad": adagrad,
        "dropout": dropout,
        "order of predictions": predictions_in_order,
        "tied embedding": lambda: gaps(strategy, tied, x[1], x[1][:, 0]),
        "another variable": another_variable,
        # A model that was made in the scope.
        "loss scaling": lambda: left_out(strategy),
        "a vector of losses": lambda: gaps(strategy, lambda: dense_model("sgd", loss=unreduced()), *rows(138)),
        "sums of a step": lambda: gaps(strategy, counting, *rows(138)),
        "a moving average": lambda: gaps(strategy, lambda: dense_model("sgd", metrics=[Moving("moving")]), *rows(138)),
        "rows that are mixed": mixed_rows,
        "metrics that a callback resets": resetting,
        "finished outside": lambda: {way: largest(trained(strategy, way), trained(None, way)) for way in OUTSIDE},
    }
    return run_sections({name: sections[name] for name in wanted})


@functools.cache
def results(mode: str) -> dict[str, Any]:
    names = IN_SYNC if mode == "sync" else (*SECTIONS, "order of predictions")
    return run_local(equality, workers=2, ps=2, timeout=_DEADLINE, args=(mode, names))[0]


@pytest.mark.parametrize("name", SECTIONS)
def test_one_execution_at_a_time(name):
    gaps = found(results("async"), name)
    assert gaps.keys() == {"weights", "optimizer", "history", "evaluate", "predict"}
    # Adagrad's rows are updated by themselves.
    assert max(gaps.values()) <= (1e-6 if name == "Adagrad" else 0.0), gaps


def test_one_prediction_at_a_time():
    """A layer counts the batches, of which the first one takes longest."""
    assert found(results("async"), "order of predictions") == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("name", ["Adagrad", "tied embedding", "a vector of losses", "a moving average"])
def test_synchronous(name):
    gaps = found(results("sync"), name)
    assert max(gaps.values()) <= 1e-6, gaps


def test_sums_of_a_step():
    gaps = found(results("sync"), "sums of a step")
    # Sums of hundreds of float32 numbers, in another order.
    assert gaps.pop("history") <= 1e-3
    assert max(gaps.values()) <= 1e-6, gaps


def test_rows_that_are_mixed_are_told():
    (message,) = found(results("sync"), "rows that are mixed")
    assert "(MinibatchDeviation), which mixes the rows of a batch" in message
    assert "Each worker sees its own rows" in message


def test_metrics_that_a_callback_resets():
    assert found(results("sync"), "metrics that a callback resets") == [[74.0], [74.0]]


def test_a_model_that_is_finished_outside_of_the_scope():
    assert max(found(results("sync"), "finished outside").values()) < 2e-5


def test_a_variable_that_no_layer_has_is_refused():
    kind, message = found(results("sync"), "another variable")
    assert kind == "NotImplementedError"
    assert "that changes variable 'count:0', which is not an attribute of one of its layers" in message


def test_overflow_is_that_of_the_batch():
    assert found(results("sync"), "loss scaling") == [two_parts for *_, two_parts in CASES]


def test_each_shard_has_its_own_dropout_mask():
    gaps = found(results("sync"), "dropout")
    assert 1e-4 < gaps["weights"] < 0.5, gaps


# --- What is not equal ------------------------------------------------------------------------------------------------


def asynchronous() -> dict[str, Any]:
    """In the chief: the largest differences of a training with several executions at a time."""
    import tfdist
    from tests.parameter_server.models import click_model, clicks, gaps

    strategy = tfdist.ParameterServerStrategy(start_timeout=120)
    return gaps(strategy, lambda: click_model("adam"), *clicks())


@pytest.mark.timing
def test_asynchronous_training_is_not_equal():
    """What finds no difference above would find one here: two workers' steps meet at some time."""
    (gaps,) = run_local(asynchronous, workers=2, ps=1, timeout=_DEADLINE)
    assert gaps["weights"] > 1e-5, gaps
