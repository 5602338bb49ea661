"""What users do with a model around `fit`: data, weights, callbacks, files, a second `compile`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.logical.pipelines import BATCH, assert_trains_equally, labelled, mlp, pipeline

pytestmark = pytest.mark.usefixtures("four_devices")

X, Y = labelled()


class Rows(keras.utils.PyDataset):
    """Batches of different sizes."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return X[: 9 + 4 * index], Y[: 9 + 4 * index]


def generator() -> object:
    def rows() -> object:
        while True:
            for i in range(3):
                yield X[i * 11 : (i + 1) * 11], Y[i * 11 : (i + 1) * 11]

    return rows()


def dataset() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)


def many_metrics() -> keras.Model:
    metrics = [
        "accuracy",
        keras.metrics.SparseTopKCategoricalAccuracy(2),
        keras.metrics.MeanIoU(3, sparse_y_pred=False),
    ]
    return mlp(metrics=metrics)()


WEIGHTS = np.random.RandomState(5).uniform(0.1, 2.0, 37).astype("float32")
CASES = {
    "sample_weight, validation, steps_per_execution": (
        mlp(weighted_metrics=["accuracy"], steps_per_execution=2),
        (X, Y, WEIGHTS),
        {"batch_size": 8, "validation_data": (X[:11], Y[:11])},
    ),
}
# They come to the same steps by other ways.
REST = {
    "PyDataset, metrics": (many_metrics, Rows, {}),
    "class_weight": (mlp(), (X, Y), {"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}}),
    "validation_split, shuffled": (mlp(), (X, Y), {"validation_split": 0.3, "shuffle": True}),
    "generator": (mlp(), generator, {"steps_per_epoch": 3}),
    "tf.data": (mlp(), dataset, {}),
    "tf.data, all batches full": (mlp(), lambda: dataset().take(2), {"steps_per_epoch": 1, "epochs": 1}),
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in REST)])
def test_equals_one_process(name):
    build, data, arguments = {**CASES, **REST}[name]
    assert_trains_equally(build, data, **arguments)


def both(train: Callable[[keras.Model], object], build: Callable | None = None, **options: object) -> tuple:
    """What a function returns for a model of one process, and for one of a pipeline."""
    results = []
    for strategy in (tf.distribute.get_strategy(), pipeline(**options)):
        with strategy.scope():
            keras.utils.set_random_seed(7)
            model = (build or mlp())()
        results.append((train(model), model.get_weights()))
    return tuple(results)


def assert_same(pair: tuple, tolerance: float = 1e-5) -> None:
    expected, received = (tf.nest.flatten(value) for value in pair)
    assert len(expected) == len(received) > 0
    for a, b in zip(expected, received, strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=tolerance)


def test_single_batches():
    def train(model: keras.Model) -> list:
        trained = [model.train_on_batch(X[:8], Y[:8]), model.train_on_batch(X[:9], Y[:9], sample_weight=WEIGHTS[:9])]
        tested = model.test_on_batch(X[:3], Y[:3], return_dict=True)
        return [*trained, tested, model.predict_on_batch(X[:3]), model(X[:2]).numpy()]

    assert_same(both(train))


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

    assert_same(both(train))


@pytest.mark.exhaustive
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
    for a, b in zip(whole.get_weights(), resumed.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(whole.optimizer.variables, resumed.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


@pytest.mark.parametrize(
    "where",
    [
        "in another pipeline",
        *(pytest.param(where, marks=pytest.mark.exhaustive) for where in ("outside", "in a pipeline")),
    ],
)
def test_saved_model_goes_on(tmp_path, where):
    """With the state of its optimizer: in one process, in the same pipeline, in one of three stages."""
    build = mlp(optimizer=lambda: keras.optimizers.Adam(0.01))
    strategy = pipeline()
    with strategy.scope():
        keras.utils.set_random_seed(7)
        model = build()
    arguments = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    model.fit(X, Y, **arguments)
    model.save(tmp_path / "model.keras")
    scope = {"outside": tf.distribute.get_strategy(), "in a pipeline": strategy, "in another pipeline": pipeline(3)}
    with scope[where].scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(X, verbose=0), model.predict(X, verbose=0), atol=1e-6)
    first, second = (m.fit(X, Y, **arguments).history for m in (model, loaded))
    assert_same((first, second))
    assert_same((model.get_weights(), loaded.get_weights()))
    assert_same([v.numpy() for v in m.optimizer.variables] for m in (model, loaded))


@pytest.mark.parametrize("when", ["before the first fit", "after it"])
@pytest.mark.exhaustive
def test_weights_from_a_file_and_weights_that_are_set(tmp_path, when):
    keras.utils.set_random_seed(9)
    other = mlp()()
    other.save_weights(tmp_path / "other.weights.h5")

    def train(model: keras.Model) -> list:
        arguments = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
        histories = [model.fit(X, Y, **arguments).history] if when == "after it" else []
        model.load_weights(tmp_path / "other.weights.h5")
        assert_same((other.get_weights(), model.get_weights()), 0.0)
        histories.append(model.fit(X, Y, **arguments).history)
        model.set_weights([w * 0.5 for w in other.get_weights()])
        return [*histories, model.fit(X, Y, **arguments).history, model.predict(X, verbose=0)]

    assert_same(both(train))


@pytest.mark.exhaustive
def test_frozen_layers_and_a_second_compile():
    """Frozen weights stay, and learn again after the next compile, with another loss and another optimizer."""

    def train(model: keras.Model) -> list:
        arguments = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
        histories = [model.fit(X, Y, **arguments).history]
        for change, optimizer in ((False, "sgd"), (True, "adam")):
            for layer in model.layers[:2]:
                layer.trainable = change
            before = model.layers[0].kernel.numpy()
            with model.distribute_strategy.scope():
                model.compile(optimizer, "sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
            histories.append(model.fit(X, Y, **arguments).history)
            assert bool((model.layers[0].kernel.numpy() != before).any()) == change
        return histories

    assert_same(both(train, stages=3))


@pytest.mark.exhaustive
def test_frozen_batch_normalization_does_not_count():
    """A frozen one does not update its statistics, and uses them in training."""

    def build() -> keras.Model:
        model = mlp(layers.BatchNormalization)()
        next(layer for layer in model.layers if isinstance(layer, layers.BatchNormalization)).trainable = False
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    assert_trains_equally(build, (X, Y))


def test_eager_step():
    """`run_eagerly=True` trains without a pipeline, with the same results."""
    assert_trains_equally(mlp(run_eagerly=True), (X, Y), epochs=1)


def test_evaluate_and_predict_without_training():
    with pipeline(3).scope():
        keras.utils.set_random_seed(7)
        model = mlp()()
    expected = model(X).numpy()
    np.testing.assert_allclose(model.predict(X, batch_size=5, verbose=0), expected, atol=1e-6)
    loss = -np.log(expected[np.arange(37), Y]).mean()
    assert model.evaluate(X, Y, batch_size=5, verbose=0)[0] == pytest.approx(loss, abs=1e-5)
    assert model.optimizer.iterations.numpy() == 0


def test_evaluate_and_predict_take_batches_of_fewer_rows_than_micro_batches():
    with pipeline(2, 4).scope():
        keras.utils.set_random_seed(7)
        model = mlp()()
    expected = model(X).numpy()
    np.testing.assert_allclose(model.predict(X, batch_size=2, verbose=0), expected, atol=1e-6)
    loss = -np.log(expected[np.arange(37), Y]).mean()
    assert model.evaluate(X, Y, batch_size=2, verbose=0)[0] == pytest.approx(loss, abs=1e-5)
