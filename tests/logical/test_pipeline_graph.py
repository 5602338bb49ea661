"""Models as lists of calls, and where their authors cut them."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tfdist.layer_graph.graph import LayerGraph, flatten, functional_of
from tfdist.strategies.pipeline.plan import cuts_from_names, stage, stages_of


@pytest.fixture(autouse=True)
def seeded():
    keras.utils.set_random_seed(0)


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def graph_of(model: keras.Model) -> LayerGraph:
    return flatten(functional_of(model))


def names(graph: LayerGraph) -> list[str]:
    return [call.name for call in graph.calls]


def run(graph: LayerGraph, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Makes the calls one by one."""
    values = dict(zip(graph.inputs, map(tf.constant, inputs), strict=True))
    for call in graph.calls:
        call.run(values, training=False)
    return [values[key].numpy() for key in graph.outputs]


def nested() -> tuple[keras.Model, list[np.ndarray]]:
    block = keras.Sequential([keras.Input((8,)), layers.Dense(8, "relu", name="a"), layers.Dropout(0.5, name="b")])
    block.name = "block"
    inner_input = keras.Input((8,))
    inner = keras.Model(inner_input, layers.Add(name="add")([block(inner_input), inner_input]), name="inner")
    inputs = keras.Input((8,))
    return keras.Model(inputs, layers.Dense(1, name="head")(inner(inputs))), [numbers(4, 8)]


def shared() -> tuple[keras.Model, list[np.ndarray]]:
    left, right = keras.Input((4,)), keras.Input((4,))
    dense = layers.Dense(4, name="shared")
    tower = keras.Sequential([keras.Input((4,)), layers.Dense(3, name="x"), layers.Dense(2, name="y")], name="tower")
    both = layers.Concatenate(name="both")([tower(dense(dense(left))), tower(dense(right))])
    return keras.Model([left, right], layers.Dense(1, name="head")(both)), [numbers(3, 4), numbers(3, 4) + 1]


def several_outputs() -> tuple[keras.Model, list[np.ndarray]]:
    inputs = keras.Input((6,))
    early = layers.Dense(5, name="early")(inputs)
    parts = ops.split(early, [2], axis=-1)
    outputs = {"first": early, "second": layers.Dense(2, name="late")(parts[1])}
    return keras.Model(inputs, outputs), [numbers(4, 6)]


def masked() -> tuple[keras.Model, list[np.ndarray]]:
    inputs = keras.Input((7,), dtype="int32")
    x = layers.Embedding(20, 6, mask_zero=True, name="embedding")(inputs)
    x = layers.LSTM(5, return_sequences=True, name="lstm")(x)
    x = layers.Bidirectional(layers.GRU(4), name="gru")(x)
    tokens = np.random.default_rng(0).integers(1, 20, (4, 7)).astype("int32")
    tokens[:, 4:] = 0
    return keras.Model(inputs, layers.Dense(1)(x)), [tokens]


def dictionary() -> tuple[keras.Model, list[np.ndarray]]:
    inputs = {"b": keras.Input((3,), name="b"), "a": keras.Input((2,), name="a")}
    inner = keras.Model(inputs, layers.Concatenate(name="both")([inputs["a"], inputs["b"]]), name="inner")
    given = {"a": keras.Input((2,), name="a"), "b": keras.Input((3,), name="b")}
    model = keras.Model(given, layers.Dense(1, name="head")(inner(given)))
    return model, [numbers(4, 2), numbers(4, 3)]


def frozen_inside() -> tuple[keras.Model, list[np.ndarray]]:
    base = keras.Sequential([keras.Input((4,)), layers.Dense(4), layers.BatchNormalization()], name="base")
    base.trainable = False
    inputs = keras.Input((4,))
    return keras.Model(inputs, layers.Dense(1, name="head")(base(inputs, training=False))), [numbers(4, 4)]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (nested, ["inner/block/a", "inner/block/b", "inner/add", "head"]),
        (shared, [*["shared"] * 3, *["tower/x", "tower/y"] * 2, "both", "head"]),
        (several_outputs, ["early", "split", "late"]),
        # Keras makes masks with calls of their own.
        (masked, ["not_equal", "embedding", "lstm", "gru", "dense"]),
        (dictionary, ["inner/both", "head"]),
        # A model that is called with arguments of its own stays one call.
        (frozen_inside, ["base", "head"]),
    ],
)
def test_calls_one_by_one_make_what_the_model_makes(make, expected):
    keras.backend.clear_session()
    model, inputs = make()
    graph = graph_of(model)
    assert names(graph) == expected
    whole = keras.tree.flatten(model(inputs[0] if len(inputs) == 1 else _as_given(model, inputs), training=False))
    outputs = run(graph, inputs)
    assert len(outputs) == len(whole)
    for ours, theirs in zip(outputs, whole, strict=True):
        np.testing.assert_array_equal(ours, theirs.numpy())


