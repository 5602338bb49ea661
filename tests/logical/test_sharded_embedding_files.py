"""Files of models with a `ShardedEmbedding` load into any number of shards and into `keras.layers.Embedding`."""

from __future__ import annotations

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.logical.embedding_models import ROWS, WIDTH, assert_same, embedding_model, train
from tests.tiers import daily
from tfdist.layers import ShardedEmbedding
from tfdist.layers.sharded_table import ShardedTable, merged_slots
from tfdist.optimizers import LazyAdam

OPTIMIZERS = {
    "Adam": lambda: keras.optimizers.Adam(0.05, amsgrad=True, use_ema=True, ema_overwrite_frequency=4),
    "LazyAdam": lambda: LazyAdam(0.05),
}


@pytest.mark.parametrize(("name", "source", "target"), daily([("Adam", "plain", 3), ("LazyAdam", 3, 1)], "Adam"))
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


@pytest.mark.nightly
def test_models_are_loaded_into_the_shards_of_the_strategy(tmp_path, monkeypatch):
    strategy = tf.distribute.get_strategy()
    monkeypatch.setattr(strategy, "num_ps", 2, raising=False)
    saved = embedding_model(None, OPTIMIZERS["Adam"]())
    train(saved, epochs=1)
    saved.save(tmp_path / "x.keras")
    monkeypatch.setattr(strategy, "num_ps", 3)
    loaded = keras.models.load_model(tmp_path / "x.keras")
    assert (len(saved.layers[0].weights), len(loaded.layers[0].weights)) == (2, 3)
    train(saved)
    train(loaded)
    assert_same(loaded, saved)


@pytest.mark.nightly
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
