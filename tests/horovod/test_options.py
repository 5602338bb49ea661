"""What is particular to HorovodStrategy: compression, buckets, groups of ranks, dtypes, refusals."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest

from tests.cluster.attempt import attempt, error_of, found_on
from tfdist.testing import run_local

pytestmark = pytest.mark.cluster


def checks() -> dict[str, Any]:
    """Runs on every process."""
    import keras
    import tensorflow as tf

    import tfdist
    from tests.features.table import BATCH, mlp, rows
    from tfdist.testing import train_and_observe

    found: dict[str, Any] = {}
    for name, wrong in (
        ("compression", {"compression": "bf16"}),
        ("bucket_bytes", {"bucket_bytes": 0}),
    ):
        found[name] = error_of(tfdist.HorovodStrategy, **wrong)
    strategy = tfdist.HorovodStrategy(start_timeout=60, peer_timeout=20)
    rank = strategy._peers.rank
    found["names"] = strategy._peers.names
    collectives = strategy.extended._collectives
    total = tf.distribute.ReduceOp.SUM

    def sums() -> dict[str, list]:
        dtypes = ("float16", "bfloat16", "float32", "float64", "int8", "uint16", "int32", "int64", "bool")
        values = {dtype: tf.cast(tf.constant([0, 1, rank]), dtype) for dtype in dtypes}
        return {
            dtype: [str(result.dtype.name), np.asarray(tf.cast(result, "float64")).tolist()]
            for dtype, value in values.items()
            for result in [collectives.all_reduce(total, value)]
        }

    found["sums"] = attempt("sums", sums)
    found["a string"] = error_of(collectives.all_reduce, total, tf.constant("text"))
    gathered = (tf.zeros([0, 2]), tf.ones([3, 2]))[rank], tf.constant([1, 2][: rank + 1], "uint32")
    found["gathered"] = attempt("gathered", lambda: [collectives.all_gather(v).numpy().tolist() for v in gathered])
    found["axis 1"] = attempt(
        "axis 1", lambda: strategy.gather(tf.fill([2, rank + 1], float(rank)), axis=1).numpy().tolist()
    )

    @tf.function
    def count(values: tf.Tensor) -> tf.Tensor:
        return collectives.all_gather(tf.expand_dims(tf.shape(values)[0], 0))

    # The first one makes a graph on each rank, the second one on rank 0 only, of constants both times.
    shapes = [[4, 4], [2, 4]]
    found["constants"] = attempt("constants", lambda: [count(tf.ones([s[rank]])).numpy().tolist() for s in shapes])

    def trained(**options: Any) -> dict[str, np.ndarray]:
        arguments = {"batch_size": BATCH, "epochs": 1}
        with_options = tfdist.HorovodStrategy(**options)
        seen = train_and_observe(with_options, mlp(optimizer=lambda: keras.optimizers.SGD(0.1)), rows(), **arguments)
        # Names of variables carry counters.
        return {name.split(" (")[0]: value for name, value in seen.items()}

    for name, options in (("plain", {}), ("buckets", {"bucket_bytes": 100}), ("fp16", {"compression": "fp16"})):
        found[name] = attempt(name, trained, **options)

    def refused(change: Any) -> tuple[str, str]:
        with strategy.scope():
            model = mlp()()
        x, y = rows()
        return error_of(lambda: change(model, x, y))

    import horovod.keras

    def with_optimizer(model: keras.Model, x: np.ndarray, y: np.ndarray) -> None:
        with strategy.scope():
            model.compile(horovod.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        model.fit(x, y, verbose=0)

    def with_callback(model: keras.Model, x: np.ndarray, y: np.ndarray) -> None:
        model.fit(x, y, verbose=0, callbacks=[horovod.keras.callbacks.MetricAverageCallback()])

    def without_strategy(model: keras.Model, x: np.ndarray, y: np.ndarray) -> None:
        plain = mlp()()
        plain.compile(horovod.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        plain.fit(x, y, verbose=0)

    def in_loss_scaling(model: keras.Model, x: np.ndarray, y: np.ndarray) -> None:
        inner = horovod.keras.DistributedOptimizer(keras.optimizers.SGD(0.1))
        plain = mlp(optimizer=lambda: keras.optimizers.LossScaleOptimizer(inner))()
        plain.fit(x, y, verbose=0)

    for name, change in (
        ("in loss scaling", in_loss_scaling),
        ("DistributedOptimizer", with_optimizer),
        ("callback", with_callback),
        ("without strategy", without_strategy),
    ):
        found[name] = refused(change)

    def other_names() -> dict[str, np.ndarray]:
        """Rank 0 has built a model that the others have not: its layers' names count on."""
        if rank == 0:
            keras.Sequential([keras.Input((8,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
        seen = train_and_observe(strategy, mlp(keras.layers.BatchNormalization), rows(), batch_size=BATCH, epochs=1)
        return {name.split(" (")[0]: value for name, value in seen.items()}

    found["other names"] = attempt("other names", other_names)
    found["another group"] = error_of(tfdist.HorovodStrategy, process_set=[rank])

    def overflow() -> list:
        """One row, which is on rank 1, makes the gradient infinite: no rank may make the step."""
        with strategy.scope():
            keras.utils.set_random_seed(1)
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=4.0), "mse")
        x, y = rows(32)
        x[31] = np.inf
        before = model.get_weights()
        model.fit(x[16:], y[16:], batch_size=16, shuffle=False, verbose=0)
        unchanged = all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))
        model.fit(x[:16], y[:16], batch_size=16, shuffle=False, verbose=0)
        return [unchanged, float(model.optimizer.dynamic_scale.numpy()), [w.tolist() for w in model.get_weights()]]

    found["overflow"] = attempt("overflow", overflow)

    def late() -> tuple[str, str]:
        if rank == 1:
            import time

            time.sleep(1.0)
            return "not asked", ""
        from tfdist.runtime.peers import PeerTimeoutError

        try:
            strategy._peers.hear("never", 1, "say something", within=0.5)
        except PeerTimeoutError as error:
            return "PeerTimeoutError", str(error)
        return "no error", ""

    found["late"] = late()
    return found