def _as_given(model: keras.Model, inputs: list[np.ndarray]):
    return keras.tree.pack_sequence_as(model.input, inputs)


def two_blocks() -> LayerGraph:
    blocks = [
        keras.Sequential([keras.Input((2,)), layers.Dense(2, name="dense_in"), layers.Dense(2, name=last)], name=name)
        for name, last in (("encoder", "dense_mid"), ("decoder", "dense_out"))
    ]
    inputs = keras.Input((2,))
    return graph_of(keras.Model(inputs, layers.Dense(1, name="head")(blocks[1](blocks[0](inputs)))))


@pytest.mark.parametrize(
    ("cuts", "positions"),
    [
        ([], ()),
        (["encoder/dense_in"], (1,)),
        (["dense_mid"], (2,)),
        (["encoder", "decoder/dense_in"], (2, 3)),
        (["encoder", "decoder"], (2, 4)),
    ],
)
def test_cuts_after_named_layers(cuts, positions):
    assert cuts_from_names(two_blocks(), cuts) == positions


def test_a_cut_after_a_shared_layer_comes_after_its_last_call():
    inputs = keras.Input((2,))
    dense = layers.Dense(2, name="twice")
    graph = graph_of(keras.Model(inputs, layers.Dense(1, name="head")(dense(layers.ReLU(name="r")(dense(inputs))))))
    assert names(graph) == ["twice", "r", "twice", "head"]
    assert cuts_from_names(graph, ["twice"]) == (3,)
    with pytest.raises(ValueError, match="Received: 'r' at position 1 of cuts="):
        cuts_from_names(graph, ["twice", "r"])


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        ("encoder", r"cuts='encoder'\. Expected: a list of names of layers, \['encoder'\]"),
        (
            ["dense_in"],
            r"'dense_in' in cuts, which several layers have.*such as 'encoder/dense_in', 'decoder/dense_in'",
        ),
        (["dense_ot"], r"'dense_ot' in cuts, which no layer has.*such as 'dense_out'"),
        ([3], r"Received: 3 in cuts, which no layer has.*such as 'encoder'"),
        (["head"], r"'head' at position 0 of cuts=\['head'\], which leaves no layer for a stage"),
        (["decoder", "encoder"], r"'encoder' at position 1 .* in the order in which they are called"),
        (["encoder", "encoder"], r"'encoder' at position 1 .*which leaves no layer for a stage"),
    ],
)
def test_refused_cuts(cuts, message):
    with pytest.raises(ValueError, match=message):
        cuts_from_names(two_blocks(), cuts)


def test_stages_of_scopes():
    inputs = keras.Input((4,))
    with stage(0):
        x = layers.Dense(4, name="a")(inputs)
    x = layers.ReLU(name="relu")(x)
    with stage(1):
        x = layers.Dense(4, name="b")(x) + 1.0
        with stage(2):
            x = layers.Dense(4, name="c")(x)
    graph, cuts = stages_of(graph_of(keras.Model(inputs, layers.Dense(1, name="head")(x))))
    assert names(graph) == ["a", "relu", "b", "add", "c", "head"]
    assert cuts == (2, 4)


def test_branches_are_sorted_by_stage():
    inputs = keras.Input((4,))
    with stage(1):
        later = layers.Dense(4, name="later")(inputs)
        later = layers.Dense(4, name="last")(later)
    with stage(0):
        first = layers.Dense(4, name="first")(inputs)
    with stage(1):
        outputs = layers.Add(name="add")([first, later])
    model = keras.Model(inputs, outputs)
    plain = graph_of(model)
    graph, cuts = stages_of(plain)
    assert names(plain)[0] == "later"
    assert names(graph) == ["first", "later", "last", "add"]
    assert cuts == (1,)
    np.testing.assert_array_equal(run(graph, [numbers(2, 4)])[0], model(numbers(2, 4)).numpy())


def test_a_stage_that_depends_on_a_later_one():
    inputs = keras.Input((4,))
    with stage(1):
        x = layers.Dense(4, name="b")(inputs)
    with stage(0):
        x = layers.Dense(4, name="a")(x)
    with pytest.raises(
        ValueError, match=r"layer 'a' in stage 0, which takes what 'b' in stage 1 makes\. Expected: each"
    ):
        stages_of(graph_of(keras.Model(inputs, x)))


def test_a_stage_without_layers():
    inputs = keras.Input((4,))
    with stage(0):
        x = layers.Dense(4)(inputs)
    with stage(2):
        x = layers.Dense(4)(x)
    with pytest.raises(ValueError, match=r"layers in the stages \[0, 2\]\. Expected: layers in each stage from 0 to 2"):
        stages_of(graph_of(keras.Model(inputs, x)))


@pytest.mark.parametrize("index", [-1, True, 1.0, "0"])
def test_refused_stages(index):
    with pytest.raises(ValueError, match="Expected: a whole number of at least 0: the first stage is 0"), stage(index):
        pass
