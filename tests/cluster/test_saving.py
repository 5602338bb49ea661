"""Saving to the same path on every process: the chief writes each file once, and every process can load it at once."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any

import keras
import pytest
from keras import layers

from tests.cluster.attempt import found_on
from tests.cluster.file_checks import DEADLINE, FileChecks, built, gap, on_two_processes
from tests.features.table import mlp, rows
from tfdist.compat.scopes import outside_of_scope
from tfdist.testing import run_local

pytestmark = pytest.mark.cluster

FORMATS = ("model.keras", "only.weights.h5", "model.h5", "export")


class CountsBatches(keras.Model):
    """A model with a metric of its own, whose state is spread over all replicas."""

    def __init__(self, **arguments: object) -> None:
        super().__init__(**arguments)
        self.out = layers.Dense(1, activation="sigmoid")
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, x: object) -> object:
        return self.out(x)

    def train_step(self, data: tuple) -> dict:
        logs = super().train_step(data)
        self.seen.update_state(keras.ops.mean(data[0], axis=1))
        return {**logs, "seen": self.seen.result()}


def all_formats(strategy: object, folder: Path) -> dict[str, float]:
    """Saves in every format and loads at once; returns the largest difference of predictions, by format."""
    import tensorflow as tf

    x, y = rows(96)
    model = built(strategy)
    model.fit(x, y, batch_size=16, epochs=1, verbose=0)
    expected = model.predict(x, verbose=0)
    model.save(folder / FORMATS[0])
    gaps = {FORMATS[0]: gap([expected], [keras.models.load_model(folder / FORMATS[0])(x)])}
    model.save_weights(folder / FORMATS[1])
    other = mlp(layers.BatchNormalization, optimizer=lambda: keras.optimizers.Adam(0.01))()
    other.load_weights(folder / FORMATS[1])
    gaps[FORMATS[1]] = gap([expected], [other(x)])
    model.save(folder / FORMATS[2])
    gaps[FORMATS[2]] = gap([expected], [keras.models.load_model(folder / FORMATS[2])(x)])
    model.export(folder / FORMATS[3], verbose=False)
    # TensorFlow runs what it loads in a scope on replicas only.
    with outside_of_scope():
        exported = tf.saved_model.load(folder / FORMATS[3])
        gaps[FORMATS[3]] = gap([expected], [exported.serve(x)])
    with strategy.scope():
        again = keras.models.load_model(folder / FORMATS[0])
    for one in (model, again):
        one.fit(x, y, batch_size=16, epochs=1, shuffle=False, verbose=0)
    gaps["training goes on after load_model"] = gap(model.get_weights(), again.get_weights())
    return gaps


def own_path(strategy: object, folder: Path) -> float:
    """Saves to a path that other processes do not have."""
    model = built(strategy)
    path = folder / f"of-rank-{strategy._peers.rank}" / "model.keras"
    path.parent.mkdir()
    model.save(path)
    return gap(model.get_weights(), keras.models.load_model(path).get_weights())


def slow_rewrite(strategy: object, folder: Path) -> float:
    """Saves to the path of a checkpoint; the chief takes its time. Whoever loads it next gets the last version."""
    path = folder / "again.weights.h5"
    model = built(strategy)
    checkpoint = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
    model.fit(*rows(96), batch_size=16, epochs=2, verbose=0, callbacks=[checkpoint])
    with strategy.scope():
        model.set_weights([value + 1 for value in model.get_weights()])
    if strategy.is_chief:
        time.sleep(2)
    model.save_weights(path)
    expected = model.get_weights()
    model.load_weights(path)
    return gap(expected, model.get_weights())


def metric_attribute(strategy: object, folder: Path) -> dict:
    """Trains, saves and loads a model with a metric of its own."""

    def build() -> keras.Model:
        model = CountsBatches()
        model.build((None, 8))
        model.compile("sgd", "binary_crossentropy")
        return model

    model = built(strategy, build)
    x, y = rows(96)
    history = model.fit(x, y, batch_size=16, epochs=1, verbose=0)
    path = folder / "metric.keras"
    model.save(path)
    loaded = keras.models.load_model(path, custom_objects={"CountsBatches": CountsBatches})
    return {
        "mean": float(x.mean()),
        "logged": history.history["seen"][-1],
        "read": float(model.seen.result()),
        "weights": gap(model.get_weights(), loaded.get_weights()),
    }


def everything(checks: FileChecks) -> None:
    """Runs on every process."""
    checks.note("formats", all_formats, checks.strategy, checks.folder)
    checks.note("own path", own_path, checks.strategy, checks.folder)
    checks.note("rewrite", slow_rewrite, checks.strategy, checks.folder)
    checks.note("metric attribute", metric_attribute, checks.strategy, checks.folder)


@functools.cache
def results() -> list[dict]:
    return on_two_processes(everything)


def check(rank: int, name: str) -> Any:
    return found_on(results(), rank, name)


@pytest.mark.timeout(DEADLINE + 30)
class TestSaving:
    @pytest.mark.parametrize("name", [*FORMATS, "training goes on after load_model"])
    def test_saved_and_loaded_at_once(self, rank, name):
        assert check(rank, "formats")[name] < 1e-5

    def test_chief_alone_writes_formats(self):
        written, nothing = (seen["formats writes"] for seen in results())
        assert sorted({path.split(os.sep)[0] for path in written}) == sorted(FORMATS)
        assert nothing == []

    def test_path_with_the_rank_is_written_by_that_rank(self, rank):
        assert check(rank, "own path") == 0.0
        seen = results()[rank]
        assert set(seen["own path writes"]) == {f"of-rank-{rank}/model.keras"}
        assert seen["timings"]["own path"] < 15.0

    def test_saving_over_a_checkpoint_waits_for_the_chief(self, rank):
        assert check(rank, "rewrite") == 0.0

    def test_metric_attribute(self, rank):
        seen = check(rank, "metric attribute")
        assert seen["logged"] == pytest.approx(seen["mean"], abs=1e-5)
        assert seen["read"] == pytest.approx(seen["mean"], abs=1e-5)
        assert seen["weights"] == 0.0


def at_the_end(folder: str) -> float:
    """A program whose last call is `save`; on rank 1, a moment later than on the chief."""
    import tfdist

    strategy = tfdist.MultiWorkerMirroredStrategy()
    model = built(strategy)
    time.sleep(3.0 * strategy._peers.rank)
    model.save(Path(folder) / "model.keras")
    return gap(model.get_weights(), keras.models.load_model(Path(folder) / "model.keras").get_weights())


def test_the_chief_stays_until_its_file_is_heard_of(tmp_path):
    assert run_local(at_the_end, args=(str(tmp_path),), timeout=DEADLINE) == [0.0, 0.0]


def only_on_the_chief(folder: str) -> float:
    """Returns when this process has come to its end."""
    import tfdist

    strategy = tfdist.MultiWorkerMirroredStrategy()
    model = built(strategy)
    if strategy._peers.rank == 0:
        model.save(Path(folder) / "model.keras")
    return time.time()


def test_the_chief_waits_for_nobody_who_has_ended_without_asking(tmp_path):
    began = time.time()
    ended = run_local(only_on_the_chief, args=(str(tmp_path),), timeout=DEADLINE)
    # Long before the chief would have waited in vain.
    assert time.time() - max(ended) < 30.0 and max(ended) > began
