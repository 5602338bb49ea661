"""Policies on models that change afterwards, and on layers that are not like others."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.tiers import daily
from tfdist import memory
from tfdist.memory import calls
from tfdist.memory.block_call import call_block
from tfdist.memory.modes import applied

DEPTH, WIDTH, ROWS = 6, 16, 32


def stack() -> keras.Model:
    keras.utils.set_random_seed(0)
    inner = [layers.Dense(WIDTH, "gelu", name=f"layer_{index}") for index in range(DEPTH)]
    return keras.Sequential([keras.Input((WIDTH,)), *inner, layers.Dense(1)])


def train(model: keras.Model, optimizer: str = "sgd", **arguments) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2 * ROWS, WIDTH)).astype("float32"), np.ones((2 * ROWS, 1), "float32")
    model.compile(optimizer, "mse", **arguments)
    model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
    return model.get_weights()


def close(ours, others) -> bool:
    return all(np.allclose(one, other, rtol=0, atol=1e-7) for one, other in zip(ours, others, strict=True))


@pytest.mark.parametrize("when", daily(["frozen", "set free"], "set free"))
def test_layers_that_are_frozen_or_set_free_afterwards(when):
    def weights(policy: str | None) -> tuple[list, list]:
        model = stack()
        for layer in model.layers[:-1]:
            layer.trainable = when == "frozen"
        if policy:
            memory.apply(model, policy)
        first = train(model)
        for layer in model.layers[:-1]:
            layer.trainable = when == "set free"
        return first, train(model)

    plain, ours = weights(None), weights("recompute")
    assert close(ours[0], plain[0]) and close(ours[1], plain[1])
    changed = sum(not np.array_equal(a, b) for a, b in zip(*ours, strict=True))
    assert changed == (2 * (DEPTH + 1) if when == "set free" else 2)


@pytest.mark.exhaustive
def test_variables_that_a_layer_gets_afterwards():
    def weights(policy: str | None) -> list[np.ndarray]:
        model = stack()
        if policy:
            memory.apply(model, policy)
        keras.utils.set_random_seed(1)
        model.layers[0].enable_lora(4)
        train(model)
        return train(model)

    assert close(weights("recompute"), weights(None))


def test_layers_of_one_name_are_blocks_of_their_own():
    class Block(layers.Layer):
        def __init__(self):
            super().__init__(name="block")
            self.inner = layers.Dense(WIDTH)

        def call(self, x):
            return self.inner(x)

    class Written(keras.Model):
        def __init__(self):
            super().__init__()
            self.blocks = [Block() for _ in range(4)]

        def call(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    for blocks in ("auto", [Block]):
        model = Written()
        model(np.ones((1, WIDTH)))
        memory.apply(model, memory.MemoryPolicy({"block_2": "none", "*": "recompute"}, blocks))
        calls = [vars(block)["call"] for block in model.blocks]
        assert [call._name for call in calls] == ["block", "block_1", "block_2", "block_3"]
        assert [call._mode for call in calls] == ["recompute", "recompute", "none", "recompute"]


def test_a_model_in_a_model_that_gets_a_mask(monkeypatch):
    def build(masked: bool = True) -> tuple[keras.Model, keras.Model]:
        keras.utils.set_random_seed(0)
        steps = [layers.SimpleRNN(8, return_sequences=True, name="recurrent"), *(layers.Dense(8) for _ in range(5))]
        inner = keras.Sequential([keras.Input((6, 8)), *steps])
        inputs = keras.Input((6,), dtype="int32")
        x = inner(layers.Embedding(10, 8, mask_zero=masked)(inputs))
        model = keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))
        return model, inner

    x, y = np.random.default_rng(0).integers(0, 3, (16, 6)), np.ones((16, 1))
    called: list[str] = []

    def counting(block, *arguments):
        called.append(block.label)
        return call_block(block, *arguments)

    monkeypatch.setattr(calls, "call_block", counting)
    weights = []
    for policy, masked in ((None, True), ("recompute", True), (None, False)):
        model, inner = build(masked)
        if policy:
            memory.apply(inner, policy)
        model.compile("sgd", "mse")
        model.fit(x, y, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    assert all(map(np.array_equal, weights[0], weights[1]))
    assert len(called) > 1 and len(set(called)) == len(called)
    # Without the mask the recurrent layer computes something else.
    assert not all(map(np.array_equal, weights[0], weights[2]))
    model, inner = build()
    memory.apply(inner, "recompute")
    model.compile("sgd", "mse")
    # A report of the outer model leaves the inner one's policy where it is.
    memory.report(model, 16)
    assert "call" in vars(inner) and "call" not in vars(model)


def test_random_numbers_of_tensorflow_are_refused_where_they_would_be_others():
    class Noise(layers.Layer):
        def call(self, x):
            return x * tf.random.uniform(tf.shape(x))

    def build() -> keras.Model:
        inner = [layers.Dense(8, name="before"), Noise(name="noise"), layers.Dense(8, name="after")]
        return keras.Sequential([keras.Input((WIDTH,)), *inner, layers.Dense(1)])

    model = build()
    memory.apply(model, memory.MemoryPolicy("recompute", ["noise"]))
    with pytest.raises(ValueError, match=r"block 'noise', which is to be run again and draws random numbers"):
        train(model)
    # Where it is not run again, it may.
    train(memory.apply(model, memory.MemoryPolicy({"noise": "none", "*": "recompute"}, ["noise", "after"])))


def test_variables_of_tensorflow_that_would_be_changed_twice():
    count = tf.Variable(0.0)

    class Counting(layers.Layer):
        def call(self, x):
            count.assign_add(1.0)
            return x + 0.0

    model = keras.Sequential([keras.Input((WIDTH,)), layers.Dense(8), Counting(name="counting"), layers.Dense(1)])
    memory.apply(model, memory.MemoryPolicy("recompute", ["counting"]))
    with pytest.raises(ValueError, match=r"block 'counting', which is to be run again and changes a variable"):
        train(model)


def test_layers_that_cannot_be_run_again_stay_outside():
    def build() -> keras.Model:
        normalised = layers.SpectralNormalization(layers.Dense(WIDTH), name="normalised")
        inner = [layers.Dense(WIDTH, name="first"), normalised, layers.Dense(WIDTH, name="last")]
        return keras.Sequential([keras.Input((WIDTH,)), *inner, layers.Dense(1)])

    # Swapped ones, too: the gradient would be that of the weights before they were normalised.
    for mode in ("recompute", "swap"):
        with pytest.raises(
            ValueError,
            match=r"Received: block 'normalised': .*assigns to its trainable variable.*; or mode 'none' for this block",
        ):
            train(memory.apply(build(), memory.MemoryPolicy(mode, ["normalised"])))
    for policy in (
        memory.MemoryPolicy("none"),
        memory.MemoryPolicy("recompute", ["first", "last"]),
        memory.MemoryPolicy({"normalised": "none", "*": "recompute"}, ["first", "normalised", "last"]),
    ):
        keras.utils.set_random_seed(0)
        plain = train(build())
        keras.utils.set_random_seed(0)
        assert close(train(memory.apply(build(), policy)), plain)


def test_messages_say_what_to_do():
    for function in (lambda: memory.apply("recompute", "recompute"), lambda: memory.remove(3)):
        with pytest.raises(ValueError, match=r"Received: model=.*Expected: a keras.Model, as the first argument"):
            function()
    with pytest.raises(ValueError, match=r"mode=\{\}\. Expected: one mode, or modes by names of blocks"):
        memory.MemoryPolicy({})
    with pytest.raises(ValueError, match=r"blocks=3\. Expected: 'auto', or names or classes of layers"):
        memory.MemoryPolicy(blocks=3)
    with pytest.raises(ValueError, match=r"host='xyz'\. Expected: a device of this process: CPU:0, CPU:1"):
        memory.apply(stack(), memory.MemoryPolicy("swap", host="xyz"))
    with pytest.raises(
        ValueError, match=r"mode=\{'layer_1': 'swap'\}, with a pattern.*for layers by their names, blocks="
    ):
        memory.apply(stack(), memory.MemoryPolicy({"layer_1": "swap"}))
    with pytest.raises(ValueError, match=r"\{'layer_9': 'swap', \.\.\.\}, with a pattern.* such as 'layer_1'\."):
        memory.apply(stack(), memory.MemoryPolicy({"layer_9": "swap", "*": "none"}, ["layer_1"]))
    model = stack()
    model.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(ValueError, match=r"mode 'swap', which changes the graph.*Expected: run_eagerly=False; or mode"):
        memory.apply(model, memory.MemoryPolicy({"*": "swap"}, ["layer_1"]))
    memory.apply(model, "recompute")


@pytest.mark.parametrize("mode", ["recompute+swap", "swap"])
def test_the_warning_of_a_machine_with_one_device_names_the_mode(mode, monkeypatch, caplog):
    only = tf.config.list_logical_devices()[:1]
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda *kind: only)
    memory.apply(stack(), mode)
    assert f"Mode '{mode}' for model" in caplog.text


def test_what_is_refused_changes_nothing():
    model = memory.apply(stack(), "recompute")
    own = applied(model)
    for wrong in (
        memory.MemoryPolicy(blocks=["nope"]),
        memory.MemoryPolicy({"layer_*": "swap", "laier_1": "none"}, ["layer_1"]),
        memory.MemoryPolicy("swap", host="GPU:7"),
        {"layer_1": "swap"},
        None,
    ):
        with pytest.raises(ValueError, match=r"^Received: .*Expected: "):
            memory.apply(model, wrong)
        assert applied(model) is own


def test_xla_comes_back():
    model = stack()
    train(model, jit_compile=True)
    memory.apply(model, memory.MemoryPolicy("swap", host="CPU:0"))
    assert (model.supports_jit, model.jit_compile) == (False, False)
    memory.report(model, ROWS)
    assert (model.supports_jit, model.jit_compile) == (False, False)
    memory.remove(model)
    assert (model.supports_jit, model.jit_compile) == (True, True)
    memory.report(model, ROWS, "recompute")
    assert (model.supports_jit, model.jit_compile) == (True, True)


@pytest.mark.exhaustive
def test_another_optimizer_is_another_choice():
    model = stack()
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8 * ROWS, WIDTH)).astype("float32"), np.ones((8 * ROWS, 1), "float32")
    modes = []
    for optimizer in ("sgd", "adam"):
        model.compile(optimizer, "mse")
        if optimizer == "sgd":
            budget = memory.choose(model, 8 * ROWS, memory.MemoryPolicy("auto", budget="1GB")).plain
            memory.apply(model, memory.MemoryPolicy("auto", budget=budget))
        model.fit(x, y, batch_size=8 * ROWS, verbose=0)
        modes.append(set(vars(model)["call"].policy.modes))
    # Adam's slots take some of what was there for activations.
    assert modes == [{"none"}, {"none", "recompute"}]


def test_parameter_servers_have_no_automatic_choice():
    with pytest.raises(ValueError, match=r"memory=MemoryPolicy\(mode='auto'.*Expected: a policy with modes"):
        tfdist.ParameterServerStrategy(memory=memory.MemoryPolicy("auto", budget="1GB"))
