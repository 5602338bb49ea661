"""`ShardedEmbedding` whose rows are dealt out to two processes, beside `Embedding` in one."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tfdist.testing import run_local

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(660), pytest.mark.nightly]
ROWS, WIDTH = 37, 5
CASES = {
    "direct": ("MultiWorkerMirroredStrategy", {"transport": "direct"}),
    "TensorFlow's": ("MultiWorkerMirroredStrategy", {"transport": "tensorflow"}),
    "uneven shares": ("MultiWorkerMirroredStrategy", {"transport": "direct", "batch_shares": [3, 1]}),
    "compressed": ("MultiWorkerMirroredStrategy", {"transport": "tensorflow", "compression": "fp16"}),
    "fully sharded, direct": ("FullyShardedStrategy", {"transport": "direct"}),
    "fully sharded, TensorFlow's": ("FullyShardedStrategy", {"transport": "tensorflow"}),
}


def fit(folder: Path, epochs: int, table: Any, *callbacks: Any) -> Any:
    """Trains in the scope that is entered, goes on from a backup if there is one, and saves itself."""
    import keras

    import tfdist

    random = np.random.default_rng(1)
    x, y = random.integers(0, ROWS, (51, 4)), random.normal(size=(51, 1))
    keras.utils.set_random_seed(3)
    inputs = keras.Input((4,), dtype="int32")
    hidden = keras.layers.LSTM(6)(table(ROWS, WIDTH, mask_zero=True)(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae"])
    backup = tfdist.callbacks.BackupAndRestore(folder / "backup", save_freq=2, delete_checkpoint=False)
    saving = keras.callbacks.ModelCheckpoint(folder / "best.keras", monitor="val_loss", save_best_only=True)
    stops = keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True)
    all_callbacks = [backup, saving, stops, *callbacks]
    history = model.fit(x, y, batch_size=16, epochs=epochs, verbose=0, validation_data=(x, y), callbacks=all_callbacks)
    return model, history.history, model.predict(x, batch_size=10, verbose=0)


def trained(cases: list[str], folder: str) -> dict[str, Any]:
    """Runs on every process."""
    import keras

    import tfdist

    keras.config.set_floatx("float64")
    found = {}
    for number, name in enumerate(cases):
        kind, options = CASES[name]
        strategy = getattr(tfdist, kind)(start_timeout=60, peer_timeout=300, **options)
        place = Path(folder, str(number))
        with strategy.scope():
            fit(place, 2, tfdist.layers.ShardedEmbedding)
            model, history, predicted = fit(place, 3, tfdist.layers.ShardedEmbedding)
        variables = [v for v in (*model.trainable_variables, *model.optimizer.variables) if "embeddings" in v.name]
        found[name] = {
            "weights": model.get_weights(),
            "history": history,
            "predicted": predicted,
            "parts": [tuple(part.shape) for v in variables for part in v.value._values],
        }
    return found


def expected(folder: str) -> dict[str, Any]:
    import keras

    keras.config.set_floatx("float64")
    model, history, predicted = fit(Path(folder), 3, keras.layers.Embedding)
    return {"weights": model.get_weights(), "history": history, "predicted": predicted}


@functools.cache
def results(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    (alone,) = run_local(expected, 1, args=(str(folder / "alone"),), timeout=240)
    return alone, run_local(trained, 2, args=(list(CASES), str(folder)), timeout=600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tables")


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str, folder: Path) -> None:
    """After a restart from a backup, too."""
    import keras

    import tfdist.layers  # noqa: F401  a file names its class

    alone, of_both = results(folder)
    # Adam divides by the size of a gradient: of its steps of 0.02, rounding to 11 bits moves a few hundredths.
    tolerance = 1e-3 if name == "compressed" else 1e-9
    for found in (one[name] for one in of_both):
        assert found["parts"] == [(19, WIDTH)] * 3  # of the table, and of two slots
        for one, other in zip(found["weights"], alone["weights"], strict=True):
            np.testing.assert_allclose(one, other, atol=tolerance)
        np.testing.assert_allclose(found["predicted"], alone["predicted"], atol=tolerance)
        for key, values in alone["history"].items():
            np.testing.assert_allclose(found["history"][key], values, atol=tolerance)
    saved = keras.models.load_model(folder / str(list(CASES).index(name)) / "best.keras")
    assert saved.layers[1].get_weights()[0].shape == (ROWS, WIDTH)
