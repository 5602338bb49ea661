"""Optimizers: what they do with a pipeline's gradients, and that their slots come along."""

from __future__ import annotations

import functools
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import optimizers

import tfdist
from tests.logical.pipelines import after_one_step, assert_equal, labelled, mlp, pipeline
from tests.tiers import daily

pytestmark = pytest.mark.usefixtures("four_devices")

DATA = labelled(16)
OPTIMIZERS = {
    "AdamW, global_clipnorm": lambda: optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.1),
    "Muon": lambda: optimizers.Muon(0.01),
    "AdamW, all that Keras does itself": lambda: optimizers.AdamW(
        optimizers.schedules.ExponentialDecay(0.01, 2, 0.5),
        weight_decay=0.1,
        amsgrad=True,
        epsilon=1e-3,
        clipnorm=0.05,
        use_ema=True,
        ema_momentum=0.5,
        ema_overwrite_frequency=3,
    ),
}


def expected(build: Callable[[], keras.Model], steps: int = 4) -> dict[str, np.ndarray]:
    return after_one_step(tf.distribute.get_strategy(), build, DATA, steps)[1]


# What looks at all gradients, an update of whole matrices, and all the rest at once.
@pytest.mark.parametrize("name", daily(OPTIMIZERS, "AdamW, global_clipnorm"))
def test_equals_one_process(name):
    build = mlp(optimizer=OPTIMIZERS[name], metrics=None)
    model, received = after_one_step(pipeline(3), build, DATA, steps=4)
    assert_equal(expected(build), received, 2e-5)
    assert_slots_follow(model)


@pytest.fixture
def mixed_float16():
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


def loss_scaled(initial_scale: float) -> Callable[[], keras.Model]:
    return mlp(
        optimizer=lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01, epsilon=1e-3), initial_scale, 2),
        metrics=None,
    )


def test_loss_scale_that_overflows(mixed_float16):
    """More than float16 holds, in all micro-batches: no update, and half the scale at every step."""
    model, received = after_one_step(pipeline(), loss_scaled(2.0**40), DATA, steps=3)
    keras.utils.set_random_seed(7)
    for i, weight in enumerate(loss_scaled(1.0)().get_weights()):
        np.testing.assert_array_equal(received[f"weight {i}"], weight)
    assert float(model.optimizer.dynamic_scale) == 2.0**37
    assert int(model.optimizer.inner_optimizer.iterations) == 0


def test_slots_that_were_built_before_the_first_fit_are_moved():
    """With their values, as those that were loaded."""
    build = mlp(optimizer=lambda: optimizers.Adam(0.01), metrics=None)

    def trained(strategy: tf.distribute.Strategy) -> keras.Model:
        with strategy.scope():
            keras.utils.set_random_seed(7)
            model = build()
            model.optimizer.build(model.trainable_variables)
        for i, slot in enumerate(model.optimizer.variables[2:]):
            slot.assign(np.full(slot.shape, 0.1 * (1 + i % 5)))
        model.fit(*DATA, batch_size=16, verbose=0)
        return model

    wanted, received = trained(tf.distribute.get_strategy()), trained(pipeline(3))
    for a, b in zip(wanted.weights, received.weights, strict=True):
        np.testing.assert_allclose(b.numpy(), a.numpy(), atol=1e-6)
    for a, b in zip(wanted.optimizer.variables, received.optimizer.variables, strict=True):
        np.testing.assert_allclose(b.numpy(), a.numpy(), atol=1e-6, err_msg=a.path)
    assert_slots_follow(received)
    assert len({v.value.device for v in received.trainable_variables}) == 3


