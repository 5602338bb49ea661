"""Keras' own files on remote paths, also on those that TensorFlow has no file system for."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import fsspec
import keras
import numpy as np
import pytest

import tfdist
from tfdist.compat import keras_files
from tfdist.runtime import chief
from tfdist.storage import base

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
    model = fitted(
        tfdist.callbacks.BackupAndRestore(f"{bucket}/backup"),
        keras.callbacks.ModelCheckpoint(f"{bucket}/epoch-{{epoch:02d}}.keras"),
    )
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


def test_a_path_that_nothing_knows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ModelCheckpoint's filepath 'nothing://bucket/x\.keras'"):
        fitted(keras.callbacks.ModelCheckpoint("nothing://bucket/x.keras"))


def test_a_path_that_cannot_be_written_is_found_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    watch = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: begun.append(batch))

    def forbidden(*args: Any, **options: Any) -> None:
        raise PermissionError("Forbidden")

    monkeypatch.setattr(base, "patiently", lambda attempt, final: attempt())
    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "pipe_file", forbidden)
    with pytest.raises(OSError, match=r"ModelCheckpoint\(filepath='memory://b/\{epoch\}.keras'\), but an object there"):
        fitted(keras.callbacks.ModelCheckpoint("memory://b/{epoch}.keras"), watch)
    assert begun == []


def test_a_folder_is_tried_once(monkeypatch: pytest.MonkeyPatch, bucket: str) -> None:
    tried: list[str] = []
    monkeypatch.setattr(chief, "check_writable", lambda storage, folder: tried.append(folder))
    save = keras.callbacks.ModelCheckpoint(f"{bucket}/best.keras", save_best_only=True)
    model = fitted(save)
    for _ in range(3):
        model.evaluate(ROWS, ROWS[:, :2], verbose=0, callbacks=[save])
    assert tried == [bucket]


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
