"""Files with the same paths on every process: the chief writes each once, and every process can read it at once."""

from __future__ import annotations

import csv
import functools
import json
import logging
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import pytest
from keras import layers

from tests.cluster.attempt import found_on
from tests.cluster.file_checks import DEADLINE, built, gap, on_two_processes
from tests.cluster.writes import Writes
from tests.features.table import mlp, rows
from tests.tiers import daily
from tfdist.compat.scopes import outside_of_scope
from tfdist.testing import run_local

pytestmark = pytest.mark.cluster
# In seconds: who waits that long in vain is ended by the deadline of its test.
_TOO_LONG = 3600.0


def assert_written(strategy: Any, writes: Writes, *names: str) -> None:
    """The chief has written these, and no other process anything."""
    assert {*writes.paths} == ({*names} if strategy.is_chief else set())


def all_formats(strategy: Any, folder: Path, writes: Writes) -> None:
    """Loads at once what was saved."""
    import tensorflow as tf

    x, y = rows(96)
    exports = ("export", "tracked", "functions")
    model = built(strategy)
    model.fit(x, y, batch_size=16, epochs=1, verbose=0)
    expected = model.predict(x, verbose=0)
    for name in ("model.keras", "model.h5"):
        model.save(folder / name)
        assert gap([expected], [keras.models.load_model(folder / name)(x)]) < 1e-5
    model.save_weights(folder / "only.weights.h5")
    other = mlp(layers.BatchNormalization, optimizer=lambda: keras.optimizers.Adam(0.01))()
    other.load_weights(folder / "only.weights.h5")
    assert gap([expected], [other(x)]) < 1e-5
    model.export(folder / "export", verbose=False)
    for name in ("tracked", "functions"):
        archive = keras.export.ExportArchive()
        if name == "tracked":
            archive.track(model)
        archive.add_endpoint("serve", model.call, [tf.TensorSpec([None, 8])])
        archive.write_out(folder / name, verbose=False)
    # TensorFlow runs what it loads in a scope on replicas only.
    with outside_of_scope():
        for name in exports:
            exported = tf.saved_model.load(folder / name)
            assert gap([expected], [exported.serve(x)]) < 1e-5
    names = {path.removeprefix("all_formats/").partition("/")[0] for path in writes.paths}
    assert names == ({"model.keras", "model.h5", "only.weights.h5", *exports} if strategy.is_chief else set())
    with strategy.scope():
        again = keras.models.load_model(folder / "model.keras")
    for one in (model, again):
        one.fit(x, y, batch_size=16, epochs=1, shuffle=False, verbose=0)
    assert gap(model.get_weights(), again.get_weights()) < 1e-5


def a_path_of_each_rank(strategy: Any, folder: Path, writes: Writes) -> None:
    """As in TensorFlow's tutorial: written at once by its rank, and named."""
    messages = told()
    model, rank = built(strategy), strategy._peers.rank
    if strategy.is_chief:
        model.save(folder / "first.keras")  # the chief alone
    model.save(folder / "both.keras")
    # Nobody waits for silence of the chief, which would take longer than the test may.
    with mock.patch("tfdist.runtime.chief._SILENCE_AFTER_OTHER_PATH", _TOO_LONG):
        for name in ("model", "again"):
            model.save(folder / f"{name}-{rank}.keras")
    own = [f"{folder.name}/{name}-{rank}.keras" for name in ("model", "again")]
    assert {*own} <= {*writes.paths}
    last = keras.models.load_model(folder / f"again-{rank}.keras")
    assert gap(model.get_weights(), last.get_weights()) == 0.0
    text = (
        f"Received: {folder}/model-1.keras to save, while the chief saves {folder}/model-0.keras. This process writes "
        "it. Expected: the same path on all processes: the chief alone writes it then, and all can load it."
    )
    assert messages == [text][:rank]


