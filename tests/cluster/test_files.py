"""The same paths on every process: the chief writes each file once, and every process can read it at once."""

from __future__ import annotations

import csv
import functools
import importlib.util
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from tests.cluster.attempt import attempt, found_on
from tests.cluster.writes import Writes
from tests.features.table import mlp, rows
from tfdist.testing import run_local

pytestmark = pytest.mark.cluster

_DEADLINE = 200
HAS_TENSORBOARD = importlib.util.find_spec("tensorboard") is not None
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


class Interrupt(keras.callbacks.Callback):
    """Raises on every process, in the middle of the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if self._epoch == 1 and batch == 2:
            raise InterruptedError("in epoch 2")


def gap(first: list, second: list) -> float:
    assert len(first) == len(second)
    return max((float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(first, second, strict=True)))


def built(strategy: object, build: object = None) -> keras.Model:
    with strategy.scope():
        keras.utils.set_random_seed(7)
        build = build or mlp(layers.BatchNormalization, optimizer=lambda: keras.optimizers.Adam(0.01))
        return build()


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
    exported = tf.saved_model.load(folder / FORMATS[3])
    gaps[FORMATS[3]] = gap([expected], [exported.serve(x)])
    with strategy.scope():
        again = keras.models.load_model(folder / FORMATS[0])
    for one in (model, again):
        one.fit(x, y, batch_size=16, epochs=1, shuffle=False, verbose=0)
    gaps["training goes on after load_model"] = gap(model.get_weights(), again.get_weights())
    return gaps


def callbacks(strategy: object, folder: Path) -> dict:
    """Trains with the callbacks that write files; returns what they wrote and what they should have."""
    folder.mkdir(exist_ok=True)
    model = built(strategy)
    writers = [
        keras.callbacks.ModelCheckpoint(folder / "best.keras", monitor="val_loss", save_best_only=True),
        keras.callbacks.ModelCheckpoint(folder / "epoch-{epoch}.weights.h5", save_weights_only=True),
        keras.callbacks.ModelCheckpoint(
            folder / "step-{epoch}-{batch}.weights.h5", save_freq=2, save_weights_only=True
        ),
        keras.callbacks.CSVLogger(folder / "log.csv"),
    ]
    # A learning rate of 0 after the first epoch would make "best" arbitrary; this one overshoots in the second.
    steps = keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 if epoch == 0 else 5.0)
    history = model.fit(
        *rows(96),
        batch_size=16,
        epochs=3,
        shuffle=False,
        verbose=0,
        validation_data=rows(42, seed=2),
        callbacks=[steps, *writers],
    )
    with (folder / "log.csv").open() as file:
        lines = list(csv.DictReader(file))
    best = keras.models.load_model(folder / "best.keras")
    return {
        "files": sorted(p.name for p in folder.iterdir()),
        "losses": history.history["val_loss"],
        "best": best.evaluate(*rows(42, seed=2), batch_size=16, verbose=0)[0],
        "csv": [{name: float(value) for name, value in line.items()} for line in lines],
        "history": history.history,
    }


class PlainTensorBoard(keras.callbacks.TensorBoard):
    """Writes lines of text in place of event files: the `tensorboard` package need not be installed."""

    def __init__(self, folder: Path):
        keras.callbacks.Callback.__init__(self)
        self._folder = folder

    def _write(self, *arguments: object) -> None:
        self._folder.mkdir(exist_ok=True)
        with (self._folder / "events").open("a") as file:
            print(*arguments, file=file)

    def set_model(self, model: keras.Model) -> None:
        self._write("model")

    def _nothing(self, *arguments: object, **more: object) -> None:
        pass

    on_train_begin = on_test_begin = on_train_end = on_test_end = on_epoch_begin = _nothing
    on_train_batch_begin = on_train_batch_end = on_test_batch_begin = on_test_batch_end = _nothing

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self._write("epoch", epoch)


def plain_tensorboard(strategy: object, folder: Path) -> str:
    model = built(strategy)
    model.fit(*rows(96), batch_size=16, epochs=2, verbose=0, callbacks=[PlainTensorBoard(folder)])
    return (folder / "events").read_text()


def tensorboard(strategy: object, folder: Path) -> dict[str, list[str]]:
    """Returns the processes that wrote an event file, by folder; their id is part of the file's name."""
    model = built(strategy)
    callback = keras.callbacks.TensorBoard(folder)
    model.fit(*rows(96), batch_size=16, epochs=2, verbose=0, validation_data=rows(16), callbacks=[callback])
    found: dict[str, list[str]] = {}
    for path in folder.rglob("*tfevents*"):
        found.setdefault(path.parent.name, []).append(path.name.split(".")[-3])
    return found


def interrupted(strategy: object, folder: Path) -> dict:
    """Crashes in the second epoch and starts again; returns the epochs of the second run and the final weights."""
    arguments = {"batch_size": 16, "epochs": 3, "shuffle": False, "verbose": 0}
    for is_second in (False, True):
        model = built(strategy)
        stop = [] if is_second else [Interrupt()]
        try:
            history = model.fit(*rows(96), **arguments, callbacks=[keras.callbacks.BackupAndRestore(folder), *stop])
        except InterruptedError:
            saved = json.loads((folder / "training_metadata.json").read_text())
    return {
        "saved": saved,
        "epochs": history.epoch,
        "steps": int(np.asarray(model.optimizer.iterations)),
        "weights": model.get_weights(),
        "left": folder.exists(),
    }


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


