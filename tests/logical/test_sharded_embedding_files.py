"""Files of models with a `ShardedEmbedding` load into any number of shards and into `keras.layers.Embedding`."""

from __future__ import annotations

import contextlib

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.logical.embedding_models import ROWS, WIDTH, assert_same, embedding_model, train
from tfdist.compat import keras_sharded_slots
from tfdist.layers import ShardedEmbedding
from tfdist.layers.sharded_table import ShardedTable, merged_slots
from tfdist.optimizers import LazyAdam

OPTIMIZERS = {
    "Adam": lambda: keras.optimizers.Adam(0.05, amsgrad=True, use_ema=True, ema_overwrite_frequency=4),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.5),
    "LossScale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)),
    "accumulation": lambda: keras.optimizers.Adam(0.05, gradient_accumulation_steps=2),
    "LazyAdam": lambda: LazyAdam(0.05),
}


@pytest.mark.parametrize(
    "name, source, target",
    [
        ("Adam", "plain", 3),
        ("LossScale", 3, "plain"),
        *(
            pytest.param(name, *pair, marks=pytest.mark.exhaustive)
            for name, *pair in [
                ("accumulation", 2, 3),
                ("LazyAdam", 3, 1),
                ("Adam", "plain", 1),
                ("Adam", "plain", 2),
                ("Adam", 1, 2),
                ("Adam", 2, 1),
                ("Adam", 2, 2),
                ("Adam", 3, 2),
                ("Adagrad", 1, "plain"),
                ("Adagrad", 2, "plain"),
                ("Adagrad", 3, 2),
                ("LossScale", "plain", 3),
                ("accumulation", 3, "plain"),
                ("LazyAdam", "plain", 3),
            ]
        ),
    ],
)
def test_training_goes_on_from_weights(tmp_path, name, source, target):
    make = OPTIMIZERS[name]
    saved, loaded = embedding_model(source, make()), embedding_model(target, make())
    train(saved, epochs=1)
    saved.save_weights(tmp_path / "x.weights.h5")
    loaded.optimizer.build(loaded.trainable_variables)
    loaded.load_weights(tmp_path / "x.weights.h5")
    assert_same(loaded, saved, 0)
    train(saved)
    train(loaded)
    assert_same(loaded, saved)


@pytest.mark.parametrize(
    "source, target", [(2, 3), *(pytest.param(*pair, marks=pytest.mark.exhaustive) for pair in [(1, 2), (2, 1)])]
)
def test_models_are_loaded_into_the_shards_of_the_strategy(tmp_path, monkeypatch, source, target):
    strategy = tf.distribute.get_strategy()
    monkeypatch.setattr(strategy, "num_ps", source, raising=False)
    saved = embedding_model(None, OPTIMIZERS["Adam"]())
    train(saved, epochs=1)
    saved.save(tmp_path / "x.keras")
    monkeypatch.setattr(strategy, "num_ps", target)
    loaded = keras.models.load_model(tmp_path / "x.keras")
    assert (len(saved.layers[0].weights), len(loaded.layers[0].weights)) == (source, target)
    train(saved)
    train(loaded)
    assert_same(loaded, saved)


@pytest.mark.parametrize("source, target", [("plain", 3), pytest.param(3, "plain", marks=pytest.mark.exhaustive)])
def test_weights_of_keras_files(tmp_path, source, target):
    saved, loaded = (embedding_model(kind, OPTIMIZERS["Adam"]()) for kind in (source, target))
    train(saved, epochs=1)
    saved.save(tmp_path / "x.keras")
    loaded.optimizer.build(loaded.trainable_variables)
    loaded.load_weights(tmp_path / "x.keras")
    train(saved)
    train(loaded)
    assert_same(loaded, saved)


def test_files_are_the_same_as_those_of_embedding(tmp_path):
    contents = []
    for kind in ("plain", 3):
        model = embedding_model(kind, OPTIMIZERS["Adam"]())
        train(model, epochs=1)
        model.save_weights(tmp_path / f"{kind}.weights.h5")
        with h5py.File(tmp_path / f"{kind}.weights.h5") as file:
            found = {}
            file.visititems(
                lambda name, item, found=found: found.update({name: item[()]}) if hasattr(item, "dtype") else None
            )
        contents.append(found)
    plain, sharded = contents
    assert list(plain) == list(sharded)
    assert plain["layers/embedding/vars/0"].shape == (ROWS, WIDTH)
    for name, value in plain.items():
        np.testing.assert_allclose(sharded[name], value, rtol=0, atol=1e-6)


