"""Blocks of memory policies: which there are, what they may contain, what is refused, and the guide."""

from __future__ import annotations

import gc
import itertools
import re
import weakref
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.logical.memory_models import CLASSES, data, dense, transformer, written
from tests.models import assert_arrays, in_scope, ready
from tfdist.layer_graph.graph import flatten
from tfdist.memory import MemoryPolicy, apply, remove
from tfdist.memory.plan import automatic_cuts, stream_cuts

GUIDE = Path(__file__).parents[2] / "docs" / "memory.md"


def plan_of(model: keras.Model, *arguments):
    apply(model, MemoryPolicy(*arguments))
    return vars(model)["call"].plan


# --- Which blocks there are -------------------------------------------------------------------------------------------


def test_automatic_blocks_leave_calls_of_a_layer_with_statistics_together():
    norm, x = layers.BatchNormalization(), (inputs := keras.Input((9,)))
    for _ in range(3):
        x = norm(layers.Dense(9)(x))
    x = layers.Dense(9)(layers.Dense(9)(layers.Dense(9)(x)))
    graph = flatten(keras.Model(inputs, x))
    assert min(automatic_cuts(graph)) >= 6


def test_attention_is_taken_for_what_it_keeps_not_for_what_it_returns():
    """Its scores are many times its output: each of these layers is a block, and each goes to the device by itself."""
    x = inputs = keras.Input((64, 8))
    for _ in range(4):
        x = keras.layers.Add()([x, keras.layers.MultiHeadAttention(2, 4)(x, x)])
    graph = flatten(keras.Model(inputs, x))
    of_attention = [position for position, call in enumerate(graph.calls) if "attention" in call.name]
    for cuts in (automatic_cuts(graph), stream_cuts(graph)):
        bounds = (0, *cuts, len(graph.calls))
        assert [sum(a <= p < b for p in of_attention) for a, b in itertools.pairwise(bounds)] == [1] * 4


def test_named_layers_and_classes():
    plan = plan_of(transformer(), "swap", ["encoder_2", layers.Embedding])
    blocks = [[call.operation.__class__.__name__ for call in chunk.calls] for chunk in plan.chunks]
    assert blocks[0] == ["Embedding"] and blocks[2] == ["Encoder"]
    assert plan.names[2] == "encoder_2"
    assert plan.modes == ["swap", "none", "swap", "none"]


def test_nested_models_are_blocks_by_their_name():
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="a"), layers.Dense(4, name="b")], name="inner")
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(1)(inner(layers.Dense(4)(inputs))))
    plan = plan_of(model, "recompute", ["inner"])
    assert [[call.name for call in chunk.calls] for chunk in plan.chunks][1] == ["inner/a", "inner/b"]
    plan = plan_of(model, {"*/b": "recompute+swap"}, ["a", "b"])
    modes = dict(zip(plan.names, plan.modes, strict=True))
    assert modes == {"": "none", "inner/a": "none", "inner/b": "recompute+swap"}


def test_layers_of_a_model_that_is_written_as_a_class():
    model = apply(written(), "recompute")
    assert [name for name in ("embedding", "pool", "head") if "call" in vars(getattr(model, name))] == []
    assert ["call" in vars(encoder) for encoder in model.encoders] == [True] * 3
    assert "call" not in vars(remove(model).encoders[0])
    model = apply(model, MemoryPolicy("recompute", [layers.LayerNormalization, "encoder_1"]))
    assert ["call" in vars(encoder) for encoder in model.encoders] == [False, True, False]
    assert all("call" in vars(norm) for encoder in model.encoders for norm in encoder.norms)


# --- What they may contain --------------------------------------------------------------------------------------------