@functools.cache
def results() -> list[dict[str, Any]]:
    return run_local(checks, workers=2, timeout=240)


@pytest.mark.parametrize("rank", [0, 1])
class TestOnTwoProcesses:
    @pytest.mark.parametrize("name", ["compression", "bucket_bytes"])
    def test_wrong_arguments(self, rank, name):
        kind, message = results()[rank][name]
        assert kind == "ValueError"
        assert message.startswith("Received: ")
        assert "Expected: " in message
        assert name in message

    def test_processes_are_named_by_their_addresses(self, rank):
        names = results()[rank]["names"]
        assert [name.split(" (")[0] for name in names] == ["worker 0", "worker 1"]

    def test_sums_of_all_dtypes(self, rank):
        sums = found_on(results(), rank, "sums")
        for dtype, (returned, total) in sums.items():
            assert returned == dtype
            assert total == ([0, 1, 1] if dtype == "bool" else [0, 2, 1]), dtype

    def test_text_has_no_sum(self, rank):
        kind, message = results()[rank]["a string"]
        assert (kind, "dtype string" in message) == ("TypeError", True)

    def test_rows_are_gathered_where_a_rank_has_none(self, rank):
        assert found_on(results(), rank, "gathered") == [[[1.0, 1.0]] * 3, [1, 1, 2]]

    def test_another_axis_is_gathered(self, rank):
        assert found_on(results(), rank, "axis 1") == [[0.0, 1.0, 1.0]] * 2

    def test_constants_are_sent_every_time(self, rank):
        assert found_on(results(), rank, "constants") == [[4, 4], [2, 4]]

    def test_buckets_change_nothing(self, rank):
        plain, buckets = (found_on(results(), rank, name) for name in ("plain", "buckets"))
        assert plain.keys() == buckets.keys()
        for name in plain:
            assert np.array_equal(plain[name], buckets[name]), name

    def test_compression_stays_within_its_bound(self, rank):
        plain, fp16 = (found_on(results(), rank, name) for name in ("plain", "fp16"))
        weights = [name for name in plain if name.startswith("weight")]
        gaps = [float(np.abs(plain[name] - fp16[name]).max()) for name in weights]
        # Six steps of 0.1 with gradients below 1: each is rounded to 11 bits on two ranks, and once more as their sum.
        assert 0 < max(gaps) <= 6 * 0.1 * 3 * 2**-11

    @pytest.mark.parametrize("name", ["DistributedOptimizer", "callback", "without strategy", "in loss scaling"])
    def test_horovods_keras_layer_is_refused(self, rank, name):
        kind, message = results()[rank][name]
        assert kind == "ValueError", message
        assert ("MetricAverageCallback" if name == "callback" else "reduces nothing") in message
        assert "tfdist.HorovodStrategy()" in message

    def test_layers_may_have_other_names_on_another_rank(self, rank):
        first, second = (found_on(results(), rank, "other names") for rank in (0, 1))
        assert first.keys() == second.keys()
        assert all(np.array_equal(first[name], second[name]) for name in first)

    def test_a_process_stays_in_its_group(self, rank):
        kind, message = results()[rank]["another group"]
        assert kind == "ClusterError"
        assert f"Received: process_set=[{rank}]. Expected: None, as in this process' first" in message

    def test_all_ranks_leave_out_the_step_that_overflows_on_one(self, rank):
        unchanged, scale, weights = found_on(results(), rank, "overflow")
        assert unchanged
        assert scale == 2.0
        assert weights == found_on(results(), 1 - rank, "overflow")[2]
        assert np.isfinite(np.concatenate([np.ravel(w) for w in weights])).all()


