"""Files: saved models load with and without the strategy, and callbacks that save and go on."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.parameter_server.sections import found, largest, run_sections
from tfdist.testing import run_local

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(210)]

_DEADLINE = 180


def saving(place: Path) -> dict[str, Any]:
    """In the chief: what is saved, loaded and gone on with."""
    import keras
    import numpy as np

    import tfdist
    from tests.cluster.attempt import error_of
    from tests.parameter_server.models import BATCH, click_model, clicks, dense_model, make_optimizer, rows

    strategy = tfdist.ParameterServerStrategy(max_inflight=1, start_timeout=120)
    x, y = clicks()

    def arrays(variables: Any) -> list[np.ndarray]:
        return [np.asarray(variable) for variable in variables]

    def whole_model() -> dict[str, Any]:
        with strategy.scope():
            model = click_model(make_optimizer("Adam"))
        model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False)
        model.save(place / "model.keras")
        plain = keras.models.load_model(place / "model.keras")
        with strategy.scope():
            loaded = keras.models.load_model(place / "model.keras")
        predictions = [m.predict(x, verbose=0) for m in (model, plain, loaded)]
        optimizers = [arrays(m.optimizer.variables) for m in (model, plain, loaded)]
        # All of them go on alike.
        for m in (model, plain, loaded):
            m.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False)
        return {
            "predictions": [largest([predictions[0]], [other]) for other in predictions[1:]],
            "optimizer": [largest(optimizers[0], other) for other in optimizers[1:]],
            "weights afterwards": [largest(model.get_weights(), m.get_weights()) for m in (plain, loaded)],
            "optimizer afterwards": [
                largest(arrays(model.optimizer.variables), arrays(m.optimizer.variables)) for m in (plain, loaded)
            ],
            "iterations": [int(m.optimizer.iterations.numpy()) for m in (model, plain, loaded)],
            "jobs": sorted({variable.value.device[:8] for variable in loaded.variables}),
        }

    def outside_of_the_scope() -> list[tuple[str, str]]:
        with strategy.scope():
            click_model(make_optimizer("Adam")).save(place / "loaded-outside.keras")
        model = keras.models.load_model(place / "loaded-outside.keras")
        with strategy.scope():
            compiled_in_scope = keras.models.clone_model(model)
            compiled_in_scope.compile(model.optimizer, "binary_crossentropy")
        return [error_of(compiled_in_scope.fit, x, y, verbose=0)]

    def weights_file() -> float:
        with strategy.scope():
            model, other = (click_model("sgd") for _ in range(2))
        model.save_weights(place / "model.weights.h5")
        other.load_weights(place / "model.weights.h5")
        return largest(model.get_weights(), other.get_weights())

    def checkpoints() -> dict[str, Any]:
        folder = place / "checkpoints"
        with strategy.scope():
            model = dense_model()
        losses: list[float] = []

        def note(batch: int, logs: Any) -> None:
            losses.append(float(logs["loss"]))

        callbacks = [
            keras.callbacks.ModelCheckpoint(folder / "epoch-{epoch}.keras"),
            keras.callbacks.ModelCheckpoint(
                folder / "batch-{epoch}-{batch}.weights.h5", save_freq=5, save_weights_only=True
            ),
            keras.callbacks.LambdaCallback(on_train_batch_end=note),
        ]
        model.fit(*rows(), batch_size=BATCH, epochs=2, verbose=0, callbacks=callbacks)
        plain = keras.models.load_model(folder / "epoch-2.keras", custom_objects={"Count": keras.metrics.Mean})
        return {
            "files": sorted(path.name for path in folder.iterdir()),
            "gap": largest(model.get_weights(), plain.get_weights()),
            "losses": len(losses),
        }

    def backup(kind: str) -> dict[str, Any]:
        class Stop(keras.callbacks.Callback):
            def __init__(self, at: int | None) -> None:
                super().__init__()
                self.at = at

            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                if epoch == self.at:
                    raise InterruptedError

        module = keras.callbacks if kind == "keras" else tfdist.callbacks

        def train(*callbacks: Any) -> tuple[keras.Model, dict]:
            keras.utils.set_random_seed(1)
            with strategy.scope():
                model = click_model(make_optimizer("Adam"))
            fit = functools.partial(model.fit, x, y, batch_size=BATCH, epochs=4, verbose=0, shuffle=False)
            return model, fit(callbacks=list(callbacks)).history

        try:
            train(module.BackupAndRestore(str(place / f"backup-{kind}")), Stop(2))
            stopped = False
        except InterruptedError:
            stopped = True
        model, history = train(module.BackupAndRestore(str(place / f"backup-{kind}")), Stop(None))
        whole, expected = train()
        return {
            "stopped": stopped,
            "epochs": len(history["loss"]),
            "weights": largest(model.get_weights(), whole.get_weights()),
            "optimizer": largest(arrays(model.optimizer.variables), arrays(whole.optimizer.variables)),
            "loss": abs(history["loss"][-1] - expected["loss"][-1]),
        }

    return run_sections(
        {
            # First: the message has the name that Keras gives to an optimizer.
            "outside of the scope": outside_of_the_scope,
            "whole model": whole_model,
            "weights file": weights_file,
            "checkpoints": checkpoints,
            "backup of keras": lambda: backup("keras"),
            "backup of tfdist": lambda: backup("tfdist"),
        }
    )


@functools.cache
def results() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tfdist-saving-") as folder:
        (outcome,) = run_local(saving, workers=2, ps=2, timeout=_DEADLINE, args=(Path(folder),))
    return outcome


def test_a_saved_model_is_the_same_with_and_without_the_strategy():
    outcome = found(results(), "whole model")
    assert outcome["predictions"] == [0.0, 0.0]
    assert outcome["optimizer"] == [0.0, 0.0]
    assert outcome["weights afterwards"] == [0.0, 0.0]
    assert outcome["optimizer afterwards"] == [0.0, 0.0]
    assert outcome["iterations"] == [42, 42, 42]
    assert outcome["jobs"] == ["/job:ps/"]


def test_an_optimizer_that_was_loaded_outside_of_the_scope_is_refused():
    ((kind, message),) = found(results(), "outside of the scope")
    assert kind == "ValueError"
    assert message.startswith("Received: optimizer 'adam', created outside of this strategy's scope.")


def test_weights_file():
    assert found(results(), "weights file") == 0.0


def test_checkpoints_of_epochs_and_of_batches():
    outcome = found(results(), "checkpoints")
    batches = [
        f"batch-{e}-{b}.weights.h5" for e, b in ((1, 5), (1, 10), (1, 15), (1, 20), (2, 4), (2, 9), (2, 14), (2, 19))
    ]
    assert outcome["files"] == sorted([*batches, "epoch-1.keras", "epoch-2.keras"])
    assert outcome["gap"] == 0.0
    assert outcome["losses"] == 42


@pytest.mark.parametrize("kind", ["keras", "tfdist"])
def test_a_backup_is_gone_on_with(kind):
    outcome = found(results(), f"backup of {kind}")
    assert outcome["stopped"]
    # Keras' callback starts with the third epoch, that of tfdist gives the history of all of them.
    assert outcome["epochs"] == (2 if kind == "keras" else 4)
    assert outcome["weights"] == 0.0
    assert outcome["optimizer"] == 0.0
    assert outcome["loss"] == 0.0
