"""`tfdist.callbacks.on_chief` on two processes: one runs the callback, as one process would, and nothing hangs."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest

from tests.cluster.attempt import attempt, found_on
from tests.features.table import batches, mlp, rows
from tfdist.testing import run_local

pytestmark = pytest.mark.cluster

_DEADLINE = 150
_HOOKS = [
    *(f"on_{kind}_{when}" for kind in ("train", "test", "predict") for when in ("begin", "end")),
    *(f"on_{kind}_batch_{when}" for kind in ("train", "test", "predict") for when in ("begin", "end")),
    *("on_epoch_begin", "on_epoch_end"),
]


class Recorder(keras.callbacks.Callback):
    """Notes which methods were called, and what the model is then; `made` counts its instances in this process."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        Recorder.made += 1
        self.calls: list[str] = []
        self.epochs: list[dict] = []
        for name in _HOOKS:
            setattr(self, name, functools.partial(self._note, name))

    def _note(self, name: str, *arguments: Any, **more: Any) -> None:
        assert self.model is not None and self.params is not None
        number = arguments[0] if arguments and not isinstance(arguments[0], dict) else ""
        self.calls.append(f"{name} {number}")
        if name == "on_epoch_end":
            self.epochs.append({**arguments[1], "steps": int(self.model.optimizer.iterations.numpy())})


def build(strategy: Any) -> keras.Model:
    keras.utils.set_random_seed(7)
    with strategy.scope():
        return mlp()()


def recorded(strategy: Any, folder: str = "") -> dict[str, Any]:
    """What a callback sees of two fits, the second of them in the scope, of an evaluation and of predictions."""
    import tfdist

    Recorder.made, model, made = 0, build(strategy), []
    logger = tfdist.callbacks.on_chief(lambda: made.append(Recorder()) or made[-1])
    arguments = {"epochs": 2, "verbose": 0, "callbacks": [logger]}
    first = model.fit(*rows(90), batch_size=16, validation_data=rows(42, seed=2), shuffle=False, **arguments)
    with strategy.scope():
        model.fit(batches(*rows(90)), **arguments)
    model.evaluate(*rows(42), verbose=0, callbacks=[logger])
    model.predict(rows(42)[0], verbose=0, callbacks=[logger])
    calls, epochs = (made[0].calls, made[0].epochs) if made else ([], [])
    return {"made": Recorder.made, "calls": calls, "epochs": epochs, "history": first.history, "w": model.get_weights()}


def assert_logs(seen: dict[str, Any]) -> None:
    """The callback has seen what the history has."""
    for name, values in seen["history"].items():
        assert [epoch[name] for epoch in seen["epochs"][:2]] == values


def everything(folder: str) -> dict[str, Any]:
    """Runs on every process; each section asserts what it is about."""
    import tensorflow as tf

    import tfdist

    strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout=60, peer_timeout=300)
    is_chief = strategy.is_chief
    on_chief = tfdist.callbacks.on_chief

    def the_chief_sees_what_one_process_sees() -> None:
        seen, alone = recorded(strategy), recorded(tf.distribute.get_strategy())
        for own, expected in zip(seen["w"], alone["w"], strict=True):
            np.testing.assert_allclose(own, expected, atol=1e-5)
        # Also without a strategy's scope: it is a process of a job, and reports if it is the first.
        assert alone["made"] == seen["made"] == int(is_chief)
        assert seen["calls"] == alone["calls"]
        assert {call.split()[0] for call in seen["calls"]} == ({*_HOOKS} if is_chief else set())
        assert len(seen["epochs"]) == (4 if is_chief else 0)
        for own, expected in zip(seen["epochs"], alone["epochs"], strict=True):
            assert own == pytest.approx(expected, abs=1e-5)
        if is_chief:
            assert_logs(seen)

    def a_backup_has_its_state() -> list[np.ndarray]:
        """A counter on the chief counts in a fit that fails once, and is resumed."""

        class Counter(keras.callbacks.Callback):
            steps = 0

            def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
                self.steps += 1

        def interrupt(epoch: int, logs: dict | None) -> None:
            if epoch == 1:
                raise InterruptedError

        counters: list[Counter] = []

        def fit(*more: Any) -> list[np.ndarray]:
            backup = tfdist.callbacks.BackupAndRestore(folder, asynchronous=False)
            counter = on_chief(lambda: counters.append(Counter()) or counters[-1])
            model, arguments = build(strategy), {"batch_size": 16, "epochs": 3, "shuffle": False, "verbose": 0}
            model.fit(*rows(96), callbacks=[counter, backup, *more], **arguments)
            return model.get_weights()

        with pytest.raises(InterruptedError):
            fit(keras.callbacks.LambdaCallback(on_epoch_begin=interrupt))
        weights = fit()
        # It goes on counting where the backup was made.
        assert [counter.steps for counter in counters] == [6, 18][: 2 * is_chief]
        return weights

    sections = [the_chief_sees_what_one_process_sees, a_backup_has_its_state]
    return {section.__name__: attempt(section.__name__, section) for section in sections}


@pytest.mark.nightly
@pytest.mark.timeout(_DEADLINE + 30)
def test_on_two_processes(tmp_path):
    results = run_local(everything, args=(str(tmp_path),), timeout=_DEADLINE)
    for name in results[0]:
        chief, other = (found_on(results, rank, name) for rank in (0, 1))
        np.testing.assert_equal(chief, other)


def on_servers() -> dict[str, Any]:
    """In the chief of parameter servers."""
    import tfdist

    return recorded(tfdist.ParameterServerStrategy(mode="sync", start_timeout=120))


@pytest.mark.nightly
@pytest.mark.timeout(_DEADLINE + 30)
def test_with_parameter_servers():
    (seen,) = run_local(on_servers, workers=2, ps=1, timeout=_DEADLINE)
    assert seen["made"] == 1
    assert {"on_epoch_end 0", "on_epoch_end 1", "on_train_end "} <= set(seen["calls"])
    assert_logs(seen)
