"""A dataset without a fixed order is refused on every process of several."""

from __future__ import annotations

import pytest

from tests.cluster.attempt import error_of
from tfdist.testing import run_local

pytestmark = pytest.mark.cluster


def errors() -> list[tuple[str, str]]:
    """Runs on every process: `fit` on batches in no order, and in order."""
    import keras
    import tensorflow as tf

    import tfdist
    from tests.features.table import batches, rows

    strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout=60, peer_timeout=30)
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    options = tf.data.Options()
    options.deterministic = False
    refused = error_of(model.fit, batches(*rows(32)).with_options(options), verbose=0)
    model.fit(batches(*rows(32)), verbose=0)
    return [refused, ("steps", str(int(model.optimizer.iterations)))]


@pytest.mark.timeout(150)
def test_no_order():
    for (kind, message), steps in run_local(errors, workers=2, timeout=120):
        assert kind == "ValueError"
        assert "Received: a dataset with deterministic=False. Every process would have another order" in message
        assert "remove `options.deterministic = False`" in message
        assert steps == ("steps", "2")
