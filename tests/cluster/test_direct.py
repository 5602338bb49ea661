"""Training over shared memory: models that travel in one piece, in several, in buckets, rounded, and on two devices."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from tests.tiers import daily
from tfdist.testing import run_local

pytestmark = pytest.mark.cluster

# By name: options of the strategy, devices of a process, steps in an execution.
CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "one process": ({}, 1, 1),
    "as it is": ({}, 1, 1),
    "in small buckets": ({"bucket_bytes": 100_000}, 1, 1),
    "several steps in an execution": ({}, 1, 3),
    "bf16": ({"compression": "bf16"}, 1, 1),
    "two devices each": ({}, 2, 1),
}


def train(options: dict[str, Any], steps: int, rate: float = 0.01) -> dict[str, Any]:
    """Runs on every process: two layers of 40 kB and 4.9 MB, which is more than a segment of the memory."""
    import keras

    import tfdist

    strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout=60, **options)
    keras.utils.set_random_seed(5)
    with strategy.scope():
        layers = [keras.layers.Dense(1200, "tanh"), keras.layers.Dense(1024, "tanh"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        model.compile(keras.optimizers.SGD(rate, 0.9), "mse", metrics=["mae"], steps_per_execution=steps)
    rng = np.random.default_rng(5)
    # The last batch has three rows: with four replicas, one gets none.
    x, y = rng.standard_normal((19, 8)).astype("f"), rng.standard_normal((19, 1)).astype("f")
    history = model.fit(x, y, batch_size=8, epochs=3, verbose=0)
    return {"history": history.history, "weights": model.get_weights(), "predictions": model.predict(x, verbose=0)}


@functools.cache
def results(name: str) -> list[dict[str, Any]]:
    options, devices, steps = CASES[name]
    workers = 1 if name == "one process" else 2
    return run_local(train, workers=workers, devices_per_worker=devices, timeout=120, args=(options, steps))


@pytest.mark.parametrize("name", daily([name for name in CASES if name != "one process"], "as it is"))
def test_equals_one_process(name: str) -> None:
    (expected,) = results("one process")
    found = results(name)
    for rank, one in enumerate(found):
        for a, b in zip(one["weights"], found[0]["weights"], strict=True):
            np.testing.assert_array_equal(a, b, err_msg=f"rank {rank}")  # bit by bit
        assert_equal(one, expected, tolerance=2e-2 if name == "bf16" else 1e-5)


def assert_equal(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    for a, b in zip(found["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance)
    for key, values in expected["history"].items():
        np.testing.assert_allclose(found["history"][key], values, rtol=tolerance)
    np.testing.assert_allclose(found["predictions"], expected["predictions"], atol=10 * tolerance)


@pytest.mark.nightly
def test_another_training_is_told_apart() -> None:
    """Negative control: half of the learning rate."""
    (other,) = run_local(train, workers=1, timeout=120, args=({}, 1, 0.005))
    (expected,) = results("one process")
    with pytest.raises(AssertionError, match="Mismatched elements"):
        assert_equal(other, expected, tolerance=2e-2)
