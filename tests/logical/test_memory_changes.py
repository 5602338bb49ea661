"""Policies on models that change afterwards, and on layers that are not like others."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.logical.test_pipeline_models import Augmented, Told, Untold
from tests.models import ready
from tests.tiers import daily
from tfdist import memory

DEPTH, WIDTH, ROWS = 6, 16, 32


def stack() -> keras.Model:
    keras.utils.set_random_seed(0)
    inner = [layers.Dense(WIDTH, "gelu", name=f"layer_{index}") for index in range(DEPTH)]
    return keras.Sequential([keras.Input((WIDTH,)), *inner, layers.Dense(1)])


def train(model: keras.Model, optimizer: str = "sgd", **arguments) -> list[np.ndarray]:
    model.compile(optimizer, "mse", **arguments)
    return fitted(model)


def fitted(model: keras.Model) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2 * ROWS, WIDTH)).astype("float32"), np.ones((2 * ROWS, 1), "float32")
    model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
    return model.get_weights()


def close(ours, others) -> bool:
    return all(np.allclose(one, other, rtol=0, atol=1e-6) for one, other in zip(ours, others, strict=True))


@pytest.mark.nightly
def test_layers_that_are_set_free_afterwards():
    def weights(policy: str | None) -> tuple[list, list]:
        model = stack()
        for layer in model.layers[:-1]:
            layer.trainable = False
        if policy:
            memory.apply(model, policy)
        first = train(model)
        for layer in model.layers[:-1]:
            layer.trainable = True
        return first, train(model)

    plain, ours = weights(None), weights("recompute")
    assert close(ours[0], plain[0]) and close(ours[1], plain[1])
    changed = sum(not np.array_equal(a, b) for a, b in zip(*ours, strict=True))
    assert changed == 2 * (DEPTH + 1)


@pytest.mark.parametrize("nested", daily([False, True], "False"))
def test_layers_that_are_added_afterwards(nested: bool):
    def weights(policy: str | None) -> tuple[list, list]:
        inner = stack()
        model = keras.Sequential([keras.Input((WIDTH,)), inner]) if nested else inner
        if policy:
            memory.apply(model, policy)
        first = train(model)
        inner.add(layers.Dense(1, kernel_initializer="ones"))
        return first, train(model)

    plain, ours = weights(None), weights("recompute")
    assert close(ours[0], plain[0]) and close(ours[1], plain[1])


@pytest.mark.nightly
def test_a_model_in_a_model_that_gets_a_mask():
    def build(masked: bool = True) -> tuple[keras.Model, keras.Model]:
        keras.utils.set_random_seed(0)
        steps = [layers.SimpleRNN(8, return_sequences=True, name="recurrent"), *(layers.Dense(8) for _ in range(5))]
        inner = keras.Sequential([keras.Input((6, 8)), *steps])
        inputs = keras.Input((6,), dtype="int32")
        x = inner(layers.Embedding(10, 8, mask_zero=masked)(inputs))
        model = keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))
        return model, inner

    x, y = np.random.default_rng(0).integers(0, 3, (16, 6)), np.ones((16, 1))
    weights = []
    for policy, masked in ((None, True), ("recompute", True), (None, False)):
        model, inner = build(masked)
        if policy:
            memory.apply(inner, policy)
        model.compile("sgd", "mse")
        model.fit(x, y, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    assert all(map(np.array_equal, weights[0], weights[1]))
    # Without the mask the recurrent layer computes something else.
    assert not all(map(np.array_equal, weights[0], weights[2]))


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


@pytest.mark.parametrize("calls", ["call", "product"])
def test_functions_of_tensorflow_that_would_read_other_weights(calls: str):
    class Within(layers.Dense):
        def product(self, x):
            return x @ self.kernel

        def build(self, shape):
            super().build(shape)
            self.within = tf.function(super().call if calls == "call" else self.product)

        def call(self, x):
            return self.within(x)

    model = keras.Sequential([keras.Input((WIDTH,)), layers.Dense(8), Within(8, name="within"), layers.Dense(1)])
    memory.apply(model, memory.MemoryPolicy("recompute", ["within"]))
    with pytest.raises(ValueError, match=r"block 'within', .* calls a tf.function"):
        train(model)


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


KEPT: dict[str, tf.Tensor] = {}


class Keeping(layers.Dense):
    """Keeps a tensor for another layer."""

    kept = staticmethod(lambda x, y: y)

    def call(self, x):
        y = super().call(x)
        KEPT["it"] = self.kept(x, y)
        return y


class Reading(layers.Dense):
    def call(self, x):
        return super().call(x) + KEPT["it"]


def handing_on(kept=None) -> keras.Model:
    keras.utils.set_random_seed(0)
    keeping, inputs = Keeping(8, name="keeping"), keras.Input((WIDTH,))
    keeping.kept = kept or Keeping.kept
    x = layers.Dense(8, name="between")(keeping(layers.Dense(8, name="before")(inputs)))
    return keras.Model(inputs, layers.Dense(1)(Reading(8, name="reading")(x)))


@pytest.mark.parametrize(
    "mode", [{"*": "recompute"}, {"keeping": "none", "*": "recompute"}, {"reading": "swap", "*": "none"}], ids=str
)
def test_tensors_that_are_not_passed_are_refused(mode):
    """Their gradients would be lost: they have none outside of the block that has made them."""
    policy = memory.MemoryPolicy(mode, ["keeping", "between", "reading"])
    with pytest.raises(ValueError, match=r"block 'reading', in which a layer reads a tensor that it was not passed"):
        train(memory.apply(handing_on(), policy))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "kept",
    [lambda x, y: tf.stop_gradient(y), lambda x, y: tf.cast(x[:, :8] > 0, x.dtype)],
    ids=["stop_gradient", "a mask"],
)
def test_tensors_without_gradients_need_not_be_passed(kept):
    policy = memory.MemoryPolicy("recompute", ["keeping", "between", "reading"])
    assert close(train(memory.apply(handing_on(kept), policy)), train(handing_on(kept)))


@pytest.mark.parametrize("how", daily(["policy", "host", "sharded"], "policy"))
def test_layers_that_train_without_being_asked(how, four_devices):
    """A step that calls the model without a word; layers train by default, and so do those after them."""

    def weights(strategy, policy: str | None) -> list:
        keras.utils.set_random_seed(0)
        with strategy.scope():
            inputs = keras.Input((WIDTH,))
            x = Augmented()(Told()(layers.Dense(WIDTH, "tanh")(inputs)))
            for _ in range(4):
                x = Told()(layers.Dense(WIDTH, "tanh")(x))
            model = Untold(inputs, layers.Dense(1)(x))
            model.compile("sgd", "mse")
        if policy:
            memory.apply(model, policy)
        return fitted(model)

    plain = tf.distribute.get_strategy()
    strategies = {
        "policy": lambda: plain,
        "host": lambda: tfdist.HostOffloadStrategy("CPU:1", "CPU:0"),
        "sharded": lambda: tfdist.FullyShardedStrategy(memory="recompute"),
    }
    found = weights(strategies[how](), "recompute" if how == "policy" else None)
    assert close(found, weights(plain, None))


@pytest.mark.parametrize("how", daily(["policy", "host"], "policy"))
def test_sparse_inputs(how, four_devices):
    """The layers that take them are called as they are."""
    x = tf.sparse.from_dense(np.where(np.arange(2 * ROWS * WIDTH).reshape(2 * ROWS, WIDTH) % 3, 0.0, 0.1))
    x = tf.cast(x, tf.float32)
    data = tf.data.Dataset.from_tensor_slices((x, np.ones((2 * ROWS, 1), "float32"))).batch(ROWS)

    def weights(strategy, policy: str | None) -> list:
        keras.utils.set_random_seed(0)
        with strategy.scope():
            inner = [layers.Dense(WIDTH, "tanh") for _ in range(5)]
            model = keras.Sequential([keras.Input((WIDTH,), sparse=True), *inner, layers.Dense(1)])
            model.compile("sgd", "mse", jit_compile=False)
        if policy:
            memory.apply(model, policy)
        model.fit(data, verbose=0)
        return model.get_weights()

    plain = tf.distribute.get_strategy()
    used = tfdist.HostOffloadStrategy("CPU:1", "CPU:0") if how == "host" else plain
    assert close(weights(used, "recompute" if how == "policy" else None), weights(plain, None))


class Ragged(layers.Dense):
    def call(self, x):
        return tf.RaggedTensor.from_tensor(super().call(x))


class OfRagged(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.second = Ragged(8, name="first"), layers.Dense(1)

    def call(self, x):
        return self.second(self.first(x).to_tensor(shape=(None, 8)))


def test_blocks_that_return_ragged_tensors_are_refused():
    model = OfRagged()
    model(np.zeros((1, WIDTH), "float32"))
    memory.apply(model, memory.MemoryPolicy("recompute", ["first"]))
    with pytest.raises(ValueError, match=r"block 'first', which returns a sparse or ragged tensor"):
        train(model)


@pytest.mark.nightly
def test_layers_that_cannot_be_run_again_stay_outside():
    def build() -> keras.Model:
        normalised = layers.SpectralNormalization(layers.Dense(WIDTH), name="normalised")
        inner = [layers.Dense(WIDTH, name="first"), normalised, layers.Dense(WIDTH, name="last")]
        return keras.Sequential([keras.Input((WIDTH,)), *inner, layers.Dense(1)])

    # Swapped ones, too: the gradient would be that of the weights before they were normalised.
    for mode in ("recompute", "swap"):
        with pytest.raises(
            ValueError,
            match=r"Received: .*layers? .*normalised.*, in which a layer assigns to its trainable variable",
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


@pytest.mark.usefixtures("four_devices")
def test_messages_say_what_to_do():
    with pytest.raises(ValueError, match=r"Received: model=.*Expected: a keras.Model, as the first argument"):
        memory.apply("recompute", "recompute")
    with pytest.raises(ValueError, match=r"mode=\{\}\. Expected: a mode, or modes by names of blocks"):
        memory.MemoryPolicy({})
    with pytest.raises(ValueError, match=r"host='xyz'\. Expected: a device of this process: CPU:0, CPU:1"):
        memory.apply(stack(), memory.MemoryPolicy("swap", host="xyz"))
    memory.apply(stack(), memory.MemoryPolicy("swap", host="/cpu:1"))
    with pytest.raises(
        ValueError, match=r"mode=\{'layer_1': 'swap'\}, with a pattern.*for layers by their names, blocks="
    ):
        memory.apply(stack(), memory.MemoryPolicy({"layer_1": "swap"}))
    with pytest.raises(ValueError, match=r"\{'layer_9': 'swap', \.\.\.\}, with a pattern.* such as 'layer_1'\."):
        memory.apply(stack(), memory.MemoryPolicy({"layer_9": "swap", "*": "none"}, ["layer_1"]))
    model = ready(stack(), "sgd", "mse", run_eagerly=True)
    with pytest.raises(
        ValueError, match=r"'swap', which needs the graph of a step.*Expected: run_eagerly=False; or mode"
    ):
        memory.apply(model, memory.MemoryPolicy({"*": "swap"}, ["layer_1"]))
    memory.apply(model, "recompute")


@pytest.mark.parametrize("mode", ["recompute+swap", "swap"])
def test_the_warning_of_a_machine_with_one_device_names_the_mode(mode, monkeypatch, caplog):
    only = tf.config.list_logical_devices()[:1]
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda *kind: only)
    memory.apply(stack(), mode)
    assert f"Mode '{mode}' for model" in caplog.text


def test_parameter_servers_have_no_automatic_choice():
    with pytest.raises(ValueError, match=r"memory=MemoryPolicy\(mode='auto'.*Expected: a policy with modes"):
        tfdist.ParameterServerStrategy(memory=memory.MemoryPolicy("auto", budget="1GB"))
