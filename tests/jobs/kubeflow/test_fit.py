"""A fit in the pods of a TrainJob: Kubeflow hears of it, from the chief alone, and nothing else becomes different."""

from __future__ import annotations

from typing import Any

import pytest

from tests.jobs.kubeflow.controller import Controller
from tfdist.testing import run_local

pytestmark = pytest.mark.cluster


def train(env: dict[str, str]) -> dict[str, Any]:
    """Runs in each process: a fit whose user has written nothing for Kubeflow."""
    import os

    import keras
    import numpy as np

    import tfdist
    from tfdist.supervision import trainjob_status

    # A busy machine may take long for a handshake; the last report is sent as the process ends.
    trainjob_status._TIMEOUT = trainjob_status._LAST_TIMEOUT = 60.0
    os.environ.update(env)
    strategy = tfdist.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
    data = np.random.default_rng(0).normal(size=(24, 3)), np.ones((24, 1))
    history = model.fit(*data, batch_size=8, epochs=2, verbose=0, validation_data=data)
    return {name: values[-1] for name, values in history.history.items()}


def test_the_chief_tells_how_far_the_training_is(controller: Controller) -> None:
    results = run_local(train, 2, args=(controller.env,), timeout=180)
    told = [body["trainerStatus"] for _, body in controller.heard]
    # After the first step, perhaps after later ones, and at the end, which replaces what is not sent.
    percentages = [status["progressPercentage"] for status in told]
    assert {*percentages} <= {100 * step // 6 for step in range(1, 7)}
    assert percentages == sorted(percentages) and percentages[-1] == 100
    assert told[-1]["estimatedRemainingSeconds"] == 0
    metrics = {one["name"]: float(one["value"]) for one in told[-1]["metrics"]}
    assert metrics == pytest.approx({**results[0], "epoch": 2, "epochs": 2, "step": 3}, rel=1e-5)
    assert {"loss", "mae", "val_loss", "val_mae"} <= metrics.keys()
    assert {headers["Authorization"] for headers, _ in controller.heard} == {"Bearer first.token"}


@pytest.mark.nightly
def test_a_training_is_the_same_whoever_listens(controller: Controller) -> None:
    controller.answer = lambda handler: handler.wfile.write(b"garbage\r\n\r\n")
    disturbed = run_local(train, 2, args=(controller.env,), timeout=180)
    assert controller.heard and disturbed == run_local(train, 2, args=({},), timeout=180)
