"""`LazyAdam` updates the rows that have a gradient, with Adam's formula, and nothing of the size of the table."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.logical.embedding_models import apply_function, embedding_model, state, table_sized, train
from tests.models import in_scope, ready
from tfdist.optimizers import LazyAdam

ROWS = 97
INITIAL = np.random.default_rng(0).normal(size=(ROWS, 2)).astype("float32")
# Row 5 three times.
IDS = [5, 8, 5, 90, 5]
VALUES = np.random.default_rng(1).normal(size=(5, 2)).astype("float32")


def _after_steps(optimizer, ids=IDS, values=VALUES, initial=INITIAL, dense=False, steps=4):
    variable = keras.Variable(initial)
    step = apply_function(optimizer, variable, ids, values, dense)
    for _ in range(steps):
        step()
    return variable.numpy()


def _reference(amsgrad=False, sum_first=True, steps=4):
    """LazyAdam in NumPy, with float64."""
    table, m, v, v_hat = INITIAL.astype("float64"), *(np.zeros((3, ROWS, 2)))
    gradient, square = np.zeros((ROWS, 2)), np.zeros((ROWS, 2))
    np.add.at(gradient, IDS, VALUES)
    np.add.at(square, IDS, VALUES.astype("float64") ** 2)
    rows = sorted(set(IDS))
    for step in range(1, steps + 1):
        m[rows] += 0.1 * (gradient - m)[rows]
        v[rows] += 0.001 * ((gradient**2 if sum_first else square) - v)[rows]
        v_hat = np.maximum(v_hat, v)
        alpha = 0.1 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        table[rows] -= (alpha * m / (np.sqrt(v_hat if amsgrad else v) + 1e-7))[rows]
    return table


@pytest.mark.parametrize("amsgrad", [False, True])
def test_against_numpy(amsgrad):
    found = _after_steps(LazyAdam(0.1, amsgrad=amsgrad))
    np.testing.assert_allclose(found, _reference(amsgrad), rtol=0, atol=1e-5)
    unused = sorted(set(range(ROWS)) - set(IDS))
    np.testing.assert_array_equal(found[unused], INITIAL[unused])


def test_negative_control_without_adding_up_duplicates():
    assert np.abs(_reference(sum_first=False) - _reference()).max() > 0.01
    # This is what Keras does.
    keras_adam = _after_steps(keras.optimizers.Adam(0.1))
    np.testing.assert_allclose(keras_adam[IDS], _reference(sum_first=False)[IDS], rtol=0, atol=1e-5)


@pytest.mark.parametrize("clipping", [{}, {"clipnorm": 0.5}, {"clipvalue": 0.2}, {"global_clipnorm": 0.5}])
def test_is_adam_where_every_row_has_a_gradient(clipping):
    ids, values, initial = [0, 2, 1, 2, 0], VALUES, INITIAL[:3]
    # A constant gradient has Adam's scale invariance hide the clipping, unless epsilon is large.
    arguments = {"learning_rate": 0.1, "epsilon": 1.0, **clipping}
    found = _after_steps(LazyAdam(**arguments), ids, values, initial)
    dense = _after_steps(keras.optimizers.Adam(**arguments), ids, values, initial, dense=True)
    np.testing.assert_allclose(found, dense, rtol=0, atol=1e-6)
    if clipping:
        free = _after_steps(LazyAdam(0.1, epsilon=1.0), ids, values, initial)
        assert np.abs(found - free).max() > 0.01


def test_dense_gradients_are_adams():
    arguments = {"learning_rate": 0.1, "weight_decay": 0.1, "amsgrad": True}
    found = _after_steps(LazyAdam(**arguments), dense=True)
    np.testing.assert_array_equal(found, _after_steps(keras.optimizers.Adam(**arguments), dense=True))


@pytest.mark.parametrize("shards", [1, 3])
def test_no_step_of_fit_has_the_size_of_the_table(shards):
    from tfdist.layers import ShardedEmbedding

    model = ready(
        keras.Sequential([ShardedEmbedding(ROWS * shards, 2, shards=shards), keras.layers.Flatten()]), LazyAdam(), "mse"
    )
    ids = np.zeros((4, 3), "int32")
    model.fit(ids, np.zeros((4, 6)), verbose=0)

    @tf.function
    def step(ids, targets):
        return model.train_step((ids, targets))

    graph = step.get_concrete_function(ids, tf.zeros((4, 6))).graph
    types = {operation.type for operation in graph.get_operations()}
    assert {"ResourceGather", "ResourceScatterUpdate", "ResourceScatterSub"} <= types
    assert table_sized(graph, ROWS) == set()


@pytest.mark.parametrize(
    "argument, value, reason",
    [
        ("use_ema", True, "averages every row"),
        ("gradient_accumulation_steps", 2, "adds gradients up in a table"),
        ("loss_scale_factor", 8.0, "divides gradients"),
    ],
)
def test_refused_arguments(argument, value, reason):
    with pytest.raises(ValueError, match=rf"LazyAdam with {argument}={value}, which {reason}.*Expected: no {argument}"):
        LazyAdam(**{argument: value})


@pytest.mark.nightly
def test_weight_decay():
    with pytest.raises(ValueError, match=r"weight_decay=0.1 for '.*exclude_from_weight_decay"):
        _after_steps(LazyAdam(0.1, weight_decay=0.1))
    optimizer = LazyAdam(0.05, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["embeddings"])
    decayed, free = embedding_model(2, optimizer), embedding_model(2, LazyAdam(0.05))
    for model in (decayed, free):
        train(model)
    assert np.abs(state(decayed)[1] - state(free)[1]).max() > 0.01
    # The last two rows have no gradient.
    np.testing.assert_array_equal(state(decayed)[0][-2:], state(free)[0][-2:])


def test_config():
    optimizer = LazyAdam(0.05, beta_1=0.8, beta_2=0.99, epsilon=1e-5, amsgrad=True, clipnorm=1.0, name="lazy")
    copy = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))
    assert type(copy) is LazyAdam
    assert copy.get_config() == optimizer.get_config()


@pytest.mark.nightly
def test_replicas(mirrored):
    model = in_scope(mirrored, lambda: embedding_model(3, LazyAdam(0.05)))
    single = embedding_model(3, LazyAdam(0.05))
    for each in (model, single):
        train(each)
    np.testing.assert_allclose(state(model)[0], state(single)[0], rtol=0, atol=1e-5)
