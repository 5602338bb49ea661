"""What calls cost: checked against numbers that are known, and against even partitions of known models."""

from __future__ import annotations

import keras
import pytest
from keras import layers

from tfdist.layer_graph.costs import costs_of, crossing, kept_bytes, measured_costs, weights
from tfdist.layer_graph.graph import LayerGraph, flatten, functional_of
from tfdist.layer_graph.partition import Cost, balance


def sequence(shape: tuple[int | None, ...], *of_layers: keras.Layer, dtype: str = "float32") -> LayerGraph:
    return flatten(functional_of(keras.Sequential([keras.Input(shape, dtype=dtype), *of_layers])))


def flops_of_last(graph: LayerGraph, rows: int = 2) -> float:
    return costs_of(graph, rows)[-1].flops


@pytest.mark.parametrize(
    ("shape", "layer", "flops"),
    [
        ((10,), layers.Dense(5, use_bias=False), 2 * 10 * 5),
        ((10,), layers.Dense(5), 2 * 10 * 5 + 5),
        ((6, 10), layers.Dense(5, use_bias=False), 6 * 2 * 10 * 5),
        ((8, 8, 3), layers.Conv2D(4, 3, padding="same", use_bias=False), 8 * 8 * 2 * 9 * 3 * 4),
        ((8, 8, 4), layers.Conv2D(4, 3, padding="same", use_bias=False, groups=2), 8 * 8 * 2 * 9 * 2 * 4),
        ((8, 8, 3), layers.DepthwiseConv2D(3, padding="same", use_bias=False), 8 * 8 * 2 * 9 * 3),
        ((8, 3), layers.Conv1D(4, 3, padding="same", use_bias=False), 8 * 2 * 3 * 3 * 4),
        ((4, 4, 4, 3), layers.Conv3D(2, 3, padding="same", use_bias=False), 64 * 2 * 27 * 3 * 2),
        ((6, 10), layers.EinsumDense("abc,cd->abd", output_shape=(6, 5)), 6 * 2 * 10 * 5),
        ((6, 10), layers.EinsumDense("...c,cd->...d", output_shape=(5,)), 6 * 2 * 10 * 5),
        ((None, 10), layers.Dense(5, use_bias=False), 128 * 2 * 10 * 5),
    ],
)
def test_flops_per_row(shape, layer, flops):
    assert flops_of_last(sequence(shape, layer), rows=2) == 2 * flops
    assert flops_of_last(sequence(shape, layer), rows=3) == 3 * flops


def test_attention_counts_its_projections_and_both_products():
    x = keras.Input((6, 8))
    graph = flatten(keras.Model(x, layers.MultiHeadAttention(2, 4, use_bias=False)(x, x)))
    products = 2 * (4 * 6 * 2 * 8 * 8 + 2 * 2 * 6 * 6 * 8)
    assert products < flops_of_last(graph) < 1.15 * products  # and a softmax


def test_embeddings_cost_what_they_put_out():
    costs = costs_of(sequence((7,), layers.Embedding(1000, 16), dtype="int32"), rows=3)
    assert [cost._replace(flops=0) for cost in costs] == [Cost(0, parameter_bytes=64000, output_bytes=3 * 7 * 16 * 4)]
    assert 10 * 3 * 7 * 16 * 4 <= weights(costs, "flops")[0] < 1.01 * 10 * 3 * 7 * 16 * 4


def test_parameters_count_once_and_frozen_ones_apart():
    inputs = keras.Input((4,))
    dense = layers.Dense(4, name="shared")
    frozen = layers.Dense(4, trainable=False)
    norm = layers.BatchNormalization()
    graph = flatten(keras.Model(inputs, norm(frozen(dense(dense(inputs))))))
    costs = costs_of(graph, rows=2)
    assert [cost.parameter_bytes for cost in costs] == [80, 0, 80, 64]
    assert [cost.frozen_bytes for cost in costs] == [0, 0, 80, 32]
    assert weights(costs, "memory") == [4 * 80 + 32, 32, 80 + 32, 4 * 64 - 3 * 32 + 32]


def heavy_and_light() -> LayerGraph:
    # The mask must reach the LSTM, and the lookup must be given tokens that exist.
    return sequence(
        (8,),
        layers.Embedding(10, 4, mask_zero=True),
        layers.LSTM(4),
        layers.Dense(2048),
        layers.Dense(2048),
        layers.Dense(1),
        dtype="int32",
    )


def test_measured_costs_are_those_that_are_counted_and_seconds():
    graph = heavy_and_light()
    costs = measured_costs(graph, rows=256)
    assert all(cost.seconds > 0 for cost in costs)
    assert weights(costs, "time") == [cost.seconds for cost in costs]
    assert [cost._replace(seconds=0.0) for cost in costs] == costs_of(graph, rows=256)


@pytest.mark.timing
def test_measured_costs_follow_the_work():
    *_, heavy, light = measured_costs(heavy_and_light(), rows=256)
    assert heavy.seconds > 3 * light.seconds


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: costs_of(sequence((None, 4), layers.Dense(1, name="d"), layers.Lambda(refuse, name="odd")), rows=1),
            r"The layer 'odd' cannot be called with 128 for the dimensions that the model leaves open\. "
            r"Received: inputs of shape \[\(None, None, 4\)\].*say where to cut with cuts=",
        ),
        (
            lambda: kept_bytes(sequence((None, 4), Positions(name="odd")), rows=1),
            r"The layer 'odd' cannot be called with 128 .*, with blocks=\[\.\.\.\] otherwise",
        ),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


class Positions(layers.Layer):
    """Has so many positions; only a gradient fails for more."""

    def build(self, shape):
        self.table = self.add_weight(shape=(8, 4))

    def call(self, x):
        found = keras.ops.slice(self.table, (0, 0), (x.shape[1], 4)) if x.shape[1] else self.table[:1]
        return x + keras.ops.broadcast_to(found, keras.ops.shape(x))


def refuse(x):
    if x.shape[1] == 128:
        raise TypeError("too long")
    return x


def test_crossing_counts_what_skips_a_cut_once_per_cut():
    inputs = keras.Input((4,))
    a = layers.Dense(8, name="a")(inputs)
    b = layers.Dense(2, name="b")(a)
    c = layers.Dense(8, name="c")(b)
    late = layers.Concatenate(name="late")([a, c, c, inputs])
    graph = flatten(keras.Model(inputs, [layers.Dense(1, name="head")(late), b]))
    assert [call.name for call in graph.calls] == ["a", "b", "c", "late", "head"]
    assert crossing(graph) == [0, 4 * 8, 4 * (8 + 2), 4 * (8 + 8), 4 * 28]


def test_a_residual_network_is_cut_between_its_blocks():
    inputs = x = keras.Input((16, 16, 8))
    for i in range(4):
        y = layers.Conv2D(8, 3, padding="same", name=f"first{i}")(x)
        y = layers.Conv2D(8, 3, padding="same", name=f"second{i}")(y)
        x = layers.Add(name=f"add{i}")([x, y])
    graph = flatten(keras.Model(inputs, x))
    w = weights(costs_of(graph, rows=1), "flops")
    cuts = balance(w, 4, [10 * sent for sent in crossing(graph)])
    assert [graph.calls[cut].name for cut in cuts] == ["first1", "first2", "first3"]
