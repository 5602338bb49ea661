"""A strategy of one process in a process of a cluster that is connected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tfdist.testing import run_local

pytestmark = pytest.mark.cluster


def train(with_others: bool) -> dict[str, Any]:
    """Runs on every process: TensorFlow knows the devices of all of them."""
    import keras
    import tensorflow as tf

    import tfdist

    together = tfdist.MultiWorkerMirroredStrategy(start_timeout=60) if with_others else None
    x = np.random.default_rng(0).normal(size=(18, 4)).astype("float32")

    def weights(strategy: Any) -> list[np.ndarray]:
        with strategy.scope():
            keras.utils.set_random_seed(1)
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(x, x[:, :1], batch_size=4, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    alone = tfdist.MirroredStrategy()
    found = {"alone": weights(alone), "devices": len(alone.extended.worker_devices)}
    if together is not None:
        found |= {"together": weights(together), "known": len(tf.config.list_logical_devices("CPU"))}
    return found


def test_a_mirrored_strategy_takes_the_devices_of_its_own_process() -> None:
    (expected,) = run_local(train, workers=1, timeout=120, args=(False,))
    for found in run_local(train, workers=2, timeout=120, args=(True,)):
        assert found["known"] == 2 and found["devices"] == expected["devices"] == 1
        for name in ("alone", "together"):
            for received, one in zip(found[name], expected["alone"], strict=True):
                np.testing.assert_allclose(received, one, atol=1e-6)
