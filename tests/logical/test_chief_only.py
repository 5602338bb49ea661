"""`tfdist.callbacks.on_chief` in one process: as if the callback had been passed; and what is refused."""

from __future__ import annotations

from typing import Any

import keras
import pytest

import tfdist
from tests.features.table import mlp, rows
from tests.models import in_scope
from tests.tiers import daily
from tfdist.callbacks import on_chief


class Epochs(keras.callbacks.Callback):
    """Keeps the numbers and logs of the epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, dict]] = []

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self.seen.append((epoch, dict(logs or {})))


class Bare(keras.callbacks.Callback):
    """Does not call the constructor of its class, as MLflow's does not."""

    def __init__(self) -> None:
        self.batches = 0

    def on_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self.batches += 1


# Host offloading needs something to part.
DEEPER = [lambda: keras.layers.Dense(16, "relu")] * 4
STRATEGIES = {
    "none": lambda: None,
    "Pipeline": lambda: tfdist.PipelineStrategy(["CPU:0", "CPU:1"], num_microbatches=2),
    "HostOffload": lambda: tfdist.HostOffloadStrategy(device="CPU:1"),
}


def fit(strategy: Any, build: Any, callbacks: list) -> dict:
    model = build() if strategy is None else in_scope(strategy, build)
    return model.fit(*rows(32), batch_size=16, epochs=2, verbose=0, callbacks=callbacks).history


@pytest.mark.parametrize("name", daily(["Mirrored", *STRATEGIES], "Mirrored", "Pipeline"))
def test_every_strategy_has_a_chief(mirrored, name):
    strategy, epochs, bare = STRATEGIES[name]() if name in STRATEGIES else mirrored, Epochs(), Bare()
    history = fit(strategy, mlp(*DEEPER), [on_chief(epochs), on_chief(lambda: [bare])])
    assert [number for number, _ in epochs.seen] == [0, 1]
    assert {metric: [logs[metric] for _, logs in epochs.seen] for metric in history} == history
    assert bare.batches == 4
    assert epochs.params["epochs"] == 2


def test_a_function_is_called_when_the_first_fit_begins_and_once():
    made: list[Epochs] = []
    logger = on_chief(lambda: made.append(Epochs()) or made[-1])
    assert made == []
    model = mlp()()
    for _ in range(2):
        model.fit(*rows(16), verbose=0, callbacks=[logger])
    assert [len(one.seen) for one in made] == [2]


REFUSED = {
    "EarlyStopping": lambda: keras.callbacks.EarlyStopping("loss"),
    "ReduceLROnPlateau": lambda: keras.callbacks.ReduceLROnPlateau("loss"),
    "LearningRateScheduler": lambda: keras.callbacks.LearningRateScheduler(lambda epoch: 0.1),
    "TerminateOnNaN": keras.callbacks.TerminateOnNaN,
    "BackupAndRestore": lambda: tfdist.callbacks.BackupAndRestore("backup"),
    "TensorBoard": lambda: tfdist.callbacks.TensorBoard("logs"),
    "ChiefOnly": lambda: on_chief(Epochs),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_to_run_everywhere_is_refused(name):
    words = rf"Received: on_chief\({name}\). Expected: a callback that only reports"
    with pytest.raises(ValueError, match=words):
        on_chief(REFUSED[name]())
    with pytest.raises(ValueError, match=words):
        mlp()().fit(*rows(16), verbose=0, callbacks=[on_chief(REFUSED[name])])


@pytest.mark.parametrize("given", [None, 3, "csv", [Epochs()]])
def test_other_things_are_refused(given):
    with pytest.raises(ValueError, match="Expected: a callback of Keras, or a function without arguments"):
        on_chief(given)


@pytest.mark.parametrize(
    "made", [None, Epochs, [Epochs(), 3]], ids=["nothing", "a class", "a list with something else"]
)
def test_what_a_function_returns_is_looked_at(made):
    with pytest.raises(ValueError, match="Received: a function for on_chief that returned "):
        mlp()().fit(*rows(16), verbose=0, callbacks=[on_chief(lambda: made)])


def test_a_writer_of_keras_may_be_wrapped(tmp_path):
    fit(None, mlp(), [on_chief(keras.callbacks.CSVLogger(tmp_path / "log.csv"))])
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 3
