"""What users do with a model around `fit`: data, weights, callbacks, files, a second `compile`."""

from __future__ import annotations

import functools
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers

import tfdist
from tests.logical.pipelines import BATCH, assert_same, assert_trains_equally, both, labelled, mlp, pipeline
from tests.models import assert_arrays, in_scope, ready, warned

pytestmark = pytest.mark.usefixtures("four_devices")

X, Y = labelled()


WEIGHTS = np.random.RandomState(5).uniform(0.1, 2.0, 37).astype("float32")


def test_equals_one_process():
    """With weights of rows, validation and several steps at a time."""

    def build() -> keras.Model:
        metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)]
        return mlp(weighted_metrics=metrics, steps_per_execution=2)()

    assert_trains_equally(build, (X, Y, WEIGHTS), batch_size=8, validation_data=(X[:11], Y[:11]))


@pytest.mark.nightly
def test_single_batches():
    def train(model: keras.Model) -> list:
        trained = [model.train_on_batch(X[:8], Y[:8]), model.train_on_batch(X[:9], Y[:9], sample_weight=WEIGHTS[:9])]
        tested = model.test_on_batch(X[:3], Y[:3], return_dict=True)
        return [*trained, tested, model.predict_on_batch(X[:3]), model(X[:2]).numpy()]

    assert_same(*both(train, mlp()))


@pytest.mark.nightly
def test_callbacks(tmp_path):
    """Each is at work: training is ended, the learning rate is cut, files are written."""

    def train(model: keras.Model) -> list:
        folder = tmp_path / type(model.distribute_strategy).__name__
        folder.mkdir()
        callbacks = [
            keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True),
            keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=0.05),
            keras.callbacks.ModelCheckpoint(str(folder / "best.keras"), save_best_only=True),
            keras.callbacks.CSVLogger(str(folder / "log.csv")),
        ]
        arguments = {"validation_data": (X[:11], (Y[:11] + 1) % 3), "callbacks": callbacks, "shuffle": False}
        history = model.fit(X, Y, batch_size=BATCH, epochs=8, verbose=0, **arguments).history
        assert 3 <= len(history["loss"]) < 8
        logged = np.genfromtxt(folder / "log.csv", delimiter=",", skip_header=1)
        saved = keras.models.load_model(folder / "best.keras")
        return [history, logged, saved.get_weights(), float(model.optimizer.learning_rate)]

    assert_same(*both(train, mlp()))


@pytest.mark.nightly
def test_backup_and_restore(tmp_path):
    """A fit that ends after two epochs, and a second one of a new model that goes on for two."""
    build = mlp(lambda: layers.Dropout(0.2), optimizer=lambda: keras.optimizers.Adam(0.01))

    def train(epochs: int, folder: Path) -> keras.Model:
        with pipeline().scope():
            keras.utils.set_random_seed(7)
            model = build()
        backup = tfdist.callbacks.BackupAndRestore(str(folder))
        seen.append(model.fit(X, Y, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=[backup]).history)
        return model

    seen: list[dict] = []
    whole = train(4, tmp_path / "whole")
    train(2, tmp_path / "parts")
    resumed = train(4, tmp_path / "parts")
    assert seen[2] == seen[0] and len(seen[2]["loss"]) == 4
    assert_arrays(whole.get_weights(), resumed.get_weights())
    for a, b in zip(whole.optimizer.variables, resumed.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


@pytest.mark.nightly
def test_saved_model_goes_on(tmp_path):
    """With the state of its optimizer, in a pipeline of three stages."""
    build = mlp(optimizer=lambda: keras.optimizers.Adam(0.01))
    with pipeline().scope():
        keras.utils.set_random_seed(7)
        model = build()
    arguments = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    model.fit(X, Y, **arguments)
    model.save(tmp_path / "model.keras")
    loaded = in_scope(pipeline(3), lambda: keras.models.load_model(tmp_path / "model.keras"))
    np.testing.assert_allclose(loaded.predict(X, verbose=0), model.predict(X, verbose=0), atol=1e-6)
    first, second = (m.fit(X, Y, **arguments).history for m in (model, loaded))
    assert_same(first, second)
    assert_same(model.get_weights(), loaded.get_weights())
    assert_same(*([v.numpy() for v in m.optimizer.variables] for m in (model, loaded)))


def test_eager_step():
    """`run_eagerly=True` trains without a pipeline, with the same results."""
    assert_trains_equally(mlp(run_eagerly=True), (X, Y), epochs=1, whole=False)


@pytest.mark.nightly
def test_statistics_of_micro_batches_are_warned_of_once():
    with pipeline().scope():
        models = [mlp(layers.BatchNormalization)(), mlp(layers.LayerNormalization)()]
    fits = [functools.partial(model.fit, X, Y, batch_size=16, verbose=0) for model in models * 2]
    (message,) = warned(lambda: [fit() for fit in fits], "normalises over the rows")
    assert "(BatchNormalization), which normalises over the rows of one micro-batch" in message


def test_a_model_that_its_first_predict_builds():
    ids = np.arange(48).reshape(16, 3) % 20

    def build() -> keras.Model:
        stack = [layers.Embedding(20, 4), layers.Flatten(), layers.Dense(8), layers.Dense(1)]
        return ready(keras.Sequential(stack), keras.optimizers.SGD(0.1), "mse")

    def train(model: keras.Model) -> np.ndarray:
        first = model.predict(ids, batch_size=8, verbose=0)
        model.fit(ids, ids[:, :1], batch_size=8, verbose=0, shuffle=False)
        return first

    assert_same(*both(train, build))


def test_evaluate_and_predict_without_training():
    """Where a device has several pieces, they go round; the last batch has fewer rows than micro-batches."""
    with pipeline(2, 4, schedule="interleaved").scope():
        keras.utils.set_random_seed(7)
        model = mlp()()
    expected = model(X).numpy()
    np.testing.assert_allclose(model.predict(X, batch_size=5, verbose=0), expected, atol=1e-6)
    loss = -np.log(expected[np.arange(37), Y]).mean()
    assert model.evaluate(X, Y, batch_size=5, verbose=0)[0] == pytest.approx(loss, abs=1e-5)
    assert model.optimizer.iterations.numpy() == 0
