"""PowerSGD and TopK between processes: equal to the same written down by hand, and the same bits on all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.compressed_by_hand import TOP_K, assert_both, data, network, sgd, trained, trained_both
from tfdist.testing import run_local

pytestmark = pytest.mark.cluster


def train(options: dict[str, Any]) -> dict[str, list[np.ndarray]]:
    """Runs on every process."""
    import tfdist

    return trained_both(tfdist.MultiWorkerMirroredStrategy, start_timeout=60, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"transport": "direct", "bucket_bytes": 9000},
        pytest.param({"transport": "tensorflow"}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_equals_by_hand(options: dict[str, Any]) -> None:
    assert_both(run_local(train, workers=2, timeout=180, args=(options,)))


def begun() -> list[list[np.ndarray]]:
    """Runs on every process: in a branch of the step, over both transports, and from the first step on."""
    import tfdist

    found = []
    for transport, start_step in [("direct", 3), ("tensorflow", 3), ("direct", 0)]:
        method = tfdist.compression.TopK(0.05, start_step=start_step)
        options = {"compression": method, "transport": transport, "start_timeout": 60}
        found.append(trained(tfdist.MultiWorkerMirroredStrategy(**options), sgd(0.9)).get_weights())
    return found


@pytest.mark.exhaustive
def test_top_k_that_begins_later() -> None:
    (direct, tensorflow, at_once), others = run_local(begun, workers=2, timeout=180)
    for received, expected in zip(direct, others[0], strict=True):
        np.testing.assert_array_equal(received, expected)
    for received, expected in zip(direct, tensorflow, strict=True):
        np.testing.assert_allclose(received, expected, atol=1e-6)
    assert max(np.abs(a - b).max() for a, b in zip(direct, at_once, strict=True)) > 1e-3


def loop() -> tuple[list[np.ndarray], list[str]]:
    """Runs on every process: a loop around `strategy.run`, which no method compresses."""
    import tensorflow as tf

    import tfdist

    strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout=60, compression=TOP_K)
    with strategy.scope():
        model = network(sgd(0.9), normalized=False)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y)) / strategy.num_replicas_in_sync
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    x, y = data()
    workers, worker = strategy.extended._input_position()
    rows = slice(16 // workers * worker, 16 // workers * (worker + 1))
    for _ in range(3):
        strategy.run(step, (x[rows], y[rows]))
    return model.get_weights(), list(strategy._wire.compressor.variables_of(model.optimizer))


@pytest.mark.exhaustive
def test_loops_of_ones_own_send_everything() -> None:
    ((expected, _),) = run_local(loop, workers=1, timeout=120)
    for weights, kept in run_local(loop, workers=2, timeout=120):
        assert kept == []
        for received, one in zip(weights, expected, strict=True):
            np.testing.assert_allclose(received, one, atol=1e-5)