def saving_over_a_checkpoint(strategy: Any, folder: Path, writes: Writes) -> None:
    """The chief takes its time: who loads the file next gets the last version."""
    path = folder / "again.weights.h5"
    model = built(strategy)
    weights_alone = {"save_weights_only": True}
    checkpoint = keras.callbacks.ModelCheckpoint(path, **weights_alone)
    best = keras.callbacks.ModelCheckpoint(folder / "best.weights.h5", "loss", save_best_only=True, **weights_alone)
    fit = functools.partial(model.fit, *rows(96), batch_size=16, epochs=2, verbose=0)
    history = fit(callbacks=[checkpoint, best]).history
    assert best.best == min(history["loss"]), "programs decide by it, on every process"

    def save_and_load() -> None:
        with strategy.scope():
            model.set_weights([value + 1 for value in model.get_weights()])
        if strategy.is_chief:
            time.sleep(2)
        model.save_weights(path)
        expected = model.get_weights()
        model.load_weights(path)
        assert gap(expected, model.get_weights()) == 0.0

    def interrupt(epoch: int, logs: object) -> None:
        raise InterruptedError

    save_and_load()
    with pytest.raises(InterruptedError):
        fit(callbacks=[checkpoint, keras.callbacks.LambdaCallback(on_epoch_end=interrupt)])
    save_and_load()


def checkpoints(strategy: Any, folder: Path) -> list[dict[str, float]]:
    """Trains with callbacks that write files; returns the lines of the log."""
    model, steps = built(strategy), folder / "step-{epoch}-{batch}.weights.h5"
    # A learning rate of 0 after the first epoch would make "best" arbitrary; this one overshoots in the second.
    callbacks = [
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 if epoch == 0 else 5.0),
        keras.callbacks.ModelCheckpoint(folder / "best.keras", monitor="val_loss", save_best_only=True),
        keras.callbacks.ModelCheckpoint(steps, save_freq=2, save_weights_only=True),
        keras.callbacks.CSVLogger(folder / "log.csv"),
    ]
    fit = functools.partial(model.fit, *rows(96), batch_size=16, epochs=3, shuffle=False, verbose=0)
    losses = fit(validation_data=rows(42, seed=2), callbacks=callbacks).history["val_loss"]
    assert min(losses) < max(losses) - 0.01, "the losses do not tell the epochs apart"
    best = keras.models.load_model(folder / "best.keras").evaluate(*rows(42, seed=2), batch_size=16, verbose=0)[0]
    assert best == pytest.approx(min(losses), abs=1e-5)
    with (folder / "log.csv").open() as file:
        return [{name: float(value) for name, value in line.items()} for line in csv.DictReader(file)]


def callbacks_that_write(strategy: Any, folder: Path, writes: Writes) -> None:
    lines = checkpoints(strategy, folder)
    steps = [f"step-{epoch}-{batch}.weights.h5" for epoch in (1, 2, 3) for batch in (2, 4, 6)]
    names = sorted(["best.keras", "log.csv", *steps])
    assert sorted(path.name for path in folder.iterdir()) == names
    assert_written(strategy, writes, *(f"{folder.name}/{name}" for name in names))
    once = [path for path in writes.paths if "best" not in path]
    assert sorted(once) == sorted({*once})
    losses = [line["val_loss"] for line in lines]
    improvements = [loss < min(losses[:i], default=9e9) for i, loss in enumerate(losses)]
    assert writes.paths.count(f"{folder.name}/best.keras") == (sum(improvements) if strategy.is_chief else 0)
    alone = folder.with_name(f"alone-{strategy._peers.rank}")
    alone.mkdir()
    with outside_of_scope():
        expected = checkpoints(None, alone)
    assert [line["epoch"] for line in lines] == [0, 1, 2]
    for line, one in zip(lines, expected, strict=True):
        assert line == pytest.approx(one, rel=1e-3, abs=1e-5)


