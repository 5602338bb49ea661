"""What users get wrong with several processes: an error in time, on every process, with a name and a remedy."""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.cluster.attempt import attempt, error_of, found_on, logged
from tests.tiers import daily
from tfdist.testing import LocalRunError, run_local

pytestmark = pytest.mark.cluster

_DEADLINE = 240


def assert_error(found: tuple[str, str], kind: str, *words: str) -> None:
    name, message = found
    assert name == kind, message
    for word in words:
        assert word in message


def warned(call: Callable[[], Any]) -> list[str]:
    """The warnings of a call, with the names of files."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [f"{os.path.basename(w.filename)}: {w.message}" for w in caught]


def wrong_data(finished: Path) -> dict[str, Any]:
    """Runs on every process: datasets that differ, shards of the user's own, a rank that does not come to `fit`."""
    import keras
    import numpy as np
    import tensorflow as tf
    from keras import layers, ops

    import tfdist
    from tests.cluster.counting import ROWS, SIZE, one_hot_rows, times_seen
    from tests.features.table import batches, mlp, rows

    strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout=60, peer_timeout=300)
    rank, names = strategy._peers.rank, strategy._peers.names
    with strategy.scope():
        model = mlp()()
    x, y = rows(96)
    fit = functools.partial(model.fit, verbose=0)

    def other_number_of_batches() -> None:
        assert names[0].startswith("worker 0 (127.0.0.1:") and names[1].startswith("worker 1 (127.0.0.1:")
        words = f"Received: number of batches: {names[0]}: 6; {names[1]}: 4."
        error = error_of(fit, batches(*rows(96 - 32 * rank)))
        assert_error(error, "ValueError", words, "Expected: the same dataset", "OFF")

    def other_components() -> None:
        words = [f"Received: components of a batch: {names[0]}: (TensorSpec(", f"; {names[1]}: (TensorSpec("]
        data = batches(x, y) if rank == 0 else batches(x, (y, y))
        for error in (
            error_of(model.evaluate, data, verbose=0),
            error_of(fit, batches(x if rank == 0 else x.astype("float64"), y)),
        ):
            assert_error(error, "ValueError", *words, "Expected: the same dataset of global batches")

    def other_number_of_rows() -> None:
        # Six batches, the last of which is uneven, on both.
        error = error_of(fit, x[: 90 - 5 * rank], y[: 90 - 5 * rank], batch_size=16)
        words = f"Received: number of rows: {names[0]}: 90; {names[1]}: 85."
        assert_error(error, "ValueError", words, "Pass the arrays whole, and the same")

    def arrays_in_parts_of_equal_size() -> None:
        said = logged(fit, x[rank::2], y[rank::2], batch_size=16)
        begin = f"Received: arrays with other numbers on {names[1]} than on {names[0]}, as many rows."
        assert [text[: len(begin)] for text in said] == [begin][rank:]
        # Another machine may round differently.
        assert logged(fit, x * (1 + 1e-6 * rank), y, batch_size=16) == []

    def errors_leave_no_trace() -> dict[str, list]:
        history = fit(x, y, batch_size=16).history
        assert len(history["loss"]) == 1
        return history

    def a_model_without_a_scope() -> None:
        plain = mlp()()

        def calls() -> None:
            for _ in range(2):
                plain.fit(x, y, batch_size=16, verbose=0)
            plain.predict(x, verbose=0)

        (text,) = (message for message in warned(calls) if "strategy.scope" in message)
        assert text.startswith("test_mistakes.py: Received: a call of fit, evaluate or predict for a model that was")
        assert "Each of the 2 processes does all the work by itself, on a model of its own" in text
        assert "Expected: `with strategy.scope(): model = ...; model.compile(...)`" in text

    def anchors_beside_rows() -> None:
        with strategy.scope():
            inputs = [keras.Input((4,)), keras.Input((4,))]
            apart = layers.Lambda(lambda both: both[0] - ops.mean(both[1], 0), output_shape=(4,))(inputs)
            near = keras.Model(inputs, layers.Dense(1)(apart))
            near.compile("sgd", "mse")
        data = tf.data.Dataset.from_tensors(((tf.ones((16, 4)), tf.ones((8, 4))), tf.ones((16, 1)))).repeat(3)
        said = warned(lambda: (near.fit(data, epochs=2, verbose=0), near.evaluate(data, verbose=0)))
        (message,) = (text for text in said if "numbers of rows" in text)
        assert "16 in '0/0', 8 in '0/1', 16 in '1'. Each replica or micro-batch gets 1/2" in message

    def shards_of_the_users_own() -> None:
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        dataset = tf.data.Dataset.from_tensor_slices(one_hot_rows()).shard(2, rank).batch(SIZE)
        seen = times_seen(strategy, dataset.with_options(options))
        assert len(seen) == ROWS and min(seen) > 0, "some rows were never seen"
        assert len(set(seen)) == 1, f"some rows count more than others: {seen}"

    def shards_of_other_sizes() -> None:
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        own = batches(*rows(96 - 32 * rank)).with_options(options)
        words = f"Received: number of batches: {names[0]}: 6; {names[1]}: 4."
        for error in (error_of(fit, own), error_of(model.evaluate, own, verbose=0)):
            assert_error(error, "ValueError", words, "each worker has its own rows", "`dataset.take(n)`")

    def functions_of_other_sizes() -> None:
        def of_worker(context: tf.distribute.InputContext) -> tf.data.Dataset:
            return batches(*rows(96 - 32 * context.input_pipeline_id))

        error = error_of(fit, strategy.distribute_datasets_from_function(of_worker))
        words = f"Received: number of batches: {names[0]}: 6; {names[1]}: 4."
        assert_error(error, "ValueError", words, "each worker has its own rows", "`dataset.take(n)`")
        endless = strategy.distribute_datasets_from_function(
            lambda context: batches(*rows(96)).repeat(None if context.input_pipeline_id else 2)
        )
        error = error_of(fit, endless, steps_per_epoch=3)
        assert_error(error, "ValueError", f"number of batches: {names[0]}: 12; {names[1]}: -1.")

    def strategies_with_other_arguments() -> None:
        for name, values in (("batch_shares", ([2.0, 1.0], [1.0, 2.0])), ("compression", (None, "bf16"))):
            error = error_of(tfdist.MultiWorkerMirroredStrategy, **{name: values[rank]})
            words = f"Received: {name}: {names[0]}: {values[0]!r}; {names[1]}: {values[1]!r}. Expected: the same"
            assert_error(error, "ValueError", words)
        words = "batch_shares=[2.0, 1.0, 1.0] for 2 processes. Expected: a number for each"
        assert_error(error_of(tfdist.MultiWorkerMirroredStrategy, batch_shares=[2, 1, 1]), "ValueError", words)

    class Power(keras.losses.Loss):
        def __init__(self, power: int) -> None:
            super().__init__()
            self._power = power

        def call(self, y_true: Any, y_pred: Any) -> Any:
            return ops.mean(ops.abs(y_true - y_pred) ** self._power, -1)

        def get_config(self) -> dict[str, Any]:
            return {**super().get_config(), "power": self._power}

    def train(own: tf.distribute.Strategy, **given: Any) -> None:
        kinds = (("units", "activation"), ("loss", "loss_weights", "metrics", "optimizer"))
        of_layer, of_compile = ({name: given.pop(name) for name in kind if name in given} for kind in kinds)
        more, call = given.pop("more", []), given.pop("call", "fit")
        with own.scope():
            # It has no weights yet, in whose making all take part.
            hidden = [layers.Dense(**{"units": 2, **of_layer}), *(make() for make in more)]
            model = keras.Sequential([*hidden, layers.Dense(1)])
            model.compile(**{"loss": "mse", "optimizer": "sgd", **of_compile})
        getattr(model, call)(x, y, **{"batch_size": 16, "verbose": 0, **given})

    def sgd(momentum: float) -> dict[str, Any]:
        return {"class_name": "SGD", "config": {"momentum": momentum}}

    def other_programs() -> None:
        for what, values, shown in (
            ("loss", ("mse", "mae"), "loss: {}: 'mse'; {}: 'mae'"),
            ("loss", (Power(2), Power(3)), "power of loss: {}: 2; {}: 3"),
            ("loss_weights", ([1.0], [0.5]), "loss_weights[0]: {}: 1.0; {}: 0.5"),
            ("metrics", (None, ["mae"]), "metrics: {}: None; {}: ['mae']"),
            ("optimizer", (sgd(0.5), sgd(0.9)), "momentum of optimizers[0]: {}: 0.5; {}: 0.9"),
            ("optimizer", ("sgd", "adam"), "class of optimizers[0]: {}: 'SGD'; {}: 'Adam'"),
            ("units", (2, 3), "units of layers[1]: {}: 2; {}: 3"),
            ("activation", ("relu", "tanh"), "activation of layers[1]: {}: 'relu'; {}: 'tanh'"),
            ("more", ([], [layers.ReLU]), "class of layers[2]: {}: 'Dense'; {}: 'ReLU'"),
            ("epochs", (1, 2), "epochs: {}: 1; {}: 2"),
            ("steps_per_epoch", (None, 2), "steps_per_epoch: {}: None; {}: 2"),
            ("class_weight", ({0: 1, 1: 1}, {0: 1, 1: 2}), "1 of class_weight: {}: 1; {}: 2"),
            ("call", ("fit", "evaluate"), "call: {}: 'fit'; {}: 'evaluate'"),
        ):
            words = f"The processes run different programs. Received: {shown.format(*names)}. Expected: the same model"
            assert_error(error_of(train, strategy, **{what: values[rank]}), "ValueError", words)

    def the_same_program_under_other_names() -> None:
        for _ in range(rank):
            keras.Sequential([keras.Input((8,)), layers.Dense(1)])  # Keras counts names
        callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None)][rank:]
        given = {"loss": lambda y_true, y_pred: ops.mean((y_true - y_pred) ** 2, -1), "metrics": ["mae", Power(3)]}
        more = [lambda: layers.Dropout(0.5), lambda: layers.Lambda(lambda x: x)]
        more += [lambda: layers.Dense(2, name=f"of_{rank}")]
        weights = {0: 1.0, 1: np.float32(2)}
        train(strategy, more=more, callbacks=callbacks, verbose=2 * rank, class_weight=weights, **given)
        # Each worker has an optimizer of its own; its settings are not compared.
        local = tfdist.LocalStepsStrategy(sync_every=2)
        train(local, optimizer=sgd([0.5, 0.9][rank]))
        words = f"class of optimizers[0]: {names[0]}: 'SGD'; {names[1]}: 'Adam'"
        assert_error(error_of(train, local, optimizer=["sgd", "adam"][rank]), "ValueError", words)

    def a_rank_that_does_not_come_to_fit() -> None:
        if rank == 1:
            while not finished.exists():
                time.sleep(0.01)
            return
        began = time.monotonic()
        with mock.patch.object(strategy._peers, "timeout", 3.0):
            error = error_of(fit, x, y, batch_size=16)
        finished.touch()
        assert time.monotonic() - began > 2.5
        words = [f"{names[0]} waited 3 s for {names[1]} to start fit, evaluate or predict, and it did not."]
        words += ["Expected: every process makes the same calls", "Look for code that only one rank runs"]
        assert_error(error, "PeerTimeoutError", *words)

    sections = [other_number_of_batches, other_components, other_number_of_rows, arrays_in_parts_of_equal_size]
    sections += [errors_leave_no_trace, a_model_without_a_scope, anchors_beside_rows, shards_of_the_users_own]
    sections += [shards_of_other_sizes, functions_of_other_sizes, strategies_with_other_arguments]
    sections += [other_programs, the_same_program_under_other_names]
    sections += [a_rank_that_does_not_come_to_fit]
    return {section.__name__: attempt(section.__name__, section) for section in sections}


