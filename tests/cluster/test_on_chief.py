"""`tfdist.callbacks.on_chief` on two processes: one runs the callback, as one process would, and nothing hangs."""

from __future__ import annotations

import functools
import time
from typing import Any

import keras
import numpy as np
import pytest

from tests.cluster.attempt import attempt, error_of, found_on
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


class Stop(keras.callbacks.Callback):
    """Ends the fit in its second epoch."""

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if epoch == 1:
            self.model.stop_training = True

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Keras calls this one in turn."""


class Evaluating(keras.callbacks.Callback):
    """Needs the other processes."""

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self.model.evaluate(*rows(32), verbose=0)


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


def with_backup(strategy: Any, folder: str) -> dict[str, Any]:
    """What a counter on the chief counts in a fit that fails once, and is resumed."""
    import tfdist

    class Counter(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.steps = 0

        def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
            self.steps += 1

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
            if epoch == 1:
                raise InterruptedError

    counters: list[Counter] = []
    for is_second in (False, True):
        backup = tfdist.callbacks.BackupAndRestore(folder, asynchronous=False)
        callbacks = [tfdist.callbacks.on_chief(lambda: counters.append(Counter()) or counters[-1]), backup]
        model = build(strategy)
        arguments = {"batch_size": 16, "epochs": 3, "shuffle": False, "verbose": 0}
        try:
            history = model.fit(*rows(96), callbacks=callbacks if is_second else [*callbacks, Interrupt()], **arguments)
        except InterruptedError:
            assert not is_second
    return {"steps": [counter.steps for counter in counters], "epochs": history.epoch, "w": model.get_weights()}


def everything(folder: str) -> dict[str, Any]:
    """Runs on every process."""
    import tensorflow as tf

    import tfdist

    strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout=60, peer_timeout=60)
    one = tf.distribute.get_strategy()
    found = {"recorded": attempt("recorded", recorded, strategy), "alone": attempt("alone", recorded, one)}
    # Not in a strategy's scope, but a process of a job: it reports if it is the first.
    found["backup"] = attempt("backup", with_backup, strategy, f"{folder}/backup")

    def stopped() -> list[int]:
        callbacks = [tfdist.callbacks.on_chief(Stop()), everywhere := Recorder()]
        build(strategy).fit(*rows(32), batch_size=16, epochs=4, verbose=0, callbacks=callbacks)
        return [everywhere.calls.count(f"on_epoch_end {epoch}") for epoch in range(4)]

    found["stopped"] = attempt("stopped", stopped)
    found["refused"] = error_of(tfdist.callbacks.on_chief, keras.callbacks.EarlyStopping("loss"))
    began, evaluating = time.monotonic(), tfdist.callbacks.on_chief(Evaluating)
    found["evaluating"] = error_of(build(strategy).fit, *rows(32), epochs=2, verbose=0, callbacks=[evaluating])
    found["seconds"] = time.monotonic() - began
    return found


@functools.cache
def results() -> list[dict[str, Any]]:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="tfdist-chief-") as folder:
        return run_local(everything, args=(folder,), timeout=_DEADLINE)


@pytest.mark.timeout(_DEADLINE + 30)
class TestOnChief:
    def test_the_chief_sees_what_one_process_sees(self):
        seen, alone = found_on(results(), 0, "recorded"), found_on(results(), 0, "alone")
        assert seen["made"] == 1
        assert seen["calls"] == alone["calls"]
        assert {call.split()[0] for call in seen["calls"]} == set(_HOOKS)
        assert len(seen["epochs"]) == len(alone["epochs"]) == 4
        for own, expected in zip(seen["epochs"], alone["epochs"], strict=True):
            assert own == pytest.approx(expected, abs=1e-5)

    def test_the_chief_logs_what_the_history_has(self):
        seen = found_on(results(), 0, "recorded")
        for name, values in seen["history"].items():
            assert [epoch[name] for epoch in seen["epochs"][:2]] == values

    def test_nothing_is_made_elsewhere(self):
        seen = found_on(results(), 1, "recorded")
        assert (seen["made"], seen["calls"]) == (0, [])
        assert found_on(results(), 1, "alone")["made"] == 0

    def test_the_training_is_not_changed(self, rank):
        seen, alone = found_on(results(), rank, "recorded"), found_on(results(), 0, "alone")
        for own, expected in zip(seen["w"], alone["w"], strict=True):
            np.testing.assert_allclose(own, expected, atol=1e-5)

    def test_a_backup_has_its_state(self):
        chief, other = found_on(results(), 0, "backup"), found_on(results(), 1, "backup")
        assert chief["steps"] == [6, 18], "it goes on counting where the backup was made"
        assert other["steps"] == []
        assert chief["epochs"] == other["epochs"]
        for own, expected in zip(other["w"], chief["w"], strict=True):
            np.testing.assert_array_equal(own, expected)

    def test_all_stop_if_it_stops(self, rank):
        """Seen by a callback that all have, and that is called on all."""
        assert found_on(results(), rank, "stopped") == [1, 1, 0, 0]

    def test_what_has_to_run_everywhere_is_refused(self, rank):
        kind, message = results()[rank]["refused"]
        assert kind == "ValueError"
        assert message.startswith("Received: on_chief(EarlyStopping). Expected: a callback that only reports")

    def test_one_that_evaluates_ends_on_all(self, rank):
        kind, message = results()[rank]["evaluating"]
        assert kind == "PeerTimeoutError", message
        assert "A callback that calls evaluate, predict or fit has to do so on every process" in message
        assert results()[rank]["seconds"] < 60


def on_servers() -> dict[str, Any]:
    """In the chief of parameter servers."""
    import tfdist

    return recorded(tfdist.ParameterServerStrategy(mode="sync", start_timeout=120))


@pytest.mark.exhaustive
@pytest.mark.timeout(_DEADLINE + 30)
def test_with_parameter_servers():
    (seen,) = run_local(on_servers, workers=2, ps=1, timeout=_DEADLINE)
    assert seen["made"] == 1
    assert {"on_epoch_end 0", "on_epoch_end 1", "on_train_end "} <= set(seen["calls"])
    for name, values in seen["history"].items():
        assert [epoch[name] for epoch in seen["epochs"][:2]] == values