class Step(keras.Model):
    """The step of a user: the loss is of one of the outputs."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(data[0], training=True)[0] - data[1]) ** 2)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


def with_an_unused_output(kind: str) -> keras.Model:
    """One output has no loss. Behind it are weights on both stages, and a root: its derivative is infinite at 0."""
    inputs = keras.Input((8,))
    x = keras.layers.Dense(8, use_bias=False)(inputs)
    length = keras.ops.sqrt(keras.ops.sum(x * x, axis=-1, keepdims=True))
    aside = keras.layers.Dense(8, name="aside")(length)
    x = keras.layers.Dense(8, "tanh", name="cut")(x)
    if kind == "states":
        # Of the last states nothing has a gradient.
        x, aside = keras.layers.GRU(8, return_sequences=True, return_state=True)(keras.ops.reshape(x, (-1, 4, 2)))
        x = keras.layers.Flatten()(x)
    outputs = [keras.layers.Dense(3)(x), keras.layers.Dense(1, name="second_aside")(aside)]
    model = (Step if kind == "own step" else keras.Model)(inputs, outputs)
    optimizer = optimizers.AdamW(0.01, weight_decay=0.5)
    model.compile(optimizer, None if kind == "own step" else ["mse", None])
    return model


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(
    ("kind", "options"),
    daily(
        [
            ("loss", {}),
            ("own step", {}),
            pytest.param("loss", {"memory": "recompute"}, id="recompute"),
            pytest.param("loss", {"schedule": "zb-h1"}, id="zb-h1"),
            pytest.param("loss", {"weight_gradients": "batched", "replicas": 2}, id="batched"),
            ("states", {}),
        ],
        "loss",
        "own step",
    ),
)
def test_what_the_loss_does_not_use_has_no_gradient(kind, options):
    """Zeros would let weights decay, and times infinity they are no numbers."""
    targets = np.eye(3, dtype="float32")[DATA[1]]
    data = np.concatenate([np.zeros((2, 8), "float32"), DATA[0][2:]]), targets if kind == "own step" else [targets]
    devices = [f"CPU:{i}" for i in range(2 * options.get("replicas", 1))]
    strategy = tfdist.PipelineStrategy(devices, num_microbatches=4, cuts=["cut"], **options)
    build = functools.partial(with_an_unused_output, kind)
    _, plain = after_one_step(tf.distribute.get_strategy(), build, data, steps=3)
    model, received = after_one_step(strategy, build, data, steps=3)
    assert all(np.isfinite(value).all() for value in plain.values())
    assert_equal(plain, received, 2e-5)
    assert any("aside" in variable.path for variable in model.trainable_variables)


def without_decay(when: str) -> keras.Model:
    """Some weights are named by themselves, some by a part of their names."""
    dense = [keras.layers.Dense(8, "tanh", name=name) for name in ("first", "second", "third")]
    model = keras.Sequential([keras.Input((8,)), *dense, keras.layers.Dense(3, "softmax", name="last")])
    optimizer = optimizers.AdamW(0.01, weight_decay=0.9)
    optimizer.exclude_from_weight_decay([model.get_layer("last").kernel], ["bias", "second"])
    if when == "it has slots":
        optimizer.build(model.trainable_variables)
    if when == "it is compiled":
        model.predict(DATA[0], verbose=0)
    model.compile(optimizer, "sparse_categorical_crossentropy")
    return model


@pytest.mark.parametrize("when", daily(["it is trained", "it has slots", "it is compiled"], "it is trained"))
def test_weights_that_are_excluded_from_weight_decay(when):
    """Keras knows them by ids and names of TensorFlow's variables; the model moves to its stages when ..."""
    build = functools.partial(without_decay, when)
    _, received = after_one_step(pipeline(3), build, DATA, steps=4)
    assert_equal(expected(build), received, 2e-5)


@pytest.mark.nightly
def test_several_optimizers_that_were_built_before_the_first_fit():
    def build() -> keras.Model:
        several = [optimizers.Adam(0.01), optimizers.SGD(0.1, momentum=0.9)]
        model = mlp(optimizer=lambda: optimizers.MultiOptimizer(lambda v: several["bias" in v.path]), metrics=None)()
        model.optimizer.build(model.trainable_variables)
        return model

    _, received = after_one_step(pipeline(3), build, DATA, steps=3)
    assert_equal(expected(build, 3), received, 2e-5)


def assert_slots_follow(model: keras.Model) -> None:
    """Every slot is on the device of the weight that it is named after, and every weight that needs one has one."""
    devices = {v.path.replace("/", "_"): v.value.device for v in model.trainable_variables}
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    slots = [v for v in optimizer.variables if v.path.split("/")[-1] not in ("iteration", "learning_rate")]
    for slot in slots:
        owners = {device for path, device in devices.items() if f"/{path}_" in slot.path}
        assert {slot.value.device} == owners, slot.path
