"""What is particular to HorovodStrategy: compression, buckets, dtypes, refusals."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest

from tests.cluster.attempt import attempt, error_of, found_on
from tfdist.testing import run_local

pytestmark = pytest.mark.cluster


def checks() -> dict[str, Any]:
    """Runs on every process; each section asserts what it is about."""
    import horovod.keras
    import keras
    import tensorflow as tf

    import tfdist
    from tests.features.table import BATCH, mlp, rows
    from tfdist.runtime.peers import PeerTimeoutError
    from tfdist.testing import train_and_observe

    strategy = tfdist.HorovodStrategy(start_timeout=60, peer_timeout=20)
    rank, names = strategy._peers.rank, strategy._peers.names
    collectives = strategy.extended._collectives
    total = tf.distribute.ReduceOp.SUM

    def wrong_arguments() -> None:
        for name, value in (("compression", "bf16"), ("bucket_bytes", 0)):
            kind, message = error_of(tfdist.HorovodStrategy, **{name: value})
            assert kind == "ValueError" and message.startswith("Received: ")
            assert "Expected" in message and name in message

    def processes_are_named_by_their_addresses() -> None:
        assert [name.split(" (")[0] for name in names] == ["worker 0", "worker 1"]

    def sums_of_all_dtypes() -> None:
        for dtype in ("float16", "bfloat16", "float32", "float64", "int8", "uint16", "int32", "int64", "bool"):
            result = collectives.all_reduce(total, tf.cast(tf.constant([0, 1, rank]), dtype))
            assert result.dtype.name == dtype
            expected = [0, 1, 1] if dtype == "bool" else [0, 2, 1]
            assert np.asarray(tf.cast(result, "float64")).tolist() == expected, dtype
        kind, message = error_of(collectives.all_reduce, total, tf.constant("text"))
        assert kind == "TypeError" and "dtype string" in message

    def gathers() -> None:
        """Also where a rank has no rows, along another axis, and of constants every time."""
        given = (tf.zeros([0, 2]), tf.ones([3, 2]))[rank], tf.constant([1, 2][: rank + 1], "uint32")
        gathered = [collectives.all_gather(value).numpy().tolist() for value in given]
        assert gathered == [[[1.0, 1.0]] * 3, [1, 1, 2]]
        columns = strategy.gather(tf.fill([2, rank + 1], float(rank)), axis=1)
        assert columns.numpy().tolist() == [[0.0, 1.0, 1.0]] * 2

        @tf.function
        def count(values: tf.Tensor) -> tf.Tensor:
            return collectives.all_gather(tf.expand_dims(tf.shape(values)[0], 0))

        # The first one makes a graph on each rank, the second one on rank 0 only, of constants both times.
        for sizes in ([4, 4], [2, 4]):
            assert count(tf.ones([sizes[rank]])).numpy().tolist() == sizes

    def buckets_change_nothing_and_compression_stays_within_its_bound() -> None:
        def trained(**options: Any) -> dict[str, np.ndarray]:
            build = mlp(optimizer=lambda: keras.optimizers.SGD(0.1))
            seen = train_and_observe(tfdist.HorovodStrategy(**options), build, rows(), batch_size=BATCH, epochs=1)
            # Names of variables carry counters.
            return {name.split(" (")[0]: value for name, value in seen.items()}

        plain, buckets, fp16 = trained(), trained(bucket_bytes=100), trained(compression="fp16")
        assert plain.keys() == buckets.keys()
        for name in plain:
            assert np.array_equal(plain[name], buckets[name]), name
        gaps = [float(np.abs(plain[name] - fp16[name]).max()) for name in plain if name.startswith("weight")]
        # Six steps of 0.1 with gradients below 1: each is rounded to 11 bits on two ranks, and once more as their sum.
        assert 0 < max(gaps) <= 6 * 0.1 * 3 * 2**-11

    def horovods_keras_layer_is_refused() -> None:
        x, y = rows()

        def own() -> keras.optimizers.Optimizer:
            return horovod.keras.DistributedOptimizer(keras.optimizers.SGD(0.1))

        def with_optimizer() -> None:
            with strategy.scope():
                model = mlp()()
                model.compile(own(), "mse")
            model.fit(x, y, verbose=0)

        def with_callback() -> None:
            with strategy.scope():
                model = mlp()()
            model.fit(x, y, verbose=0, callbacks=[horovod.keras.callbacks.MetricAverageCallback()])

        def without_strategy() -> None:
            plain = mlp()()
            plain.compile(own(), "mse")
            plain.fit(x, y, verbose=0)

        def in_loss_scaling() -> None:
            inner = own()
            mlp(optimizer=lambda: keras.optimizers.LossScaleOptimizer(inner))().fit(x, y, verbose=0)

        for fit in (with_optimizer, with_callback, without_strategy, in_loss_scaling):
            kind, message = error_of(fit)
            assert kind == "ValueError", message
            assert ("MetricAverageCallback" if fit is with_callback else "reduces nothing") in message
            assert "tfdist.HorovodStrategy()" in message

    def split_slots_change_nothing() -> None:
        """Each rank cuts its rows out of the sum of all."""

        def trained(wrap: Any) -> list[np.ndarray]:
            with strategy.scope():
                keras.utils.set_random_seed(1)
                inner = wrap(keras.optimizers.SGD(0.1, 0.9, global_clipnorm=0.05))
                model = mlp(optimizer=lambda: keras.optimizers.LossScaleOptimizer(inner))()
            model.fit(*rows(), batch_size=BATCH, shuffle=False, verbose=0)
            return model.get_weights()

        for one, other in zip(trained(tfdist.ShardedOptimizer), trained(lambda inner: inner), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)

    def layers_may_have_other_names_on_another_rank() -> list[np.ndarray]:
        """Rank 0 has built a model that the others have not: its layers' names count on."""
        if rank == 0:
            keras.Sequential([keras.Input((8,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
        build = mlp(keras.layers.BatchNormalization)
        return [*train_and_observe(strategy, build, rows(), batch_size=BATCH, epochs=1).values()]

    def all_ranks_leave_out_the_step_that_overflows_on_one() -> list[np.ndarray]:
        """One row, which is on rank 1, makes the gradient infinite: no rank may make the step."""
        with strategy.scope():
            keras.utils.set_random_seed(1)
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=4.0), "mse")
        x, y = rows(32)
        x[31] = np.inf
        before = model.get_weights()
        model.fit(x[16:], y[16:], batch_size=16, shuffle=False, verbose=0)
        np.testing.assert_equal(model.get_weights(), before)
        model.fit(x[:16], y[:16], batch_size=16, shuffle=False, verbose=0)
        assert float(model.optimizer.dynamic_scale.numpy()) == 2.0
        assert all(np.isfinite(weight).all() for weight in model.get_weights())
        return model.get_weights()

    def who_does_not_answer_is_named() -> None:
        if rank == 1:
            return time.sleep(1.0)
        with pytest.raises(PeerTimeoutError, match=r"^worker 0 \(127\.0\.0\.1:.*for worker 1 \(127\.0\.0\.1:"):
            strategy._peers.hear("never", 1, "say something", within=0.5)

    sections = [wrong_arguments, processes_are_named_by_their_addresses, sums_of_all_dtypes, gathers]
    sections += [buckets_change_nothing_and_compression_stays_within_its_bound, horovods_keras_layer_is_refused]
    sections += [layers_may_have_other_names_on_another_rank, all_ranks_leave_out_the_step_that_overflows_on_one]
    sections += [split_slots_change_nothing, who_does_not_answer_is_named]
    return {section.__name__: attempt(section.__name__, section) for section in sections}


def test_on_two_processes():
    results = run_local(checks, workers=2, timeout=240)
    for name in results[0]:
        np.testing.assert_equal(found_on(results, 0, name), found_on(results, 1, name))


def initialized_before() -> tuple[str, str]:
    import horovod.tensorflow as hvd

    import tfdist

    hvd.init()
    return error_of(tfdist.HorovodStrategy, start_timeout=60)


def test_an_init_of_the_programs_own_is_noticed():
    for kind, message in run_local(initialized_before, workers=2, timeout=90):
        assert kind == "ClusterError"
        assert "Received: 2 processes, started by tfdist, of which Horovod connects" in message


def dispatched() -> list:
    import keras

    import tfdist

    keras.utils.set_random_seed(7)
    with_default = tfdist.MultiWorkerMirroredStrategy(start_timeout=60)
    drawn = [random.random(), float(np.random.rand())]
    return [type(with_default).__name__, with_default.num_replicas_in_sync, drawn]


def test_multi_worker_strategy_uses_the_transport_of_the_launcher():
    """The program's random numbers are those of one process."""
    alone = [random.Random(7).random(), float(np.random.RandomState(7).rand())]
    results = run_local(dispatched, workers=2, env={"TFDIST_TRANSPORT": "horovod"}, timeout=90)
    assert results == [["HorovodStrategy", 2, alone]] * 2