def tensorboard_of_keras(strategy: Any, folder: Path, writes: Writes) -> dict[str, list[str]]:
    """Returns the processes that wrote an event file, by folder; their id is part of the file's name."""
    callback = keras.callbacks.TensorBoard(folder)
    built(strategy).fit(*rows(96), batch_size=16, verbose=0, validation_data=rows(16), callbacks=[callback])
    found: dict[str, list[str]] = {}
    for path in folder.rglob("*tfevents*"):
        found.setdefault(path.parent.name, []).append(path.name.split(".")[-3])
    assert sorted(found) == ["train", "validation"]
    return found


class Predicting(keras.callbacks.Callback):
    """As examples do that log images or a confusion matrix."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs[f"largest of {type(self).__name__}"] = float(self.model.predict(rows(16)[0], verbose=0).max())
        super().on_epoch_end(epoch, logs)


class Table(Predicting, keras.callbacks.CSVLogger):
    pass


class Board(Predicting, keras.callbacks.TensorBoard):
    pass


def loggers_that_predict(strategy: Any, folder: Path, writes: Writes) -> dict[str, list[float]]:
    callbacks = [Table(folder / "log.csv"), Board(folder)]
    history = built(strategy).fit(*rows(48), batch_size=16, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    assert_written(strategy, writes, f"{folder.name}/log.csv")
    assert len({path.name.split(".")[-3] for path in folder.rglob("*tfevents*")}) == 1, "of one process"
    assert (folder / "log.csv").read_text().startswith("epoch,accuracy,largest of Table,loss")
    assert callbacks[0].filename == str(folder / "log.csv")
    return history.history


def interrupted_training(strategy: Any, folder: Path, writes: Writes) -> None:
    """Is gone on with by Keras' own BackupAndRestore."""
    folder.rmdir()
    steps: list[int] = []

    def interrupt(batch: int, logs: object) -> None:
        steps.append(batch)
        if len(steps) == 9:  # the third one of the second epoch
            raise InterruptedError

    def fit(*callbacks: Any) -> tuple[keras.Model, list[int]]:
        model = built(strategy)
        return model, model.fit(*rows(96), batch_size=16, epochs=3, shuffle=False, verbose=0, callbacks=callbacks).epoch

    with pytest.raises(InterruptedError):
        fit(keras.callbacks.BackupAndRestore(folder), keras.callbacks.LambdaCallback(on_train_batch_end=interrupt))
    assert json.loads((folder / "training_metadata.json").read_text())["epoch"] == 1
    model, epochs = fit(keras.callbacks.BackupAndRestore(folder))
    assert epochs == [1, 2] and int(model.optimizer.iterations) == 18
    assert not folder.exists(), "the backup must be gone after training"
    assert gap(model.get_weights(), fit()[0].get_weights()) < 1e-5
    names = ("latest.weights.h5", "training_metadata.json")
    assert_written(strategy, writes, *(f"{folder.name}/{name}" for name in names))


def asking_before_it_overwrites(strategy: Any, folder: Path, writes: Writes) -> None:
    """The chief asks, of files that were there before; rank 1 comes later, and finds what the chief has written."""
    model, rank = built(strategy), strategy._peers.rank
    path, weights = folder / "model.keras", folder / "only.weights.h5"
    with mock.patch("builtins.input", side_effect=EOFError):  # nobody is asked
        time.sleep(2.0 * rank)
        model.save(path, overwrite=False)
        model.save_weights(filepath=weights, overwrite=False)
    with strategy.scope():
        model.set_weights([value + 1 for value in model.get_weights()])
    for answer, gaps in (("n", 1.0), ("y", 0.0)):
        with mock.patch("builtins.input", return_value=answer) as asked:
            model.save(path, False)
            model.save_weights(weights, overwrite=False)
        assert asked.call_count == (0 if rank else 2)
        assert gap(model.get_weights(), keras.models.load_model(path).get_weights()) == pytest.approx(gaps, abs=1e-5)
        strategy._peers.gather("asked", None, "load the file")
    own = folder / f"own-{rank}.weights.h5"
    own.touch()
    with mock.patch("builtins.input", return_value="n") as asked:
        model.save_weights(own, overwrite=False)
    assert asked.call_count == 1 and own.stat().st_size == 0


