"""What users get wrong with several processes: an error in time, on every process, with a name and a remedy."""

from __future__ import annotations

import functools
import json
import os
import time
import warnings
from typing import Any

import pytest

from tests.cluster.attempt import attempt, error_of, found_on, logged
from tests.cluster.counting import ROWS
from tfdist.testing import LocalRunError, run_local

pytestmark = pytest.mark.cluster

_DEADLINE = 120


def wrong_data() -> dict[str, Any]:
    """Runs on every process: datasets that differ, shards of the user's own, a rank that does not come to `fit`."""
    import tensorflow as tf

    import tfdist
    from tests.cluster.counting import SIZE, one_hot_rows, times_seen
    from tests.features.table import batches, mlp, rows

    found: dict[str, Any] = {}
    for name, value in (("compression", "fp8"), ("batch_norm", "sync")):
        found[name] = error_of(tfdist.MultiWorkerMirroredStrategy, **{name: value})
    strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout=60, peer_timeout=5)
    rank = strategy._peers.rank
    found["names"] = strategy._peers.names
    with strategy.scope():
        model = mlp()()
    found["cardinality"] = error_of(model.fit, batches(*rows(96 - 32 * rank)), verbose=0)
    x, y = rows(96)
    found["components"] = error_of(model.evaluate, batches(x, y) if rank == 0 else batches(x, (y, y)), verbose=0)
    found["dtype"] = error_of(model.fit, batches(x if rank == 0 else x.astype("float64"), y), verbose=0)
    # Six batches, the last of which is uneven, on both.
    found["rows"] = error_of(model.fit, x[: 90 - 5 * rank], y[: 90 - 5 * rank], batch_size=16, verbose=0)
    found["parts of equal size"] = logged(model.fit, x[rank::2], y[rank::2], batch_size=16, verbose=0)
    # Another machine may round differently.
    found["last bits"] = logged(model.fit, x * (1 + 1e-6 * rank), y, batch_size=16, verbose=0)
    found["fit after the errors"] = attempt("fit", lambda: model.fit(x, y, batch_size=16, verbose=0).history)

    def without_scope() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plain = mlp()()
            plain.fit(x, y, batch_size=16, verbose=0)
            plain.fit(x, y, batch_size=16, verbose=0)
            plain.predict(x, verbose=0)
        return [f"{os.path.basename(w.filename)}: {w.message}" for w in caught if "strategy.scope" in str(w.message)]

    found["without a scope"] = attempt("without a scope", without_scope)

    def own_shards() -> list[float]:
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        dataset = tf.data.Dataset.from_tensor_slices(one_hot_rows()).shard(2, rank).batch(SIZE)
        return times_seen(strategy, dataset.with_options(options))

    found["own shards"] = attempt("own shards", own_shards)
    began = time.monotonic()
    if rank == 0:
        found["absent from fit"] = error_of(model.fit, x, y, batch_size=16, verbose=0)
        found["absent from fit, seconds"] = time.monotonic() - began
    else:
        time.sleep(9)
    return found


def wrong_start() -> dict[str, Any]:
    """Runs on every process: everything that goes wrong before training."""
    import tensorflow as tf

    import tfdist

    found: dict[str, Any] = {}
    build = functools.partial(tfdist.MultiWorkerMirroredStrategy, start_timeout=15)
    cluster = tfdist.discover()
    rank = cluster.rank
    found["last place"] = cluster.jobs["worker"][1]

    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    found["legacy Keras"] = error_of(build)
    del os.environ["TF_USE_LEGACY_KERAS"]

    original = {name: os.environ[name] for name in ("TF_CONFIG", "TFDIST_CLUSTER")}
    if rank == 1:
        for name, text in original.items():
            config = json.loads(text)
            config["cluster"]["worker"].append("127.0.0.1:1")
            os.environ[name] = json.dumps(config)
    found["different clusters"] = error_of(build)
    os.environ.update(original)

    began = time.monotonic()
    if rank == 0:
        found["absent from the start"] = error_of(tfdist.MultiWorkerMirroredStrategy, start_timeout=3)
        found["absent from the start, seconds"] = time.monotonic() - began

    tf.zeros(1)
    found["initialised"] = error_of(build)
    return found


@functools.cache
def data_results() -> list[dict[str, Any]]:
    return run_local(wrong_data, timeout=_DEADLINE)


@functools.cache
def start_results() -> list[dict[str, Any]]:
    return run_local(wrong_start, timeout=_DEADLINE)


def assert_error(found: tuple[str, str], kind: str, *words: str) -> None:
    name, message = found
    assert name == kind, message
    for word in words:
        assert word in message


