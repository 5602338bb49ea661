"""`ShardedEmbedding` computes what `keras.layers.Embedding` does, in one process."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.logical.embedding_models import ROWS, WIDTH, assert_same, embedding_model, train
from tests.tiers import daily
from tfdist.layers import ShardedEmbedding, sharded_embedding
from tfdist.layers.sharded_table import ShardedTable
from tfdist.optimizers import LazyAdam

SHARDS = [1, 3]
OPTIMIZERS = {
    "AdamW": lambda: keras.optimizers.AdamW(0.05, weight_decay=0.1),
    "global_clipnorm": lambda: keras.optimizers.Adam(0.05, global_clipnorm=0.01),
    "LazyAdam": lambda: LazyAdam(0.05),
}


def _pair(shards: int, **kwargs) -> tuple[ShardedEmbedding, keras.layers.Embedding]:
    layers = []
    for make in (
        lambda: ShardedEmbedding(ROWS, WIDTH, shards=shards, **kwargs),
        lambda: keras.layers.Embedding(ROWS, WIDTH, **kwargs),
    ):
        keras.utils.set_random_seed(1)
        layers.append(make())
        layers[-1].build()
    return layers[0], layers[1]


@pytest.mark.parametrize("shards", SHARDS)
def test_lookup(shards):
    sharded, plain = _pair(shards)
    assert [tuple(w.shape) for w in sharded.weights] == [(len(range(s, ROWS, shards)), WIDTH) for s in range(shards)]
    table = plain.get_weights()[0]
    np.testing.assert_array_equal(sharded.get_weights()[0], table)
    for dtype in ("int32", "int64", "uint8", "float32"):
        ids = np.array([[0, 10, 3], [3, 3, 7]], dtype)
        np.testing.assert_array_equal(sharded(ids), plain(ids))
    np.testing.assert_array_equal(sharded(np.array([-1, -11])), table[[-1, 0]])
    np.testing.assert_array_equal(sharded(np.array([-1, -11])), plain(np.array([-1, -11])))
    assert sharded(np.zeros((2, 0), "int32")).shape == (2, 0, WIDTH)
    assert sharded(np.int32(4)).shape == (WIDTH,)


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("bad", [ROWS, ROWS + 2, -ROWS - 1])
def test_ids_outside_of_the_table_fail(shards, bad):
    for layer in _pair(shards):
        with pytest.raises(tf.errors.InvalidArgumentError, match="is not in"):
            layer(np.array([0, bad]))


@pytest.mark.parametrize("shards", SHARDS)
def test_ragged_and_sparse_ids(shards):
    sharded, plain = _pair(shards)
    ragged = tf.ragged.constant([[1, 2], [], [10]])
    assert sharded(ragged).to_list() == plain(ragged).to_list()
    sparse = tf.sparse.from_dense([[1, 0], [2, 10]])
    np.testing.assert_array_equal(sharded(sparse), plain(sparse))


@pytest.mark.parametrize("shards", SHARDS)
def test_only_rows_are_read_and_have_gradients(shards):
    sharded, plain = _pair(shards)

    def gradients_of(layer):
        @tf.function
        def gradients(ids):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(ids) ** 2)
            return tape.gradient(loss, [weight.value for weight in layer.weights])

        concrete = gradients.get_concrete_function(tf.TensorSpec([None, 4], tf.int64))
        return concrete, [operation.type for operation in concrete.graph.get_operations()]

    concrete, types = gradients_of(sharded)
    assert types.count("ResourceGather") == shards
    assert "ReadVariableOp" not in types
    assert all(isinstance(output, tf.IndexedSlices) for output in concrete.structured_outputs)
    # Keras' layer reads the whole table.
    assert "ReadVariableOp" in gradients_of(plain)[1]

    ids = np.array([[0, 4, 4, 9]])
    found = [tf.convert_to_tensor(g) for g in concrete(tf.constant(ids))]
    whole = ShardedTable([keras.Variable(g) for g in found]).numpy()
    expected = np.zeros((ROWS, WIDTH), "float32")
    np.add.at(expected, ids[0], 2 * sharded.get_weights()[0][ids[0]])
    np.testing.assert_allclose(whole, expected, rtol=1e-6)


@pytest.mark.parametrize("initializer", ["uniform", "glorot_uniform", "orthogonal", "ones"])
@pytest.mark.parametrize("shards", [2, 3])
def test_initial_values_are_those_of_embedding(initializer, shards):
    sharded, plain = _pair(shards, embeddings_initializer=initializer)
    np.testing.assert_array_equal(sharded.get_weights()[0], plain.get_weights()[0])


@pytest.mark.parametrize("seed", [5, None, "generator"])
def test_large_tables_are_drawn_by_shard(monkeypatch, seed):
    monkeypatch.setattr(sharded_embedding, "WHOLE_TABLE_LIMIT", 0)
    seed = keras.random.SeedGenerator(5) if seed == "generator" else seed
    layer = ShardedEmbedding(4000, 2, keras.initializers.RandomNormal(0.0, 1.0, seed=seed), shards=2)
    layer.build()
    first, second = (weight.numpy() for weight in layer.weights)
    table = layer.get_weights()[0]
    assert abs(table.mean()) < 0.05 and abs(table.std() - 1) < 0.05
    # With the same seed for both shards, they would be equal.
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.05


@pytest.mark.parametrize(("name", "shards"), daily([("AdamW", 3), ("global_clipnorm", 2), ("LazyAdam", 3)], "AdamW"))
def test_fit(name, shards):
    make = OPTIMIZERS[name]
    sharded, plain = embedding_model(shards, make()), embedding_model("plain", make())
    initial = plain.get_weights()[0]
    train(sharded)
    train(plain)
    assert_same(sharded, plain)
    changed = np.abs(plain.get_weights()[0] - initial).max(1)
    assert changed[: ROWS - 2].min() > 1e-3


@pytest.mark.parametrize(
    "kwargs",
    [
        {"embeddings_regularizer": keras.regularizers.L1L2(0.1, 0.1)},
        {"embeddings_constraint": keras.constraints.MaxNorm(0.04, axis=1)},
    ],
    ids=["L1L2", "MaxNorm"],
)
def test_regularizers_and_constraints(kwargs):
    models = [embedding_model(shards, keras.optimizers.SGD(0.5), **kwargs) for shards in (3, "plain")]
    for model in models:
        train(model)
    assert_same(*models)
    free = embedding_model("plain", keras.optimizers.SGD(0.5))
    train(free)
    with pytest.raises(AssertionError):
        assert_same(models[0], free)


def test_what_combines_rows_is_refused():
    by_column = {"embeddings_constraint": keras.constraints.MaxNorm(1.0)}
    with pytest.raises(ValueError, match=r"MaxNorm with axis=0, which combines different rows.*Expected: axis=1"):
        ShardedEmbedding(ROWS, WIDTH, shards=2, **by_column).build()
    with pytest.raises(ValueError, match=r"OrthogonalRegularizer, which combines different rows.*Expected: L1, L2"):
        ShardedEmbedding(ROWS, WIDTH, embeddings_regularizer="orthogonal_regularizer", shards=2).build()
    ShardedEmbedding(ROWS, WIDTH, shards=1, **by_column).build()


@pytest.mark.parametrize("shards", SHARDS)
def test_mixed_precision(shards):
    sharded, plain = _pair(shards, dtype="mixed_float16")
    ids = np.array([[0, 10, 3]])
    assert sharded(ids).dtype == plain(ids).dtype == tf.float16
    assert {weight.dtype for weight in sharded.weights} == {"float32"}
    np.testing.assert_array_equal(sharded(ids), plain(ids))
    # Ids above 2048 are not float16 numbers.
    large = ShardedEmbedding(5000, 1, dtype="mixed_float16", weights=np.arange(5000.0)[:, None] / 8, shards=shards)
    assert float(large(np.array([4001]))[0, 0]) == np.float16(4001 / 8)


def test_number_of_shards(monkeypatch):
    def built(shards):
        layer = ShardedEmbedding(ROWS, WIDTH, shards=shards)
        layer.build()
        return len(layer.weights)

    assert (built(None), built(2), built(100)) == (1, 2, ROWS)
    monkeypatch.setattr(tf.distribute.get_strategy(), "num_ps", 3, raising=False)
    assert (built(None), built(2)) == (3, 2)


@pytest.mark.parametrize("argument, value", [("input_dim", 0), ("output_dim", 2.5), ("shards", -1), ("shards", True)])
def test_arguments(argument, value):
    arguments = {"input_dim": 4, "output_dim": 2, argument: value}
    with pytest.raises(ValueError, match=rf"Received: {argument}={value}\. Expected: a positive integer"):
        ShardedEmbedding(**arguments)


def test_weights_as_one_table():
    table = np.arange(8.0).reshape(4, 2)
    layer = ShardedEmbedding(4, 2, weights=[table], shards=3)
    np.testing.assert_array_equal(layer(np.arange(4)), table)
    layer.set_weights([table + 1])
    np.testing.assert_array_equal(layer.get_weights()[0], table + 1)
    with pytest.raises(ValueError, match=r"Received: a table of shape \(2, 4\).*Expected: \(4, 2\)"):
        layer.set_weights([table.T.reshape(2, 4)])
    with pytest.raises(ValueError, match=r"Received: 2 arrays for layer '.*' \(built\)\. Expected: one array"):
        layer.set_weights([table, table])


def test_config():
    layer = ShardedEmbedding(4, 2, "ones", "l2", "non_neg", mask_zero=True, shards=None, name="words", dtype="float64")
    copy = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert type(copy) is ShardedEmbedding
    assert copy.get_config() == layer.get_config()
    assert (copy.shards, copy.name, copy.mask_zero, copy.variable_dtype) == (None, "words", True, "float64")
