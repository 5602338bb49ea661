"""PowerSGD and TopK: equal to the same written down by hand, and what is not sent yet is never lost."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.compressed_by_hand import Largest, Low, assert_close, by_hand, data, distance, network, trained
from tests.tiers import daily
from tfdist.compression import PowerSGD, TopK, top_k
from tfdist.compression.power_sgd import orthonormal
from tfdist.compression.top_k import largest
from tfdist.inspection.replica_values import parts_of_variable

pytestmark = pytest.mark.usefixtures("four_devices")

SGD = functools.partial(keras.optimizers.SGD, 0.05)
MOMENTUM = functools.partial(keras.optimizers.SGD, 0.05, momentum=0.9)
NESTEROV = functools.partial(keras.optimizers.SGD, 0.05, momentum=0.9, nesterov=True)
RANK = PowerSGD(rank=2)


def mirrored(method: Any, replicas: int = 2, **options: Any) -> tfdist.MirroredStrategy:
    devices = [f"CPU:{i}" for i in range(replicas)]
    return tfdist.MirroredStrategy(devices, compression=method, **options)


def kept(strategy: tfdist.MirroredStrategy, model: keras.Model) -> dict[str, list[np.ndarray]]:
    """What each replica keeps."""
    variables = strategy._wire.compressor.variables_of(model.optimizer)
    return {name: [part.numpy() for part in parts_of_variable(v)] for name, v in variables.items()}


@functools.cache
def low_rank(optimizer: Any = MOMENTUM) -> keras.Model:
    return by_hand(Low(RANK), optimizer)


@pytest.mark.parametrize(
    ("replicas", "options"),
    daily(
        [
            pytest.param(2, {}, id="two"),
            pytest.param(3, {"bucket_bytes": 9000}, id="three, in buckets"),
            pytest.param(4, {"bucket_bytes": 1}, id="four, one by one"),
        ],
        "three, in buckets",
    ),
)
def test_power_sgd_is_that_of_the_whole_gradient(replicas, options):
    """It depends on the sum of all gradients only: whatever the number of replicas, and with statistics of all rows."""
    strategy = mirrored(RANK, replicas, **options)
    model = trained(strategy, MOMENTUM)
    assert_close(model, low_rank())
    assert set(kept(strategy, model)) == {"0/rest", "0/factor", "4/rest", "4/factor"}


@pytest.mark.exhaustive
def test_power_sgd_differs_from_none():
    plain = trained(mirrored(None), MOMENTUM)
    assert distance(low_rank(), plain) > 0.01


@pytest.mark.parametrize(
    ("method", "optimizer", "by_hand_with"),
    daily(
        [
            pytest.param(TopK(0.05), MOMENTUM, (MOMENTUM, Largest), id="feedback"),
            pytest.param(TopK(0.05, momentum_correction=True), MOMENTUM, (SGD, Largest, 0.9), id="momentum correction"),
            pytest.param(TopK(0.05, momentum_correction=True), NESTEROV, (SGD, Largest, 0.9, True), id="Nesterov's"),
        ],
        "Nesterov's",
    ),
)
def test_top_k_equals_by_hand(method, optimizer, by_hand_with):
    plain, kind, *arguments = by_hand_with
    expected = by_hand(kind(method, *arguments), plain, replicas=2, normalized=False)
    received = trained(mirrored(method), optimizer, normalized=False)
    assert_close(received, expected)
    assert distance(trained(mirrored(None), optimizer, normalized=False), expected) > 0.01


@pytest.mark.exhaustive
def test_everything_is_none():
    assert_close(trained(mirrored(TopK(1.0), 3), MOMENTUM), trained(mirrored(None, 3), MOMENTUM))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "method", [PowerSGD(2, start_step=1000), TopK(0.01, momentum_correction=True, start_step=1000)]
)
def test_before_the_start_step_all_is_sent(method):
    assert_close(trained(mirrored(method), NESTEROV), trained(mirrored(None), NESTEROV))


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", [PowerSGD(2, start_step=8), TopK(0.02, start_step=8)], ids=str)
def test_it_begins_at_the_start_step(method):
    def after(epochs: int, compression: Any) -> keras.Model:
        strategy = mirrored(compression)
        with strategy.scope():
            model = network(MOMENTUM)
        model.fit(*data(), batch_size=16, epochs=epochs, shuffle=False, verbose=0)
        return model

    assert_close(after(2, method), after(2, None), 1e-6)
    assert distance(after(3, method), after(3, None)) > 1e-3


class Forgetting(keras.callbacks.Callback):
    """Sets what a method keeps to zero after each step: a negative control."""

    def __init__(self, strategy: Any, kind: str) -> None:
        super().__init__()
        self.strategy, self.kind = strategy, kind

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        for name, variable in self.strategy._wire.compressor.variables_of(self.model.optimizer).items():
            if name.endswith(self.kind):
                for part in parts_of_variable(variable):
                    assert np.any(part.numpy())
                    part.assign(tf.zeros_like(part))


SIZE, STEPS = 32, 300


def descended(method: Any, forgotten: str | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The sum of all updates, that of all gradients, which are always the same, and that of the rests."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(2, 64, SIZE)).astype("float32")
    strategy = mirrored(method)
    with strategy.scope():
        dense = keras.layers.Dense(SIZE, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((SIZE,)), dense])
        model.compile(keras.optimizers.SGD(1.0), lambda y, p: tf.reduce_mean(y * p, -1))
    callbacks = [Forgetting(strategy, forgotten)] if forgotten else []
    batches = tf.data.Dataset.from_tensors((x, y)).repeat(STEPS)
    model.fit(batches, verbose=0, callbacks=callbacks)
    rest = np.sum(kept(strategy, model)["0/rest"], 0).reshape(SIZE, SIZE)
    return -model.get_weights()[0], STEPS * x.T @ y / (64 * SIZE), rest


@pytest.mark.parametrize("method", [PowerSGD(rank=1), TopK(0.02)], ids=str)
def test_nothing_is_lost(method):
    """All updates together are all gradients but for the last rests; without feedback, one part is never applied."""

    def missing(updates: np.ndarray, gradients: np.ndarray) -> float:
        return np.linalg.norm(updates - gradients) / np.linalg.norm(gradients)

    updates, gradients, rest = descended(method)
    assert missing(updates + rest, gradients) < 1e-4
    assert 0 < missing(updates, gradients) < 0.25
    updates, gradients, _ = descended(method, "rest")
    assert missing(updates, gradients) > 0.5


@pytest.mark.parametrize("size", [3000, 100_000])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda random, n: random.standard_normal(n), id="normal"),
        pytest.param(lambda random, n: random.integers(0, 4, n), id="many are equal"),
        pytest.param(lambda random, n: np.zeros(n), id="zeros"),
        # The sample has none of them.
        pytest.param(lambda random, n: np.arange(n) % 61 != 0, id="misses"),
        pytest.param(lambda random, n: np.where(np.arange(n) % 61, 1, 9), id="has the largest"),
        pytest.param(lambda random, n: np.where(np.arange(n) == 7, np.inf, 1), id="infinite"),
    ],
)
def test_the_largest(make, size):
    values = np.abs(make(np.random.default_rng(0), size)).astype("float32")
    for count in (1, size // 100, size // 3, size):
        found = tf.function(largest)(tf.constant(values), count).numpy()
        expected = np.argsort(-values, kind="stable")[:count]
        assert found.dtype == np.int32
        np.testing.assert_array_equal(np.sort(found), np.sort(expected))


def test_what_is_sent():
    """Bytes, by the shapes of the sums: those of the formula, but for the alignment of what is packed."""
    model = trained(strategy := mirrored(PowerSGD(rank=2), bucket_bytes=None), MOMENTUM)
    batch_norm, left, right = strategy._sums_of_step[model][0], *strategy._sums_of_step[model][-2:]
    assert batch_norm == ((3, 64), tf.float64)
    numbers = [int(np.prod(shape)) for shape, _ in (left, right)]
    expected = sum(PowerSGD(rank=2).numbers(tuple(w.shape)) for w in model.trainable_weights)
    moving = 2 * 64
    assert sum(numbers) == pytest.approx(expected + moving, abs=15 * 12)
    whole = sum(int(np.prod(w.shape)) for w in model.trainable_weights)
    assert sum(numbers) < whole / 5

    model = trained(strategy := mirrored(TopK(0.01), bucket_bytes=None), MOMENTUM)
    rows, plain = strategy._sums_of_step[model][-2:]
    assert rows == ((20 + 31, 1), tf.int64) and plain[1] == tf.float32


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", [PowerSGD(2), TopK(0.05, momentum_correction=True)], ids=str)
def test_a_loss_scale_changes_nothing(method):
    """Rests are of gradients without the scale: it may grow. All factors are powers of two."""

    def scaled(initial: float, growth: int) -> Any:
        return lambda: keras.optimizers.LossScaleOptimizer(MOMENTUM(), initial, dynamic_growth_steps=growth)

    weights = [trained(mirrored(method), one).get_weights() for one in (MOMENTUM, scaled(4.0, 1000), scaled(2.0, 3))]
    for other in weights[1:]:
        for received, expected in zip(other, weights[0], strict=True):
            np.testing.assert_array_equal(received, expected)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(PowerSGD(2), marks=pytest.mark.exhaustive),
        TopK(0.05, momentum_correction=True),
        pytest.param(TopK(0.05, momentum_correction=True, start_step=1000), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_an_overflow_leaves_the_rests_alone(method):
    strategy = mirrored(method)
    with strategy.scope():
        model = network(lambda: keras.optimizers.LossScaleOptimizer(MOMENTUM(), 2.0))
    x, y = data()
    model.fit(x, y, batch_size=16, epochs=1, shuffle=False, verbose=0)
    before, weights = kept(strategy, model), [v.numpy() for v in model.trainable_variables]
    # One replica's rows only.
    y[0] = np.inf
    model.fit(x[:16], y[:16], batch_size=16, epochs=1, shuffle=False, verbose=0)
    assert float(model.optimizer.dynamic_scale) == 1.0
    for name, parts in kept(strategy, model).items():
        np.testing.assert_array_equal(parts, before[name], err_msg=name)
        assert np.any(parts) or ("rest" in name and method.start_step)
    for v, expected in zip(model.trainable_variables, weights, strict=True):
        np.testing.assert_array_equal(v.numpy(), expected)


class Overflowing(keras.layers.Layer):
    """Adds a weight whose gradient is infinite; all others are finite."""

    def build(self, input_shape: Any) -> None:
        self.offset = self.add_weight(shape=(input_shape[-1],), initializer="zeros")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        @tf.custom_gradient
        def offset(value: tf.Tensor) -> Any:
            return tf.identity(value), lambda upstream: upstream * float("inf")

        return x + offset(tf.convert_to_tensor(self.offset))


@pytest.mark.parametrize(
    "method", [pytest.param(PowerSGD(2), marks=pytest.mark.exhaustive), TopK(0.05, momentum_correction=True)], ids=str
)
def test_an_overflow_of_another_gradient_leaves_them_alone_as_well(method):
    """Such a step is left out as a whole: what was sent of other buckets must not be taken for applied."""
    strategy = mirrored(method, bucket_bytes=1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(64), Overflowing()])
        model.compile(keras.optimizers.LossScaleOptimizer(MOMENTUM(), 2.0), "mse")
    x, _ = data()
    model.fit(x[:32], np.ones((32, 64)), batch_size=16, shuffle=False, verbose=0)
    kernel = kept(strategy, model)
    assert {name for name, parts in kernel.items() if np.any(parts)} <= {"0/factor"}
    factor = method.slots((32, 64)).get("factor")
    if factor is not None:
        np.testing.assert_allclose(kernel["0/factor"][0], factor.initial, atol=1e-7)


@pytest.mark.exhaustive
def test_what_is_no_number_is_seen_by_all():
    """Without a loss scale, the weights become what they become without compression."""
    for method in (PowerSGD(2), TopK(0.05)):
        with mirrored(method).scope():
            model = network(SGD, normalized=False)
        x, y = data()
        x[3] = np.nan
        model.fit(x, y, batch_size=16, epochs=1, shuffle=False, verbose=0)
        assert np.isnan(model.get_weights()[0]).any()


@pytest.mark.exhaustive
def test_embeddings_are_sent_as_they_are():
    random = np.random.default_rng(2)
    words, targets = random.integers(0, 300, (32, 4)), random.normal(size=(32, 8))
    weights = []
    for method in (None, PowerSGD(rank=1)):
        with (strategy := mirrored(method)).scope():
            keras.utils.set_random_seed(1)
            layers = [keras.Input((4,), dtype="int32"), keras.layers.Embedding(300, 16), keras.layers.Flatten()]
            model = keras.Sequential([*layers, keras.layers.Dense(64, "tanh"), keras.layers.Dense(8)])
            model.compile(keras.optimizers.SGD(1.0), "mse")
        model.fit(words, targets, batch_size=32, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    assert set(kept(strategy, model)) == {"1/rest", "1/factor", "3/rest", "3/factor"}
    np.testing.assert_allclose(weights[1][0], weights[0][0], atol=1e-7)
    assert np.abs(weights[1][1] - weights[0][1]).max() > 1e-3


@pytest.mark.exhaustive
def test_clipping():
    """The optimizer clips the sum, as without compression; a local norm limits what can become a rest."""
    clipped = functools.partial(keras.optimizers.SGD, 0.05, global_clipnorm=0.01)
    assert_close(trained(mirrored(RANK), clipped), by_hand(Low(RANK), clipped))
    strategy = mirrored(PowerSGD(rank=2, local_clipnorm=1e-3))
    model = trained(strategy, SGD)
    steps = 16
    rests = [np.linalg.norm(part) for name, parts in kept(strategy, model).items() if "rest" in name for part in parts]
    assert 0 < max(rests) < steps * 1e-3 / np.sqrt(2)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: PowerSGD(rank=0), "Received: rank=0. Expected: a whole number, at least 1."),
        (lambda: PowerSGD(rank=True), "Received: rank=True."),
        (lambda: PowerSGD(start_step=-1), "Received: start_step=-1. Expected: a number of steps, 0 or more."),
        (lambda: TopK(fraction=0), "Received: fraction=0. Expected: a share of the elements"),
        (lambda: TopK(fraction=2), "Received: fraction=2."),
        (lambda: TopK(local_clipnorm=0), "Received: local_clipnorm=0. Expected: a positive number, or None."),
        (lambda: mirrored("PowerSGD"), "Received: compression='PowerSGD'. Expected one of"),
        (lambda: mirrored([]), r"Received: compression=\[\]. Expected one of"),
        (lambda: mirrored(PowerSGD), "Received: compression=<class"),
    ],
)
def test_mistakes(make, text):
    with pytest.raises(ValueError, match="^" + text.replace("(", r"\(")):
        make()


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (SGD, r"Expected: keras\.optimizers\.SGD with a momentum"),
        (keras.optimizers.Adam, r"with Adam\(momentum=None\)\. Expected: keras\.optimizers\.SGD with a momentum"),
        (lambda: tfdist.ShardedOptimizer(MOMENTUM()), r"with ShardedOptimizer\(momentum=None\)"),
        (
            functools.partial(MOMENTUM, global_clipnorm=1.0),
            r"with SGD\(global_clipnorm=1\.0\)\. Expected: ",
        ),
        (functools.partial(MOMENTUM, gradient_accumulation_steps=2), r"with SGD\(gradient_accumulation_steps=2\)"),
    ],
)
def test_momentum_correction_needs_a_plain_momentum(optimizer, text):
    with pytest.raises(ValueError, match=text):
        trained(mirrored(TopK(0.05, momentum_correction=True)), optimizer)


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", [RANK, PowerSGD(2, start_step=2)], ids=str)
def test_accumulated_gradients(method):
    """Each is compressed; the steps before `start_step` are those of the optimizer."""
    accumulating = functools.partial(MOMENTUM, gradient_accumulation_steps=4)
    assert_close(trained(mirrored(method), accumulating), trained(mirrored(method, 3), accumulating))


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", [RANK, TopK(0.05)], ids=str)
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_dtypes_of_weights(method, dtype):
    keras.config.set_dtype_policy(dtype)
    try:
        strategy = mirrored(dataclasses.replace(method, local_clipnorm=1.0))
        model = trained(strategy, SGD, normalized=False)
    finally:
        keras.config.set_dtype_policy("float32")
    kinds = {part.dtype.name for parts in kept(strategy, model).values() for part in parts}
    assert kinds == {"float64" if dtype == "float64" else "float32"}
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert all(np.any(part) for parts in kept(strategy, model).values() for part in parts)


@pytest.mark.parametrize("columns", [8, 32, 64])
def test_columns_that_depend_on_each_other(columns):
    """As of a gradient of fewer rows than the rank: the columns' span is kept, and nothing is no number."""
    random = np.random.default_rng(3)
    thin = (random.normal(size=(4096, 8)) @ random.normal(size=(8, columns))).astype("float32")
    zeros = np.zeros((50, columns), "float32")
    found, of_zeros = (matrix.numpy() for matrix in orthonormal([tf.constant(thin), tf.constant(zeros)]))
    assert np.isfinite(found).all() and not of_zeros.any()
    assert np.linalg.norm(thin - found @ (found.T @ thin)) < 1e-4 * np.linalg.norm(thin)
    assert np.linalg.norm(found, 2) < 1 + 1e-3