class Noise(layers.Layer):
    """Draws from the global seed, adds a loss, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.count = self.add_weight(shape=(), trainable=False, initializer="zeros")

    def call(self, x):
        self.count.assign_add(1.0)
        self.add_loss(1e-2 * keras.ops.mean(keras.ops.square(x)))
        return x + 0.1 * keras.random.normal(keras.ops.shape(x))


def regularized() -> keras.Model:
    x = inputs = keras.Input((12,))
    for _ in range(3):
        x = layers.Dense(12, "tanh", activity_regularizer="l2", kernel_regularizer="l2")(x)
        x = Noise()(x)
    return keras.Model(inputs, layers.Dense(CLASSES, activation="softmax")(x))


def small() -> keras.Model:
    inner = [layers.Dense(12, "tanh") for _ in range(6)]
    return keras.Sequential([keras.Input((12,)), *inner, layers.Dropout(0.2), layers.Dense(CLASSES, "softmax")])


def steps(model: keras.Model, x, y, **compile_arguments) -> list[np.ndarray]:
    arguments = {"optimizer": "adam", "loss": "sparse_categorical_crossentropy"} | compile_arguments
    model.compile(**arguments)
    losses = [np.asarray(model.train_on_batch(x, y)) for _ in range(3)]
    return [*losses, *model.get_weights()]


# Losses of layers and random numbers are in all of them.
@pytest.mark.parametrize(
    ("mode", "optimizer"),
    [
        pytest.param(
            "swap",
            lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
            id="swap, accumulation",
        ),
        pytest.param(
            "recompute",
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01, clipnorm=0.1)),
            id="recompute, loss scale",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_losses_random_numbers_and_optimizers(mode, optimizer):
    x, y = data("dense", 8)
    found = []
    for policy in (None, MemoryPolicy(mode, min_bytes=0)):
        keras.utils.set_random_seed(5)
        keras.random.normal((1,))  # makes the global seed
        model = regularized()
        if policy is not None:
            apply(model, policy)
        found.append(steps(model, x, y, optimizer=optimizer()))
    for a, b in zip(*found, strict=True):
        # What a layer returns is read by the next one and by losses, in another block: three gradients to be added.
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


@pytest.mark.nightly
def test_a_loop_of_ones_own():
    x, _y = data("dense", 8)
    found = []
    for policy in (None, MemoryPolicy({"block_0": "swap", "block_1": "recompute+swap", "*": "recompute"}, min_bytes=0)):
        keras.utils.set_random_seed(5)
        model = dense()
        if policy is not None:
            apply(model, policy)

        @tf.function
        def gradients(model=model):
            # Twice the same model in a step: as in a Siamese network.
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x, training=True) - 0.5 * model(2.0 * x, training=True)) ** 2
            return tape.gradient(loss, model.trainable_weights)

        found.append([g.numpy() for g in gradients()] + model.get_weights())
    assert_arrays(*found, tolerance=1e-9)


def test_features_that_the_model_does_not_take():
    x, y = {name: np.ones((8, 4), "float32") for name in "abc"}, np.zeros((8, 1), "float32")
    losses = []
    for change in (lambda model: model, lambda model: apply(model, "recompute")):
        keras.utils.set_random_seed(5)
        inputs = {name: keras.Input((4,), name=name) for name in "ab"}
        hidden = layers.Dense(4, "tanh")(inputs["a"]) + layers.Dense(4)(inputs["b"])
        model = change(ready(keras.Model(inputs, layers.Dense(1)(hidden)), "sgd", "mse"))
        losses.append(model.fit(tf.data.Dataset.from_tensors((x, y)), epochs=2, verbose=0).history["loss"])
    assert losses[0] == losses[1]


def test_graphs_are_given_back():
    x, _ = data("dense", 8)
    model = apply(small(), "recompute")

    def traced() -> weakref.ref:
        @tf.function
        def gradients():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x, training=True))
            return tape.gradient(loss, model.trainable_weights)

        return weakref.ref(gradients.get_concrete_function().graph)

    graph = traced()
    gc.collect()
    assert graph() is None


# --- What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "recomputed"}, r"Expected one of 'none', 'recompute', 'recompute\+swap', 'swap'"),
        ({"mode": {"a": "swop"}}, "mode='swop'"),
        ({"blocks": "encoder"}, r"blocks='encoder'. Expected: 'auto', or a list of names or classes of layers"),
        ({"prefetch": -1}, "prefetch=-1"),
        ({"min_bytes": -1}, "min_bytes=-1"),
    ],
)
def test_policies_that_make_no_sense(arguments, message):
    with pytest.raises(ValueError, match=message):
        MemoryPolicy(**arguments)


def test_unknown_blocks():
    with pytest.raises(ValueError, match=r"block 'encoder_9'. Expected: the name of a layer, such as 'encoder_"):
        apply(transformer(), MemoryPolicy(blocks=["encoder_9"]))
    with pytest.raises(ValueError, match=r"Conv2D.*, or a class of layers of the model"):
        apply(transformer(), MemoryPolicy(blocks=[layers.Conv2D]))
    with pytest.raises(ValueError, match=r"block 7. Expected: the name of a layer"):
        apply(transformer(), MemoryPolicy(blocks=[7]))


def test_models_that_are_not_built():
    with pytest.raises(ValueError, match=r"which is not built.*Expected: a model with a keras.Input"):
        apply(keras.Sequential([layers.Dense(1)]), "recompute")


def test_swapping_inputs_and_xla():
    model = ready(small(), "sgd", "sparse_categorical_crossentropy", jit_compile=True)
    apply(model, "recompute+swap")
    assert model.jit_compile is False
    model.compile("sgd", "sparse_categorical_crossentropy", jit_compile="auto")
    assert model.jit_compile is False
    with pytest.warns(UserWarning, match="doesn't support `jit_compile=True`"):
        model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=True)
    remove(model).compile("sgd", "sparse_categorical_crossentropy", jit_compile=True)
    assert model.jit_compile is True


def test_layers_that_change_what_is_not_theirs():
    other = keras.Variable(0.0, trainable=False)

    class Changes(layers.Layer):
        def call(self, x):
            other.assign_add(1.0)
            return x

    inputs = keras.Input((12,))
    model = ready(
        apply(keras.Model(inputs, layers.Dense(CLASSES)(Changes()(layers.Dense(12)(inputs)))), "recompute"),
        "sgd",
        "sparse_categorical_crossentropy",
    )
    x, y = data("dense", 8)
    with pytest.raises(ValueError, match=r"changes a variable that it does not own; that would be lost"):
        model.fit(x, y, verbose=0)


def test_pipelines_have_a_recomputation_of_their_own(four_devices):
    strategy = tfdist.PipelineStrategy(four_devices[:2])
    model = in_scope(strategy, lambda: ready(small(), "sgd", "sparse_categorical_crossentropy"))
    apply(model, "recompute")
    x, y = data("dense", 8)
    with pytest.raises(ValueError, match=r"Expected: `tfdist.memory.remove\(model\)`, and PipelineStrategy\(memory="):
        model.fit(x, y, verbose=0)


# --- The guide --------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_the_guides_programs_run(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    programs = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(programs) == 5
    names: dict[str, object] = {}
    for program in programs:
        exec(compile(program, str(GUIDE), "exec"), names)
    assert set(vars(names["model"])["call"].plan.modes) == {"swap", "recompute", "none"}
    # The slots that the replicas had are those of one optimizer.
    split, whole = (names[name].optimizer.variables for name in ("split", "whole"))
    assert len(split) == len(whole) == 2 + 2 * 2 and float(np.abs(whole[2]).max()) > 0
    assert_arrays(split, whole)
    # The table that the guide shows; which of several equal blocks are run again, and their times, are not told.
    told = capsys.readouterr().out
    shown = re.search(r"3 of 8 blocks keep less: .* MB\), and", GUIDE.read_text(encoding="utf-8"))
    assert shown[0] in told