def test_who_does_not_answer_is_named():
    kind, message = results()[0]["late"]
    assert kind == "PeerTimeoutError"
    assert message.startswith("worker 0 (127.0.0.1:")
    assert "for worker 1 (127.0.0.1:" in message


def groups(sets: list) -> Any:
    """Runs on every process: two pairs of ranks, each of which trains a model of its own."""
    import tfdist
    from tests.features.table import BATCH, mlp, rows
    from tfdist.testing import train_and_observe

    rank = tfdist.discover().rank
    strategy = tfdist.HorovodStrategy(process_set=sets[rank], start_timeout=60, peer_timeout=60)
    data = rows(48, seed=1 + rank // 2)
    seen = train_and_observe(strategy, mlp(), data, batch_size=BATCH, epochs=1)
    return strategy.num_replicas_in_sync, strategy.is_chief, {name: value.tolist() for name, value in seen.items()}


@pytest.mark.exhaustive
def test_groups_of_ranks_train_apart():
    results = run_local(groups, workers=4, args=([[0, 1], [1, 0], [2, 3], (2, 3)],), timeout=180)
    assert [replicas for replicas, _, _ in results] == [2] * 4
    assert [chief for _, chief, _ in results] == [True, False, True, False]
    first, second, third, fourth = (seen for _, _, seen in results)
    assert first == second
    assert third == fourth
    assert first != third


def wrong_groups(sets: list) -> tuple[str, str]:
    import tfdist

    return error_of(tfdist.HorovodStrategy, process_set=sets[tfdist.discover().rank], start_timeout=60)


@pytest.mark.parametrize(
    ("sets", "text"),
    [
        ([[0, 1], [1]], "process_set=[0, 1], but rank 1 has process_set=[1]"),
        ([[0], None], "no process_set on rank 1"),
        ([[0, 1, 2], [0, 1, 2]], "there is no rank 2 (of 2)"),
    ],
)
def test_groups_that_do_not_fit(sets, text):
    for kind, message in run_local(wrong_groups, workers=2, args=(sets,), timeout=90):
        assert kind == "ClusterError"
        assert text in message


def initialized_before() -> tuple[str, str]:
    import horovod.tensorflow as hvd

    import tfdist

    hvd.init()
    return error_of(tfdist.HorovodStrategy, start_timeout=60)


def test_an_init_of_the_programs_own_is_noticed():
    for kind, message in run_local(initialized_before, workers=2, timeout=90):
        assert kind == "ClusterError"
        assert "Received: 2 processes, started by tfdist, and hvd.init() before tfdist.HorovodStrategy()" in message


def dispatched() -> list:
    import random

    import keras

    import tfdist

    keras.utils.set_random_seed(7)
    with_default = tfdist.MultiWorkerMirroredStrategy(start_timeout=60)
    drawn = [random.random(), float(np.random.rand())]
    return [type(with_default).__name__, with_default.num_replicas_in_sync, drawn]


@functools.cache
def dispatched_results() -> list[list]:
    return run_local(dispatched, workers=2, env={"TFDIST_TRANSPORT": "horovod"}, timeout=90)


def test_multi_worker_strategy_uses_the_transport_of_the_launcher():
    assert [result[:2] for result in dispatched_results()] == [["HorovodStrategy", 2]] * 2


def test_the_programs_random_numbers_are_those_of_one_process():
    alone = [random.Random(7).random(), float(np.random.RandomState(7).rand())]
    assert [result[2] for result in dispatched_results()] == [alone] * 2