@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"jit_compile": True}, {"steps_per_execution": 2}])
@pytest.mark.exhaustive
@pytest.mark.parametrize("method", [RANK, TopK(0.05)], ids=str)
def test_ways_to_run_a_step(method, options):
    assert_close(trained(mirrored(method), MOMENTUM, **options), trained(mirrored(method), MOMENTUM))


@pytest.mark.parametrize(
    ("start_step", "options"),
    [(0, {}), *daily([(2, {}), (0, {"run_eagerly": True}), (0, {"jit_compile": True}), (2, {"jit_compile": True})])],
)
def test_a_sample_changes_no_step(monkeypatch, start_step, options):
    """A kernel of 64 x 128 elements is large enough for one."""

    def fit() -> list[np.ndarray]:
        with mirrored(TopK(0.01, start_step=start_step)).scope():
            keras.utils.set_random_seed(3)
            dense = [keras.layers.Dense(64, "tanh"), keras.layers.Dense(128, "tanh"), keras.layers.Dense(2)]
            model = keras.Sequential([keras.Input((32,)), *dense])
            model.compile(keras.optimizers.SGD(0.05), "mse", **options)
        model.fit(*data(), batch_size=16, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    kernel = tf.TensorSpec([64 * 128])
    traced = tf.function(lambda values: largest(values, TopK(0.01).count(64 * 128))).get_concrete_function(kernel)
    assert "Where" in {operation.type for operation in traced.graph.get_operations()}
    found = fit()
    monkeypatch.setattr(top_k, "largest", lambda values, count: tf.math.top_k(values, count, sorted=False).indices)
    for received, expected in zip(found, fit(), strict=True):
        np.testing.assert_allclose(received, expected, atol=1e-6)


@pytest.mark.parametrize(
    "method", [TopK(0.05), *daily([RANK, TopK(0.05, start_step=3), PowerSGD(2, start_step=3)])], ids=str
)
def test_a_constraint_sends_nothing_again(method):
    """What was compressed is the same on all replicas, also where it was made in a branch of the step."""

    def sent(**options: Any) -> list:
        with (strategy := mirrored(method)).scope():
            dense = [keras.layers.Dense(64), keras.layers.Dense(48, **options), keras.layers.Dense(2)]
            model = keras.Sequential([keras.Input((32,)), *dense])
            model.compile(keras.optimizers.SGD(0.05), "mse")
        model.fit(*data(), batch_size=16, verbose=0)
        return strategy._sums_of_step[model]

    assert sent(kernel_constraint="max_norm") == sent()


@pytest.mark.parametrize(("compression", "clipnorm", "is_told"), [(TopK(0.05), None, True), ("bf16", 1.0, False)])
def test_a_loop_of_ones_own_is_told(compression, clipnorm, is_told):
    strategy = tfdist.MirroredStrategy(["CPU:0", "CPU:1"], compression=compression)
    with strategy.scope():
        model = network(lambda: keras.optimizers.SGD(0.05, clipnorm=clipnorm), normalized=False)

    @tf.function
    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True))
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(2):
            strategy.run(step, (tf.ones((4, 32)),))
    told = [str(one.message) for one in found if "strategy.run. It sends gradients as they are" in str(one.message)]
    assert len(told) == is_told


@pytest.mark.exhaustive
def test_two_fits_go_on_with_the_rests():
    strategy = mirrored(RANK)
    model = trained(strategy, MOMENTUM)
    before = kept(strategy, model)
    model.fit(*data(), batch_size=16, epochs=1, shuffle=False, verbose=0)
    twice = kept(strategy, model)
    assert before.keys() == twice.keys()
    for name in before:
        assert np.abs(np.subtract(before[name], twice[name])).max() > 0
