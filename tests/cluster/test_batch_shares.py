"""`batch_shares="auto"` on two processes: who is faster gets more rows, and the result stays that of one process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.cluster.attempt import error_of
from tests.tiers import daily
from tfdist.testing import run_local

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
# Seconds a row, of each rank.
COST = (0.001, 0.003)


def trained(kind: str, folder: str = "", epochs: int = 4, waits: bool = False) -> dict[str, Any]:
    """Trains under a strategy on several processes, or on this one alone; returns what came of it.

    Args:
        kind: of the data, or what else is special.
        folder: of backups; "" for none.
        epochs: until the end.
        waits: whether rows take their time; else the measured time is made up.
    """
    import keras
    import tensorflow as tf

    import tfdist
    from tfdist.strategies.data_parallel import shares as module

    is_alone = not tfdist.discover().num_workers > 1
    strategy = tf.distribute.get_strategy() if is_alone else tfdist.MultiWorkerMirroredStrategy(batch_shares="auto")
    cost = 0 if is_alone else COST[strategy._peers.rank]
    seen: list[tuple[int, int]] = []

    class Model(keras.Sequential):
        def train_step(self, data: tuple) -> dict:
            def note(rows: int, replica: int) -> None:
                seen.append((int(replica), int(rows)))
                time.sleep(int(rows) * cost if waits else 0)

            context = tf.distribute.get_replica_context()
            noted = tf.numpy_function(note, [tf.shape(data[0])[0], context.replica_id_in_sync_group], [])
            with tf.control_dependencies([noted]):
                return super().train_step(tf.nest.map_structure(tf.identity, data))

    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(163, 4)).astype("float32")
    y = x.sum(1, keepdims=True)
    with strategy.scope():
        layers = [keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.BatchNormalization()]
        model = Model([*layers, keras.layers.Dense(1)])
        model.compile("adam", "mse", metrics=["mae"], steps_per_execution=2 if kind == "executions" else 1)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(200, seed=3).batch(6 if kind == "endless" else 16)
    arguments: dict[str, Any] = {"x": dataset}
    if kind == "arrays":
        arguments = {"x": x, "y": y, "batch_size": 16, "validation_split": 0.2}
    elif kind == "endless":
        # Batches of another fit, and those that validate, are not timed.
        large = tf.data.Dataset.from_tensor_slices((x, y)).batch(64)
        arguments = {"x": dataset.repeat(), "steps_per_epoch": 11, "validation_data": large}
    callbacks = [tfdist.callbacks.BackupAndRestore(folder, delete_checkpoint=False)] if folder else []

    def made_up(callback: module.ShareBySpeed, batch: int, logs: dict | None = None) -> None:
        callback._computed.append(cost * seen[-1][1])

    fake = mock.patch.object(module.ShareBySpeed, "on_train_batch_end", made_up)
    with contextlib.nullcontext() if waits else fake:
        if kind == "endless":
            model.fit(large, verbose=0)
        history = model.fit(**arguments, epochs=epochs, verbose=0, callbacks=callbacks)
    return {
        "weights": model.get_weights(),
        "history": {name: np.array(values) for name, values in history.history.items()},
        "predicted": [model.predict(x[:21], batch_size=16, verbose=0)],
        "evaluated": [np.array(model.evaluate(dataset, verbose=0))],
        "rows": seen,
        "shares": None if is_alone else strategy._automatic_shares.shares,
    }


def assert_equal(received: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    for name in ("weights", "predicted", "evaluated"):
        for one, other in zip(received[name], expected[name], strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=tolerance, err_msg=name)
    assert set(received["history"]) == set(expected["history"])
    for name, values in expected["history"].items():
        np.testing.assert_allclose(received["history"][name], values, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize(
    ("kind", "devices"),
    daily(
        [
            pytest.param("dataset", 1, id="a dataset"),
            pytest.param("arrays", 1, id="arrays"),
            pytest.param("endless", 1, id="an endless dataset, read ahead"),
            pytest.param("executions", 1, id="several steps a call"),
            pytest.param("dataset", 2, id="two devices each"),
        ],
        "an endless dataset, read ahead",
    ),
)
def test_shares_change_and_the_result_does_not(kind: str, devices: int) -> None:
    (alone,) = run_local(trained, 1, args=(kind,), timeout=240)
    together = run_local(trained, 2, args=(kind,), devices_per_worker=devices, timeout=240)
    before, after = (3, (4, 2)) if kind == "endless" else (8, (12, 4))
    for rank, found in enumerate(together):
        # The times are made up: after the first epoch, the shares are right.
        np.testing.assert_allclose(found["shares"], [0.75, 0.25], atol=1e-9)
        for place in range(devices):
            rows = [count for replica, count in found["rows"] if replica == rank * devices + place]
            assert {before // devices, after[rank] // devices} <= set(rows)
        assert_equal(found, alone, 2e-6)
    assert_equal(together[1], together[0], 0)


@pytest.mark.nightly
def test_a_resumed_run_goes_on_with_the_shares_that_it_had(tmp_path: Path) -> None:
    """Bit by bit, as far as shares do not change again by measured times; here these are made up."""
    whole = run_local(trained, 2, args=("dataset", str(tmp_path / "whole"), 4), timeout=240)
    run_local(trained, 2, args=("dataset", str(tmp_path / "parts"), 2), timeout=240)
    rest = run_local(trained, 2, args=("dataset", str(tmp_path / "parts"), 4), timeout=240)
    for rank, found in enumerate(rest):
        assert {count for _, count in found["rows"]} == {count for _, count in whole[rank]["rows"][22:]}
        for one, other in zip(found["weights"], whole[rank]["weights"], strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.timing
def test_the_measured_time_is_that_of_the_rows() -> None:
    """One worker needs 3 ms a row and the other one 1 ms; both have the same time, as seen from outside."""
    for found in run_local(trained, 2, args=("dataset", "", 4, True), timeout=240):
        np.testing.assert_allclose(found["shares"], [0.75, 0.25], atol=0.08)


def refused() -> list[tuple[str, str]]:
    import tfdist

    make: Callable[..., Any] = tfdist.MultiWorkerMirroredStrategy
    return [
        error_of(make, batch_shares="auto", transport="tensorflow"),
        error_of(tfdist.FullyShardedStrategy, batch_shares="auto"),
        error_of(make, batch_shares="auto"),
    ]


@pytest.mark.nightly
def test_a_transport_that_cannot_tell_is_refused() -> None:
    for error, sharded, allowed in run_local(refused, 2, timeout=240):
        assert error[0] == sharded[0] == "ValueError", error
        assert "batch_shares='auto' with a transport that does not say how long it waits" in error[1]
        assert "batch_shares='auto' under FullyShardedStrategy, which gathers weights while" in sharded[1]
        assert allowed[0] == "no error"


def trained_on_shards() -> list[float]:
    """Runs on every process."""
    import keras
    import tensorflow as tf

    import tfdist

    strategy = tfdist.MultiWorkerMirroredStrategy(batch_shares="auto")
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    x = np.ones((80, 4), "float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(8)
    seconds = 1.0 + strategy._peers.rank
    fake = mock.patch("tfdist.strategies.data_parallel.shares.statistics.median", lambda computed: seconds)
    with fake:
        model.fit(dataset.with_options(options), epochs=2, verbose=0, validation_data=dataset)
    return strategy._automatic_shares.shares


@pytest.mark.nightly
def test_what_is_not_cut_by_shares_does_not_change_them() -> None:
    assert run_local(trained_on_shards, 2, timeout=240) == [[0.5, 0.5]] * 2
