"""What Keras' fit reports to the launcher."""

from __future__ import annotations

from typing import Any

import pytest

from tfdist.testing import run_local

pytestmark = pytest.mark.cluster


def reports() -> dict[str, Any]:
    """Runs in a process of its own: what can be read at each callback, over a fit, a prediction and a resumed fit."""
    import contextlib
    import os

    import keras
    import numpy as np

    from tfdist.strategies.hooks import install
    from tfdist.supervision.progress import VARIABLE, ProgressFile, ProgressWriter

    install()
    file = ProgressFile()
    os.environ[VARIABLE] = file.value
    writer = ProgressWriter.from_environment()
    seen: list[tuple] = []

    def look(event: str) -> None:
        progress = file.read()
        seen.append((event, progress.phase, progress.step, progress.resumed_step))

    class Spy(keras.callbacks.Callback):
        resumes_at: int | None = None

        def on_train_begin(self, logs=None):
            look("begin")
            if self.resumes_at is not None:
                writer.resumed(self.resumes_at)

        def on_train_batch_end(self, batch, logs=None):
            look(f"batch {batch}")

        def on_test_batch_end(self, batch, logs=None):
            look(f"test {batch}")

        def on_epoch_end(self, epoch, logs=None):
            look(f"epoch {epoch}")

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = np.zeros((6, 3)), np.zeros((6, 1))
    found: dict[str, Any] = {}

    def fit(spy: Spy, **more) -> list[tuple]:
        seen.clear()
        model.fit(*data, batch_size=2, verbose=0, callbacks=[spy], **more)
        look("end")
        return list(seen)

    found["fit"] = fit(Spy(), epochs=2, validation_data=data, validation_batch_size=6)
    model.predict(data[0], verbose=0)
    look("predicted")
    found["predicted"] = seen[-1]
    spy = Spy()
    spy.resumes_at = 30
    found["resumed"] = fit(spy)
    found["anew"] = fit(Spy())

    class Raises(Spy):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyError

    for name, raises in (("failed fit", lambda: fit(Raises())), ("failed predict", lambda: model.predict("text"))):
        with contextlib.suppress(Exception):
            raises()
        look(name)
        found[name] = seen[-1][1:3]
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_local(reports, 1, timeout=120)[0]


def test_steps_and_phases_of_a_fit(found: dict[str, Any]) -> None:
    assert found["fit"] == [
        ("begin", "starting", 0, None),
        ("batch 0", "training", 1, None),
        ("batch 1", "training", 2, None),
        ("batch 2", "training", 3, None),
        ("test 0", "validating", 3, None),
        ("epoch 0", "saving", 3, None),
        ("batch 0", "training", 4, None),
        ("batch 1", "training", 5, None),
        ("batch 2", "training", 6, None),
        ("test 0", "validating", 6, None),
        ("epoch 1", "saving", 6, None),
        ("end", "done", 6, None),
    ]
    assert found["predicted"] == ("predicted", "done", 6, None)


def test_a_resumed_fit_counts_on(found: dict[str, Any]) -> None:
    assert [entry[1:] for entry in found["resumed"]] == [
        ("starting", 0, None),
        ("training", 31, 30),
        ("training", 32, 30),
        ("training", 33, 30),
        ("saving", 33, 30),
        ("done", 33, 30),
    ]
    assert found["anew"][-1] == ("end", "done", 3, None)


def test_a_fit_that_raises(found: dict[str, Any]) -> None:
    assert found["failed fit"] == found["failed predict"] == ("failed", 1)
