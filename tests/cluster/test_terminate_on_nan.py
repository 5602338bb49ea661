"""keras.callbacks.TerminateOnNaN on several workers: what one of them sees stops all of them."""

from __future__ import annotations

import functools

import pytest

from tfdist.testing import run_local

pytestmark = pytest.mark.cluster

BAD = 46  # of the last batch, in the half that rank 1 has


def epochs(bad: int | None) -> int:
    """Runs on every process; returns for how many epochs it has trained."""
    import keras
    import numpy as np

    import tfdist

    strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout=60, peer_timeout=30)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x, y = np.ones((48, 2), "float32"), np.ones((48, 1), "float32")
    if bad is not None:
        y[bad] = np.nan
    callbacks = [keras.callbacks.TerminateOnNaN()]
    history = model.fit(x, y, batch_size=12, epochs=3, shuffle=False, callbacks=callbacks, verbose=0)
    return len(history.epoch)


@functools.cache
def results(bad: int | None) -> list[int]:
    return run_local(epochs, workers=2, args=(bad,), timeout=120)


@pytest.mark.timeout(150)
def test_all_processes_stop():
    assert results(BAD) == [1, 1]


@pytest.mark.timeout(150)
def test_nobody_stops_where_there_is_no_nan():
    assert results(None) == [3, 3]
