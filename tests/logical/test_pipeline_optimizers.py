"""Optimizers: what they do with a pipeline's gradients, and that their slots come along."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, optimizers

from tests.logical.pipelines import after_one_step, assert_equal, labelled, micro_batched, mlp, pipeline

pytestmark = pytest.mark.usefixtures("four_devices")

DATA = labelled(16)
OPTIMIZERS = {
    "SGD, momentum": lambda: optimizers.SGD(0.1, momentum=0.9),
    "SGD, Nesterov": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda: optimizers.Adam(0.01),
    "Adam, AMSGrad": lambda: optimizers.Adam(0.01, amsgrad=True, epsilon=1e-3),
    "AdamW, global_clipnorm": lambda: optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.1),
    "AdamW, clipnorm": lambda: optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=0.05),
    "SGD, clipvalue": lambda: optimizers.SGD(0.1, clipvalue=0.01),
    "EMA": lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3),
    "gradient_accumulation_steps": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "ExponentialDecay": lambda: optimizers.RMSprop(optimizers.schedules.ExponentialDecay(0.01, 2, 0.5)),
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
# What looks at all gradients, what adds them up, an update of whole matrices, and all the rest at once.
DAILY = ("AdamW, global_clipnorm",)


def expected(build: Callable[[], keras.Model], steps: int = 4) -> dict[str, np.ndarray]:
    return after_one_step(tf.distribute.get_strategy(), build, DATA, steps)[1]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DAILY else pytest.mark.exhaustive) for name in OPTIMIZERS]
)
def test_equals_one_process(name):
    build = mlp(optimizer=OPTIMIZERS[name], metrics=None)
    model, received = after_one_step(pipeline(3), build, DATA, steps=4)
    assert_equal(expected(build), received, 2e-5)
    assert_slots_follow(model)


def test_clipping_is_active_and_global():
    """One norm over all stages: without clipping, and with a norm for each stage, other weights come out."""
    build = mlp(optimizer=lambda: optimizers.SGD(0.1, global_clipnorm=0.1), metrics=None)
    strategy = pipeline()
    _, clipped = after_one_step(strategy, build, DATA)
    _, free = after_one_step(pipeline(), mlp(optimizer=lambda: optimizers.SGD(0.1), metrics=None), DATA)
    keras.utils.set_random_seed(7)
    before = build().get_weights()
    steps = [np.concatenate([(a - b[f"weight {i}"]).ravel() for i, a in enumerate(before)]) for b in (clipped, free)]
    assert np.linalg.norm(steps[1]) > 0.1 * 0.1 * 1.5
    assert np.linalg.norm(steps[0]) == pytest.approx(0.1 * 0.1, rel=1e-3)
    np.testing.assert_allclose(
        steps[0] / np.linalg.norm(steps[0]), steps[1] / np.linalg.norm(steps[1]), rtol=0, atol=1e-5
    )


@pytest.fixture
def mixed_float16():
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


def loss_scaled(initial_scale: float) -> Callable[[], keras.Model]:
    def make() -> optimizers.Optimizer:
        return optimizers.LossScaleOptimizer(optimizers.Adam(0.01, epsilon=1e-3), initial_scale, 2)

    return mlp(optimizer=make, metrics=None)


@pytest.mark.parametrize("weight_gradients", [pytest.param("accumulate", marks=pytest.mark.exhaustive), "batched"])
def test_loss_scale_with_mixed_float16(mixed_float16, weight_gradients):
    model, received = after_one_step(pipeline(weight_gradients=weight_gradients), loss_scaled(1024.0), DATA, steps=4)
    assert_equal(expected(loss_scaled(1024.0)), received, 4e-3)
    assert float(model.optimizer.dynamic_scale) == 4096.0
    assert_slots_follow(model)


def test_loss_scale_that_overflows(mixed_float16):
    """More than float16 holds, in all micro-batches: no update, and half the scale at every step."""
    model, received = after_one_step(pipeline(), loss_scaled(2.0**40), DATA, steps=3)
    keras.utils.set_random_seed(7)
    for i, weight in enumerate(loss_scaled(1.0)().get_weights()):
        np.testing.assert_array_equal(received[f"weight {i}"], weight)
    assert float(model.optimizer.dynamic_scale) == 2.0**37
    assert int(model.optimizer.inner_optimizer.iterations) == 0


@pytest.mark.exhaustive
def test_micro_batches_and_accumulated_steps_with_state():
    """Two batches of four micro-batches each make one update."""
    build = mlp(
        lambda: layers.Dropout(0.3), optimizer=lambda: optimizers.SGD(0.1, gradient_accumulation_steps=2), metrics=None
    )
    _, received = after_one_step(pipeline(), build, DATA, steps=4)
    assert_equal(expected(micro_batched(build, 4)), received)


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


def assert_slots_follow(model: keras.Model) -> None:
    """Every slot is on the device of the weight that it is named after, and every weight that needs one has one."""
    devices = {v.path.replace("/", "_"): v.value.device for v in model.trainable_variables}
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    slots = [v for v in optimizer.variables if v.path.split("/")[-1] not in ("iteration", "learning_rate")]
    for slot in slots:
        owners = {device for path, device in devices.items() if f"/{path}_" in slot.path}
        assert {slot.value.device} == owners, slot.path
