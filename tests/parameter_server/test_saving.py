"""Files: saved models load with and without the strategy, and callbacks that save and go on."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.parameter_server.sections import found, largest, part
from tfdist.testing import run_local

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(210)]

_DEADLINE = 180
SECTIONS = ("whole_model", "checkpoints", "backups")


def saving(place: Path) -> dict[str, Any]:
    """In the chief: what is saved, loaded and gone on with; each section asserts what it is about."""
    import keras
    import numpy as np

    import tfdist
    from tests.parameter_server.models import BATCH, click_model, clicks, dense_model, rows

    strategy = tfdist.ParameterServerStrategy(max_inflight=1, start_timeout=120)
    x, y = clicks()

    def adam() -> keras.Model:
        keras.utils.set_random_seed(1)
        with strategy.scope():
            return click_model(keras.optimizers.Adam(0.01))

    def fit(model: keras.Model, **arguments: Any) -> dict[str, list]:
        return model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False, **arguments).history

    def assert_equal(model: keras.Model, other: keras.Model) -> None:
        assert largest(model.get_weights(), other.get_weights()) == 0.0
        slots = ([np.asarray(variable) for variable in m.optimizer.variables] for m in (model, other))
        assert largest(*slots) == 0.0

    def whole_model() -> None:
        model = adam()
        fit(model)
        model.save(place / "model.keras")
        plain = keras.models.load_model(place / "model.keras")
        with strategy.scope():
            loaded = keras.models.load_model(place / "model.keras")
        expected = model.predict(x, verbose=0)
        for other in (plain, loaded):
            assert largest([expected], [other.predict(x, verbose=0)]) == 0.0
            assert_equal(model, other)
        # All of them go on alike.
        for each in (model, plain, loaded):
            fit(each)
            assert_equal(model, each)
        assert int(loaded.optimizer.iterations.numpy()) == 42
        assert {variable.value.device[:8] for variable in loaded.variables} == {"/job:ps/"}

    def checkpoints() -> None:
        folder = place / "checkpoints"
        with strategy.scope():
            model = dense_model()
        in_epochs = keras.callbacks.ModelCheckpoint(
            folder / "batch-{epoch}-{batch}.weights.h5", save_freq=5, save_weights_only=True
        )
        callbacks = [keras.callbacks.ModelCheckpoint(folder / "epoch-{epoch}.keras"), in_epochs]
        model.fit(*rows(), batch_size=BATCH, epochs=2, verbose=0, callbacks=callbacks)
        plain = keras.models.load_model(folder / "epoch-2.keras", custom_objects={"Count": keras.metrics.Mean})
        assert largest(model.get_weights(), plain.get_weights()) == 0.0
        saved = ["1-10", "1-15", "1-20", "1-5", "2-14", "2-19", "2-4", "2-9"]
        expected = [*(f"batch-{name}.weights.h5" for name in saved), "epoch-1.keras", "epoch-2.keras"]
        assert sorted(path.name for path in folder.iterdir()) == expected

    def backups() -> None:
        class Stop(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                if epoch == 2:
                    raise InterruptedError

        whole = adam()
        expected = fit(whole, epochs=4)
        # Keras' callback starts with the third epoch, that of tfdist gives the history of all of them.
        for module, epochs in ((keras.callbacks, 2), (tfdist.callbacks, 4)):
            folder = str(place / f"backup-{epochs}")
            with pytest.raises(InterruptedError):
                fit(adam(), epochs=4, callbacks=[module.BackupAndRestore(folder), Stop()])
            model = adam()
            history = fit(model, epochs=4, callbacks=[module.BackupAndRestore(folder)])
            assert history["loss"] == expected["loss"][-epochs:]
            assert_equal(model, whole)

    return part([whole_model, checkpoints, backups], SECTIONS)


@functools.cache
def results() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tfdist-saving-") as folder:
        return run_local(saving, workers=2, ps=2, timeout=_DEADLINE, args=(Path(folder),))[0]


@pytest.mark.parametrize("name", SECTIONS)
def test_section(name):
    found(results(), name)