@pytest.mark.timeout(_DEADLINE + 30)
def test_mistakes(tmp_path):
    results = run_local(wrong_data, args=(tmp_path / "finished",), timeout=_DEADLINE)
    found = [[found_on(results, rank, name) for name in results[0]] for rank in (0, 1)]
    assert found[0] == found[1]


def other_devices() -> None:
    """In each process: rank 0 has two devices, rank 1 one."""
    import tensorflow as tf

    import tfdist

    (cpu,) = tf.config.list_physical_devices("CPU")
    count = 2 - tfdist.discover().rank
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    tfdist.MultiWorkerMirroredStrategy(start_timeout=60)


def test_processes_with_other_numbers_of_devices_are_told():
    """They would wait for each other in the first step."""
    with pytest.raises(LocalRunError) as raised:
        run_local(other_devices, 2, timeout=_DEADLINE)
    assert "number of CPU devices to train on is 2 on worker 0 but 1 on worker 1" in str(raised.value)


def other_models() -> tuple[str, str]:
    """In each process: a layer has as many units as the rank says."""
    import keras

    import tfdist

    strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout=60)

    def make() -> None:
        with strategy.scope():
            keras.Sequential([keras.Input((3,)), keras.layers.Dense(4 + strategy._peers.rank, name="own")])

    return error_of(make)