def the_last_call_is_save(strategy: Any, folder: Path, writes: Writes) -> None:
    """On rank 1, a moment later than on the chief, which stays until its file is heard of."""
    model = built(strategy)
    time.sleep(3.0 * strategy._peers.rank)
    model.save(folder / "model.keras")
    assert gap(model.get_weights(), keras.models.load_model(folder / "model.keras").get_weights()) == 0.0


SECTIONS = {
    section.__name__: section
    for section in (
        all_formats,
        a_path_of_each_rank,
        saving_over_a_checkpoint,
        asking_before_it_overwrites,
        tensorboard_of_keras,
        loggers_that_predict,
        callbacks_that_write,
        interrupted_training,
        the_last_call_is_save,
    )
}


# The others train for long.
DAILY = (
    *("all_formats", "a_path_of_each_rank", "saving_over_a_checkpoint"),
    *("asking_before_it_overwrites", "the_last_call_is_save"),
)


@functools.cache
def results(is_daily: bool) -> list[dict[str, Any]]:
    return on_two_processes(*(section for name, section in SECTIONS.items() if (name in DAILY) == is_daily))


@pytest.mark.timeout(DEADLINE + 30)
@pytest.mark.parametrize("name", daily(SECTIONS, *DAILY))
def test_section(name):
    chief, other = (found_on(results(name in DAILY), rank, name) for rank in (0, 1))
    assert chief == other


def only_on_the_chief(folder: str) -> None:
    import tfdist
    from tfdist.runtime import job

    job._LAST_SECONDS = _TOO_LONG
    strategy = tfdist.MultiWorkerMirroredStrategy()
    model = built(strategy)
    if strategy._peers.rank == 0:
        model.save(Path(folder) / "model.keras")


def test_the_chief_waits_for_nobody_who_has_ended_without_asking(tmp_path):
    run_local(only_on_the_chief, args=(str(tmp_path),), timeout=_TOO_LONG)


def told() -> list[str]:
    """What tfdist says from now on of what it has received."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    handler.addFilter(lambda record: record.getMessage().startswith("Received: "))
    logging.getLogger("tfdist").addHandler(handler)
    return messages


def two_lines(folder: str) -> list[str]:
    """Has a ModelCheckpoint with the rank, too, and saves when the chief has ended."""
    import tfdist

    strategy = tfdist.MultiWorkerMirroredStrategy()
    model, rank, messages = built(strategy), strategy._peers.rank, told()
    checkpoint = keras.callbacks.ModelCheckpoint(Path(folder) / f"epoch-{rank}.keras")
    logger = keras.callbacks.CSVLogger(Path(folder) / f"log-{rank}.csv")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.fit(*rows(16), batch_size=16, verbose=0, callbacks=[checkpoint, logger])
    messages += [str(one.message) for one in found if str(one.message).startswith("Received: ModelCheckpoint")]
    time.sleep(1.0 * rank)
    path = Path(folder) / ("other.keras" if rank else "chief.keras")
    model.save(path)
    assert gap(model.get_weights(), keras.models.load_model(path).get_weights()) == 0.0
    return messages


@pytest.mark.nightly
def test_a_path_that_the_chief_has_not_is_written_when_it_has_ended(tmp_path):
    (message,), other = run_local(two_lines, args=(str(tmp_path),), timeout=DEADLINE)
    names = ["chief.keras", "epoch-0.keras", "log-0.csv", "other.keras"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert message.startswith(
        f"Received: ModelCheckpoint of {tmp_path}/epoch-1.keras, CSVLogger of {tmp_path}/log-1.csv, on worker 1 ("
    )
    assert f"has ModelCheckpoint of {tmp_path}/epoch-0.keras, CSVLogger of {tmp_path}/log-0.csv. Expected" in message
    assert [text.partition(". This")[0] for text in other] == [
        f"Received: {tmp_path}/other.keras to save, while the chief saves {tmp_path}/chief.keras"
    ]