@pytest.mark.timeout(_DEADLINE + 30)
class TestData:
    def test_other_number_of_batches(self, rank):
        names = data_results()[rank]["names"]
        assert names[0].startswith("worker 0 (127.0.0.1:") and names[1].startswith("worker 1 (127.0.0.1:")
        words = f"Received: number of batches: {names[0]}: 6; {names[1]}: 4."
        assert_error(data_results()[rank]["cardinality"], "ValueError", words, "Expected: the same dataset", "OFF")

    @pytest.mark.parametrize("what", ["components", "dtype"])
    def test_other_components(self, rank, what):
        names = data_results()[rank]["names"]
        words = [f"Received: components of a batch: {names[0]}: (TensorSpec(", f"; {names[1]}: (TensorSpec("]
        assert_error(data_results()[rank][what], "ValueError", *words, "Expected: the same dataset of global batches")

    def test_other_number_of_rows(self, rank):
        names = data_results()[rank]["names"]
        words = f"Received: number of rows: {names[0]}: 90; {names[1]}: 85."
        assert_error(data_results()[rank]["rows"], "ValueError", words, "Pass the arrays whole, and the same")

    def test_arrays_in_parts_of_equal_size_are_warned_of(self, rank):
        names = data_results()[rank]["names"]
        said = found_on(data_results(), rank, "parts of equal size")
        assert len(said) == (1 if rank == 0 else 0)
        for text in said:
            assert text.startswith(
                f"Received: arrays with other numbers on {names[1]} than on {names[0]}, as many rows."
            )
        assert found_on(data_results(), rank, "last bits") == []

    def test_a_model_without_a_scope_is_warned_of_once(self, rank):
        (text,) = found_on(data_results(), rank, "without a scope")
        assert text.startswith("test_mistakes.py: Received: a call of fit, evaluate or predict for a model that was")
        assert "Each of the 2 processes does all the work by itself, on a model of its own" in text
        assert "Expected: `with strategy.scope(): model = ...; model.compile(...)`" in text

    def test_errors_leave_no_trace(self, rank):
        histories = [found_on(data_results(), each, "fit after the errors") for each in (0, 1)]
        assert histories[0] == histories[1]
        assert len(histories[rank]["loss"]) == 1

    def test_shards_of_the_users_own(self, rank):
        seen = found_on(data_results(), rank, "own shards")
        assert len(seen) == ROWS and min(seen) > 0, (
            f"these rows were never seen: {[i for i in range(ROWS) if not seen[i]]}"
        )
        assert len(set(seen)) == 1, f"some rows count more than others: {seen}"

    def test_a_rank_that_does_not_come_to_fit(self):
        chief = data_results()[0]
        waiting, absent = chief["names"]
        words = [f"{waiting} waited 5 s for {absent} to start fit, evaluate or predict, and it did not."]
        words += ["Expected: every process makes the same calls", "Look for code that only one rank runs"]
        assert_error(chief["absent from fit"], "PeerTimeoutError", *words)
        assert 4.5 < chief["absent from fit, seconds"] < 8.0

    def test_unknown_values(self, rank):
        found = data_results()[rank]
        assert_error(found["compression"], "ValueError", "compression='fp8'", "Expected one of [None, 'bf16', 'fp16']")
        assert_error(found["batch_norm"], "ValueError", "batch_norm='sync'", "Expected 'global'", "or 'local'")


@pytest.mark.timeout(_DEADLINE + 30)
class TestStart:
    def test_legacy_keras(self, rank):
        words = ["TF_USE_LEGACY_KERAS=1 selects Keras 2", "unset it to use Keras 3"]
        assert_error(start_results()[rank]["legacy Keras"], "ClusterError", *words)

    def test_different_clusters(self, rank):
        assert_error(start_results()[rank]["different clusters"], "ClusterError", "worker 0", "worker 1", "127.0.0.1:1")

    def test_a_rank_that_does_not_start(self):
        chief = start_results()[0]
        assert_error(chief["absent from the start"], "BarrierTimeoutError", "worker 1", chief["last place"])
        assert "worker 0" not in chief["absent from the start"][1]
        assert 2.5 < chief["absent from the start, seconds"] < 6.0

    def test_timeout_is_a_cluster_error(self):
        import tfdist
        from tfdist.cluster.barrier.messages import BarrierTimeoutError

        assert issubclass(BarrierTimeoutError, tfdist.ClusterError)

    def test_tensorflow_already_initialised(self, rank):
        words = ["TensorFlow is already initialised", "Collective ops must be configured at program startup"]
        found = start_results()[rank]["initialised"]
        assert_error(
            found, "ClusterError", *words, "create the strategy before any other TensorFlow or Keras operation"
        )


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


def evaluation_on(one: int) -> tuple[str, str, float]:
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
    began = time.monotonic()
    error = error_of(model.fit, *rows(32), epochs=2, verbose=0, callbacks=[Evaluating()])
    return *error, time.monotonic() - began


@pytest.mark.parametrize("one", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_callback_that_evaluates_on_one_process_only(one):
    """They wait for each other in other places, and say so long before `peer_timeout`, half an hour."""
    for kind, message, seconds in run_local(evaluation_on, args=(one,), timeout=_DEADLINE):
        assert_error((kind, message), "PeerTimeoutError", "to start fit, evaluate or predict", "to finish the epoch")
        assert f"worker {one}" in message
        assert "A callback that calls evaluate, predict or fit has to do so on every process" in message
        assert seconds < 60