@pytest.mark.nightly
def test_models_with_other_weights_are_named_where_these_are_made():
    """TensorFlow tells the one which waits that the other is not healthy; it takes ten seconds."""
    for error in run_local(other_models, 2, timeout=_DEADLINE):
        words = ["own/kernel' of shape [3,5] on worker 1 (", "where another process creates one of shape [3,4]"]
        assert_error(error, "ValueError", *words, "Expected: the same model and optimizer on every process")


def evaluation_on(one: int) -> tuple[str, str]:
    """In each process: a callback evaluates on one of them."""
    import keras

    import tfdist
    from tests.features.table import mlp, rows

    strategy = tfdist.MultiWorkerMirroredStrategy()

    class Evaluating(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
            if strategy._peers.rank == one:
                self.model.evaluate(*rows(32), verbose=0)

    with strategy.scope():
        model = mlp()()
    error = error_of(model.fit, *rows(32), epochs=2, verbose=0, callbacks=[Evaluating()])
    # Rank 0 keeps the messages: it ends after the other one has its error, too.
    if strategy._peers.rank == 1:
        strategy._peers.tell("has its error", True)
    else:
        strategy._peers.hear("has its error", 1, "fail", within=60.0)
    return error


@pytest.mark.parametrize("one", daily([0, 1], "0"))
def test_a_callback_that_evaluates_on_one_process_only(one):
    """They wait for each other in other places, and say so long before `peer_timeout`, half an hour."""
    for error in run_local(evaluation_on, args=(one,), timeout=_DEADLINE):
        assert_error(error, "PeerTimeoutError", "to start fit, evaluate or predict", "to finish the epoch")
        assert_error(error, "PeerTimeoutError", f"worker {one}")
        assert "A callback that calls evaluate, predict or fit has to do so on every process" in error[1]