def test_negative_control_without_merged_slots(tmp_path):
    def saved_and_loaded():
        models = [embedding_model(kind, keras.optimizers.Adam(0.05)) for kind in (2, 3)]
        train(models[0], epochs=1)
        models[0].save_weights(tmp_path / "x.weights.h5")
        models[1].optimizer.build(models[1].trainable_variables)
        models[1].load_weights(tmp_path / "x.weights.h5")
        return [float(np.abs(slot.numpy()).max()) for slot in models[1].optimizer.variables[2:]]

    assert min(saved_and_loaded()) > 0
    with contextlib.ExitStack() as stack:
        for patch in keras_sharded_slots.PATCHES:
            name = patch.target.rpartition(".")[2]
            base = keras.src.optimizers.base_optimizer.BaseOptimizer
            patched = base.__dict__[name]
            # Keras' function, marked as if it were the patched one: building a layer must not put that back.
            stack.callback(setattr, base, name, patched)
            unpatched = _unmarked(patch.original())
            setattr(base, name, unpatched)
        with pytest.warns(UserWarning, match="Skipping variable loading for optimizer 'adam"):
            assert max(saved_and_loaded()) == 0


def _unmarked(function):
    def method(self, store):
        function(self, store)

    method._tfdist_original = function
    return method


@pytest.mark.exhaustive
def test_adafactor_needs_the_same_number_of_shards(tmp_path):
    saved = embedding_model(2, keras.optimizers.Adafactor(0.05))
    train(saved, epochs=1)
    saved.save_weights(tmp_path / "x.weights.h5")
    same, other = (embedding_model(shards, keras.optimizers.Adafactor(0.05)) for shards in (2, 3))
    for model in (same, other):
        model.optimizer.build(model.trainable_variables)
    with pytest.warns(UserWarning, match="Skipping variable loading for optimizer 'adafactor"):
        other.load_weights(tmp_path / "x.weights.h5")
    same.load_weights(tmp_path / "x.weights.h5")
    train(saved)
    train(same)
    assert_same(same, saved, 0)


def test_slots_of_layers_with_the_same_name():
    layers = [ShardedEmbedding(rows, 2, shards=2, name="words") for rows in (4, 4, 5)]
    for layer in layers:
        layer.build()
    variables = [variable for layer in layers for variable in layer.weights]
    assert len({variable.path for variable in variables}) == 2
    optimizer = keras.optimizers.Adam()
    optimizer.build(variables)
    for i, slot in enumerate(optimizer._momentums):
        slot.assign(np.full(slot.shape, i))
    momenta = [slot for slot in merged_slots(optimizer) if isinstance(slot, ShardedTable)][::2]
    assert [slot.numpy()[:2, 0].tolist() for slot in momenta] == [[0, 1], [2, 3], [4, 5]]
    assert [slot.shape for slot in momenta] == [(4, 2), (4, 2), (5, 2)]


@pytest.mark.parametrize("shards", [1, 2])
def test_tables_of_other_shapes_are_refused(tmp_path, shards):
    embedding_model("plain").save_weights(tmp_path / "x.weights.h5")
    layer = ShardedEmbedding(ROWS + 1, WIDTH, shards=shards)
    model = keras.Sequential(
        [keras.layers.Input((4,), dtype="int32"), layer, keras.layers.Flatten(), keras.layers.Dense(1)]
    )
    with pytest.raises(ValueError, match=r"a table of shape \(11, 3\) for '.*embeddings.*Expected: \(12, 3\)"):
        model.load_weights(tmp_path / "x.weights.h5")
    with pytest.raises(ValueError, match=r"Received: 2 variables for layer 'embedding.*Expected: 1, the table"):
        layer.load_own_variables({"0": 1, "1": 2})
