"""Policies on models that change afterwards, and on layers that are not like others."""

from __future__ import annotations

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.logical.memory_models import Block, blocks
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


@pytest.mark.parametrize("place", ["after", "before"])
def test_variables_of_others_that_change_before_they_are_read_again(place):
    """The second run would read what the first one has not seen."""
    scale = keras.Variable(1.0, trainable=False)

    class Scaled(layers.Dense):
        def call(self, x):
            return super().call(x) * scale

    class Counting(layers.Layer):
        def call(self, x):
            scale.assign_add(1.0)
            return x

    def weights(policy):
        keras.utils.set_random_seed(0)
        scale.assign(1.0)
        inner = [Scaled(8, name="scaled"), Counting(name="counting")]
        inner = inner if place == "after" else inner[::-1]
        model = keras.Sequential([keras.Input((WIDTH,)), *inner, layers.Dense(1)])
        return train(memory.apply(model, policy) if policy else model, jit_compile=False)

    policy = memory.MemoryPolicy("recompute", ["scaled"])
    if place == "before":
        assert close(weights(policy), weights(None))
        return
    with pytest.raises(ValueError, match=r"block 'scaled', which is to be run again and reads a variable of another"):
        weights(policy)


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


BLOCKS = ["first", "second"]
HOW = {
    "policy": lambda: tf.distribute.get_strategy(),
    "host": lambda: tfdist.HostOffloadStrategy("CPU:1", "CPU:0", blocks=BLOCKS),
    "sharded": lambda: tfdist.FullyShardedStrategy(blocks=BLOCKS),
    "sharded, run again": lambda: tfdist.FullyShardedStrategy(blocks=BLOCKS, memory="recompute"),
}


def trained_as_blocks(how: str | None, build, optimizer, loss="mse") -> tuple[list, dict]:
    """Weights and history of a model that is trained in blocks, or without (`None`)."""
    keras.utils.set_random_seed(0)
    with HOW[how or "policy"]().scope():
        model = ready(build(), optimizer(), loss, jit_compile=False)
    if how == "policy":
        memory.apply(model, memory.MemoryPolicy("recompute", BLOCKS))
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2 * ROWS, WIDTH)).astype("float32"), np.ones((2 * ROWS, 1), "float32")
    x[::5] = 0.0
    targets = y if isinstance(loss, str) else [y] * len(loss)
    history = model.fit(x, targets, batch_size=ROWS, epochs=2, shuffle=False, verbose=0).history
    return model.get_weights(), history


class Spread(layers.Dense):
    """Keeps tensors for a loss, in an attribute and in a list and a dict."""

    def call(self, x):
        y = super().call(x)
        self.spread, self.listed = keras.ops.mean(y**2), [keras.ops.mean(abs(y), axis=-1, keepdims=True)]
        self.named = {"sum": keras.ops.mean(y), "width": 3}
        return y


class Penalizing(keras.Model):
    """A model whose loss, and whose call, read what layers have kept."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Spread(WIDTH, "tanh", name="first"), Spread(WIDTH, "tanh", name="second")
        self.head = layers.Dense(1)

    def build(self, shape):
        for layer in (self.first, self.second, self.head):
            layer.build((*shape[:-1], WIDTH))

    def call(self, x):
        return self.head(self.second(self.first(x))) + self.first.listed[0]

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 3.0 * self.first.spread + keras.ops.mean(self.second.listed[0]) + self.second.named["sum"]


def penalizing() -> keras.Model:
    model = Penalizing()
    model.build((None, WIDTH))
    return model


@pytest.mark.parametrize("how", daily(HOW, "policy"))
def test_a_loss_may_read_what_layers_keep(how, four_devices):
    """It had no gradient then: no tape saw what was computed inside of a block."""
    ours, plain = (trained_as_blocks(one, penalizing, lambda: keras.optimizers.SGD(0.1)) for one in (how, None))
    assert close(ours[0], plain[0])
    assert np.allclose(ours[1]["loss"], plain[1]["loss"], atol=1e-6)


def with_an_unused_output() -> keras.Model:
    """One output has no loss: weights of a layer of its own, and a root, whose derivative is infinite at 0."""
    inputs = keras.Input((WIDTH,))
    x = layers.Dense(WIDTH, use_bias=False)(inputs)
    length = keras.ops.sqrt(keras.ops.sum(x * x, axis=-1, keepdims=True))
    first = keras.Model(inputs, [layers.Dense(WIDTH, "tanh")(x), layers.Dense(1, name="aside")(length)], name="first")
    outer = keras.Input((WIDTH,))
    x, aside = first(outer)
    return keras.Model(outer, [layers.Dense(1)(layers.Dense(WIDTH, "tanh", name="second")(x)), aside])


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("how", daily(HOW, "policy"))
def test_what_the_loss_does_not_use_has_no_gradient(how, four_devices):
    """A tape gives zeros for it: times infinity they are no numbers, and weight decay would take them for gradients."""
    make = lambda: keras.optimizers.SGD(0.01, weight_decay=0.5)  # noqa: E731
    ours, plain = (trained_as_blocks(one, with_an_unused_output, make, ["mse", None]) for one in (how, None))
    assert all(np.isfinite(weight).all() for weight in plain[0])
    assert close(ours[0], plain[0])


class Measured(layers.Dense):
    """Has a metric of its own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.size = keras.metrics.Mean(name=f"size_of_{self.name}")

    def call(self, x):
        y = super().call(x)
        self.size.update_state(keras.ops.abs(y))
        return y


def measured() -> keras.Model:
    inner = [Measured(WIDTH, "tanh", name=name) for name in ("first", "second")]
    return keras.Sequential([keras.Input((WIDTH,)), *inner, layers.Dense(1)])


@pytest.mark.parametrize("how", daily(HOW, "policy"))
def test_layers_with_metrics(how, four_devices):
    ours, plain = (trained_as_blocks(one, measured, lambda: keras.optimizers.SGD(0.1)) for one in (how, None))
    assert close(ours[0], plain[0])
    assert set(plain[1]) == {"loss", "size_of_first", "size_of_second"}
    for name, values in plain[1].items():
        assert np.allclose(ours[1][name], values, rtol=0, atol=1e-6), name


class Around(keras.Model):
    """Calls layers of another model."""

    def __init__(self, inner):
        super().__init__()
        self.inner = list(inner)

    def call(self, x):
        for layer in self.inner:
            x = layer(x)
        return x


def test_blocks_of_a_model_that_is_gone():
    """Another model has had the layers as blocks, and was given up."""
    x, y = np.ones((8, 12), "float32"), np.zeros(8)
    model = ready(blocks(), "sgd", "sparse_categorical_crossentropy")
    other = Around(model.blocks)
    other(x)
    memory.apply(other, memory.MemoryPolicy("recompute", [Block]))
    of_block = vars(model.blocks[0])["call"]
    del other
    gc.collect()
    assert of_block.model is None
    model.fit(x, y, verbose=0)


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
