"""What calls cost: checked against numbers that are known, and against even partitions of known models."""

from __future__ import annotations

import time

import keras
import pytest
from keras import layers, ops

from tfdist.layer_graph.costs import costs_of, crossing, measured_costs, weights
from tfdist.layer_graph.graph import LayerGraph, flatten, functional_of
from tfdist.layer_graph.partition import Cost, balance, shares


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


def test_flops_of_products_of_two_inputs():
    left, right = keras.Input((6, 4)), keras.Input((5, 4))
    graph = flatten(keras.Model([left, right], layers.Dot(axes=2)([left, right])))
    assert flops_of_last(graph) == 2 * 2 * 6 * 5 * 4
    graph = flatten(keras.Model([left, right], ops.einsum("bij,bkj->bik", left, right)))
    assert flops_of_last(graph) == 2 * 2 * 6 * 5 * 4


def test_attention_counts_its_projections_and_both_products():
    x = keras.Input((6, 8))
    graph = flatten(keras.Model(x, layers.MultiHeadAttention(2, 4, use_bias=False)(x, x)))
    products = 2 * (4 * 6 * 2 * 8 * 8 + 2 * 2 * 6 * 6 * 8)
    assert products < flops_of_last(graph) < 1.15 * products  # and a softmax


@pytest.mark.parametrize("cell", [layers.LSTM, layers.GRU, layers.SimpleRNN])
def test_recurrent_layers_are_not_free(cell):
    layer = cell(16, use_bias=False)
    graph = sequence((12, 8), layer)
    assert flops_of_last(graph, rows=2) >= 2 * 2 * 12 * layer.count_params()


def test_wrapped_recurrent_layers_are_not_free():
    layer = layers.Bidirectional(layers.LSTM(16, use_bias=False))
    assert flops_of_last(sequence((12, 8), layer), rows=2) >= 2 * 2 * 12 * layer.count_params()


class Opaque(keras.Layer):
    """Multiplies in a way that the profiler does not see."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 4))

    def call(self, x):
        return ops.while_loop(
            lambda i, _: i < 1, lambda i, _: (i + 1, ops.matmul(x, self.kernel)), (0, x @ self.kernel)
        )[1]


def test_what_the_profiler_does_not_see_is_estimated_by_parameters():
    assert flops_of_last(sequence((6, 10), Opaque()), rows=2) >= 2 * 2 * 6 * 40


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


def test_half_precision_outputs_are_half_as_large():
    costs = costs_of(sequence((4,), layers.Dense(8, dtype="mixed_float16")), rows=2)
    assert (costs[0].output_bytes, costs[0].parameter_bytes) == (2 * 8 * 2, 4 * 40)


def test_lookups_of_text_can_be_counted():
    lookup = layers.StringLookup(vocabulary=["a", "b"])
    costs = costs_of(sequence((3,), lookup, layers.Embedding(4, 8), dtype="string"), rows=2)
    assert [cost.output_bytes for cost in costs] == [2 * 3 * 8, 2 * 3 * 8 * 4]


def test_counting_changes_nothing_and_prints_nothing(capfd):
    inputs = keras.Input((4, 4, 3))
    x = layers.Conv2D(3, 3, activity_regularizer="l2", name="conv")(inputs)
    x = layers.Dropout(0.5)(layers.BatchNormalization()(x))
    model = keras.Model(inputs, x)
    before = [keras.ops.convert_to_numpy(v).tolist() for v in model.variables]
    capfd.readouterr()
    costs_of(flatten(model), rows=2)
    assert capfd.readouterr() == ("", "")
    assert [keras.ops.convert_to_numpy(v).tolist() for v in model.variables] == before
    assert model.get_layer("conv").losses == []


def test_measured_costs_follow_the_work():
    # The mask must reach the LSTM, and the lookup must be given tokens that exist.
    graph = sequence(
        (8,),
        layers.Embedding(10, 4, mask_zero=True),
        layers.LSTM(4),
        layers.Dense(2048),
        layers.Dense(2048),
        layers.Dense(1),
        dtype="int32",
    )
    costs = measured_costs(graph, rows=256)
    assert all(cost.seconds > 0 for cost in costs)
    assert costs[-2].seconds > 3 * costs[-1].seconds
    assert weights(costs, "time") == [cost.seconds for cost in costs]
    assert [cost._replace(seconds=0.0) for cost in costs] == costs_of(graph, rows=256)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: weights([], "size"), r"balance is 'size', but must be one of 'flops', 'memory' and 'time'"),
        (lambda: weights([Cost(1, 1, 1)], "time"), r"no seconds: take them from measured_costs\(\)"),
        (lambda: costs_of(sequence((4,), layers.Dense(1)), rows=0), r"rows is 0, but must be a whole number"),
        (
            lambda: costs_of(sequence((None, 4), layers.Dense(1, name="d"), layers.Lambda(refuse, name="odd")), rows=1),
            r"The layer 'odd' cannot be called with 128 for the dimensions that the model leaves open\. "
            r"Received: inputs of shape \[\(None, None, 4\)\].*say where to cut with cuts=",
        ),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


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


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "size", "gigaflops"),
    [
        ("MobileNetV2", 96, 0.11),
        ("ResNet50", 96, 1.42),
        ("VGG16", 96, 5.65),
        ("DenseNet121", 96, 1.05),
        ("Xception", 96, 1.66),
        ("ConvNeXtTiny", 96, 1.65),
    ],
)
def test_applications_are_cut_evenly(name, size, gigaflops):
    model = getattr(keras.applications, name)(weights=None, input_shape=(size, size, 3), classes=10)
    graph = flatten(functional_of(model))
    begin = time.process_time()
    costs = costs_of(graph, rows=4)
    assert time.process_time() - begin < 20  # about 1 s where this was written
    assert sum(cost.flops for cost in costs) / 4e9 == pytest.approx(gigaflops, rel=0.03)
    counted = sum(v.shape.num_elements() * v.dtype.size for v in (v.value for v in model.variables))
    assert sum(cost.parameter_bytes for cost in costs) == counted
    w = weights(costs, "flops")
    for parts in (2, 4):
        assert max(shares(w, balance(w, parts))) < 1.35 / parts, name
