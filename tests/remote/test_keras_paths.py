"""Keras' own files on remote paths, also on those that TensorFlow has no file system for."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.compat import keras_files
from tfdist.runtime.remote_paths import _folder_of
from tfdist.steps.common_hooks import CommonHooks
from tfdist.storage import probe

ROWS = np.random.default_rng(1).normal(size=(24, 3)).astype("float32")
_numbers = itertools.count()


@pytest.fixture(params=["ram", "memory"])
def bucket(request: pytest.FixtureRequest) -> str:
    """A place that TensorFlow has, or only fsspec."""
    return f"{request.param}://keras-{next(_numbers)}/run"


def subclassed() -> keras.Model:
    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(2)

        def call(self, inputs: Any) -> Any:
            return self.dense(inputs)

    return Model()


def functional() -> keras.Model:
    inputs = keras.Input((3,))
    return keras.Model(inputs, keras.layers.Dense(2)(inputs))


def fitted(*callbacks: keras.callbacks.Callback, make: Callable[[], keras.Model] = functional) -> keras.Model:
    strategy = tfdist.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        model = make()
        model.compile("adam", "mse")
    model.fit(ROWS, ROWS[:, :2], batch_size=8, epochs=2, verbose=0, callbacks=list(callbacks))
    return model


def assert_same_weights(left: keras.Model, right: keras.Model) -> None:
    for one, other in zip(left.get_weights(), right.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_models_are_saved_and_loaded(bucket: str) -> None:
    model = fitted(keras.callbacks.ModelCheckpoint(f"{bucket}/epoch-{{epoch:02d}}.keras"))
    model.save(f"{bucket}/last.keras")
    for name in ("epoch-02", "last"):
        assert_same_weights(keras.models.load_model(f"{bucket}/{name}.keras"), model)
    first = keras.models.load_model(f"{bucket}/epoch-01.keras")
    assert not np.array_equal(first.get_weights()[0], model.get_weights()[0])


def test_weights_are_saved_and_loaded_outside_of_the_scope(bucket: str) -> None:
    path = f"{bucket}/deeper/epoch-{{epoch:02d}}.weights.h5"
    model = fitted(keras.callbacks.ModelCheckpoint(path, save_weights_only=True), make=subclassed)
    other = subclassed()
    other(ROWS)
    other.load_weights(path.format(epoch=2))
    assert_same_weights(other, model)


def test_a_model_that_is_not_there(bucket: str) -> None:
    fitted()
    with pytest.raises((OSError, ValueError, tf.errors.NotFoundError)):
        keras.models.load_model(f"{bucket}/absent.keras")


def test_a_backup_beside_a_checkpoint(bucket: str) -> None:
    def callbacks() -> list[keras.callbacks.Callback]:
        return [
            tfdist.callbacks.BackupAndRestore(f"{bucket}/backup", delete_checkpoint=False),
            keras.callbacks.ModelCheckpoint(f"{bucket}/best.keras", "loss", save_best_only=True),
        ]

    model = fitted(*callbacks())
    assert_same_weights(keras.models.load_model(f"{bucket}/best.keras"), model)


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("CSVLogger", "memory://bucket/logs"),
        ("CSVLogger", "ram://bucket/logs"),
        ("TensorBoard", "memory://bucket/logs"),
    ],
)
def test_what_would_fail_later_is_refused(kind: str, path: str) -> None:
    callback = getattr(keras.callbacks, kind)(path)
    with pytest.raises(ValueError, match=rf"Received: {kind}\(.*{path}'\)\. Expected: a local path.*copy that when"):
        fitted(callback)


def test_it_is_refused_on_every_process() -> None:
    """Others than the chief do not keep these callbacks, and would wait for it."""

    class Elsewhere(CommonHooks):
        def _arrange(self, callback_list: Any, callbacks: list, model: Any) -> list:
            return []

    with pytest.raises(ValueError, match=r"Received: CSVLogger\(.*Expected: a local path"):
        Elsewhere().arrange_callbacks(
            SimpleNamespace(callbacks=[keras.callbacks.CSVLogger("ram://bucket/logs")]), functional()
        )


def test_keras_csv_logger_cannot_close_a_remote_file() -> None:
    """Why it is refused."""
    assert not hasattr(tf.io.gfile.GFile, "closed")


def test_tensorboard_where_tensorflow_writes() -> None:
    fitted(keras.callbacks.TensorBoard("ram://keras-board/logs"))
    assert tf.io.gfile.glob("ram://keras-board/logs/train/events.*")


@pytest.mark.parametrize(
    ("path", "kind", "message"),
    [
        ("nothing://bucket/x.keras", ValueError, "ModelCheckpoint's filepath 'nothing://bucket/x.keras'"),
        (str(Path("gs://bucket/x.keras")), ValueError, "'gs:/bucket/x.keras', with one slash"),
        ("sftp://me:secret@host/x.keras", ValueError, r"password in it, sftp://\*\*\*@host"),
    ],
)
def test_a_path_that_nothing_knows_is_refused_before_the_first_step(
    path: str, kind: type[Exception], message: str
) -> None:
    begun: list[int] = []
    watch = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: begun.append(batch))
    with pytest.raises(kind, match=message):
        fitted(keras.callbacks.ModelCheckpoint(path), watch)
    assert begun == []


def test_a_path_that_cannot_be_written_is_found_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    watch = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: begun.append(batch))

    def forbidden(*args: Any, **options: Any) -> None:
        raise PermissionError("Forbidden")

    monkeypatch.setattr(probe, "patiently", lambda attempt, final: attempt())
    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "pipe_file", forbidden)
    with pytest.raises(OSError, match=r"ModelCheckpoint\(filepath='memory://b/\{epoch\}.keras'\), but an object there"):
        fitted(keras.callbacks.ModelCheckpoint("memory://b/{epoch}.keras"), watch)
    assert begun == []


@pytest.mark.parametrize(
    ("path", "folder"),
    [
        ("gs://b/run/{epoch}/x.keras", "gs://b/run"),
        ("gs://b/x-{epoch}.keras", "gs://b"),
        ("gs://b/logs", "gs://b"),
        ("gs://b", "gs://b"),
    ],
)
def test_the_folder_that_is_tried(path: str, folder: str) -> None:
    assert _folder_of(path) == folder


def test_other_paths_are_left_to_tensorflow(tmp_path: Any) -> None:
    called: list[str] = []

    class Gfile:
        available = True

        def exists(self, path: str) -> bool:
            called.append(path)
            return True

    files = keras_files._Files(Gfile())
    assert files.available and files.exists("gs://b/x") and files.exists(str(tmp_path)) and files.exists("hf://a/b")
    assert not files.exists("memory://nowhere/x")
    assert called == ["gs://b/x", str(tmp_path), "hf://a/b"]
