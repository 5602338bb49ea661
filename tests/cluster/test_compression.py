"""PowerSGD and TopK between processes: equal to the same written down by hand, and the same bits on all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.compressed_by_hand import TOP_K, assert_both, data, network, sgd, trained_both
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