def everything(folder_name: str) -> dict:
    """Runs on every process."""
    import tensorflow as tf

    import tfdist

    strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout=60, peer_timeout=40)
    rank = strategy.peers.rank
    folder = Path(folder_name)
    writes = Writes(folder_name)
    alone = Path(tempfile.mkdtemp())
    one = tf.distribute.get_strategy()
    seen: dict = {"pid": os.getpid(), "timings": {}}

    def note(name: str, function: object, *arguments: object) -> None:
        before, began = len(writes.paths), time.monotonic()
        seen[name] = attempt(name, function, *arguments)
        seen["timings"][name] = time.monotonic() - began
        seen[f"{name} writes"] = writes.paths[before:]

    note("formats", all_formats, strategy, folder)
    note("callbacks", callbacks, strategy, folder / "callbacks")
    note("callbacks alone", callbacks, one, alone / "callbacks")
    note("plain tensorboard", plain_tensorboard, strategy, folder / "plain")
    if HAS_TENSORBOARD:
        note("tensorboard", tensorboard, strategy, folder / "tensorboard")
    note("interrupted", interrupted, strategy, folder / "backup")
    note("interrupted alone", interrupted, one, alone / "backup")

    def own_path() -> float:
        model = built(strategy)
        path = folder / f"of-rank-{rank}" / "model.keras"
        path.parent.mkdir()
        model.save(path)
        return gap(model.get_weights(), keras.models.load_model(path).get_weights())

    note("own path", own_path)
    note("rewrite", slow_rewrite, strategy, folder)

    def metric_attribute() -> dict:
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

    note("metric attribute", metric_attribute)
    return seen


@functools.cache
def results() -> list[dict]:
    with tempfile.TemporaryDirectory(prefix="tfdist-files-") as folder:
        return run_local(everything, args=(folder,), timeout=_DEADLINE)


def check(rank: int, name: str) -> Any:
    return found_on(results(), rank, name)


@pytest.fixture(params=[0, 1], ids=["chief", "other"])
def rank(request) -> int:
    return request.param


@pytest.mark.timeout(_DEADLINE + 30)
class TestFiles:
    @pytest.mark.parametrize("name", [*FORMATS, "training goes on after load_model"])
    def test_saved_and_loaded_at_once(self, rank, name):
        assert check(rank, "formats")[name] < 1e-5

    def test_chief_alone_writes_formats(self):
        written, nothing = (seen["formats writes"] for seen in results())
        assert sorted({path.split(os.sep)[0] for path in written}) == sorted(FORMATS)
        assert nothing == []

    def test_callbacks_write_on_the_chief_alone(self):
        chief, other = results()
        assert set(chief["callbacks writes"]) == {f"callbacks/{name}" for name in check(0, "callbacks")["files"]}
        assert other["callbacks writes"] == []

    def test_callbacks_write_each_file_once(self):
        written = results()[0]["callbacks writes"]
        once = [path for path in written if "best" not in path]
        assert sorted(once) == sorted(set(once))
        losses = check(0, "callbacks")["losses"]
        improvements = sum(loss < min(losses[:i], default=np.inf) for i, loss in enumerate(losses))
        assert written.count("callbacks/best.keras") == improvements

    def test_callbacks_write_the_files_of_one_process(self, rank):
        steps = [f"step-{epoch}-{batch}.weights.h5" for epoch in (1, 2, 3) for batch in (2, 4, 6)]
        names = sorted(["best.keras", "log.csv", *(f"epoch-{epoch}.weights.h5" for epoch in (1, 2, 3)), *steps])
        assert check(rank, "callbacks")["files"] == check(rank, "callbacks alone")["files"] == names

    def test_best_model_is_the_best(self, rank):
        seen = check(rank, "callbacks")
        assert min(seen["losses"]) < max(seen["losses"]) - 0.01, "the losses do not tell the epochs apart"
        assert seen["best"] == pytest.approx(min(seen["losses"]), abs=1e-5)

    def test_csv_has_one_line_an_epoch(self, rank):
        lines = check(rank, "callbacks")["csv"]
        assert [line["epoch"] for line in lines] == [0, 1, 2]
        for line, expected in zip(lines, check(rank, "callbacks alone")["csv"], strict=True):
            assert line == pytest.approx(expected, rel=1e-3, abs=1e-5)

    def test_tensorboard_is_the_chiefs_alone(self, rank):
        assert check(rank, "plain tensorboard") == "model\nepoch 0\nepoch 1\n"

    @pytest.mark.skipif(not HAS_TENSORBOARD, reason="the tensorboard package is not installed")
    def test_tensorboard_writes_one_file_for_training_and_one_for_validation(self, rank):
        chief = str(results()[0]["pid"])
        assert check(rank, "tensorboard") == {"train": [chief], "validation": [chief]}

    def test_interrupted_training_goes_on(self, rank):
        seen, alone = check(rank, "interrupted"), check(rank, "interrupted alone")
        assert seen["saved"]["epoch"] == alone["saved"]["epoch"] == 1
        assert seen["epochs"] == alone["epochs"] == [1, 2]
        assert seen["steps"] == alone["steps"] == 18
        assert gap(seen["weights"], alone["weights"]) < 1e-5
        assert not alone["left"] and not seen["left"], "the backup must be gone after training"

    def test_backup_is_written_by_the_chief_alone(self):
        chief, other = results()
        assert set(chief["interrupted writes"]) == {"backup/latest.weights.h5", "backup/training_metadata.json"}
        assert other["interrupted writes"] == []

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
