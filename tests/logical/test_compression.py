"""PowerSGD and TopK: equal to the same written down by hand, and what is not sent yet is never lost."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from benchmarks.compression.exchanges import noted_exchanges
from tests.compressed_by_hand import Largest, Low, assert_close, by_hand, data, distance, network, trained
from tests.models import in_scope, ready, warned
from tests.tiers import daily
from tfdist.compression import PowerSGD, TopK
from tfdist.compression.power_sgd import orthonormal
from tfdist.compression.top_k import largest
from tfdist.inspection.model_state import parts_of_variable

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
    variables = strategy._gradient_options.compressor.variables_of(model.optimizer)
    return {name: [part.numpy() for part in parts_of_variable(v)] for name, v in variables.items()}


@functools.cache
def low_rank(optimizer: Any = MOMENTUM) -> keras.Model:
    return by_hand(Low(RANK), optimizer)


@pytest.mark.nightly
def test_power_sgd_is_that_of_the_whole_gradient():
    """It depends on the sum of all gradients only: whatever the number of replicas, and with statistics of all rows."""
    strategy = mirrored(RANK, 3, bucket_bytes=9000)
    model = trained(strategy, MOMENTUM)
    assert_close(model, low_rank())
    assert set(kept(strategy, model)) == {"0/rest", "0/factor", "4/rest", "4/factor"}


@pytest.mark.parametrize(
    ("method", "optimizer", "by_hand_with"),
    daily(
        [
            pytest.param(TopK(0.05), MOMENTUM, (MOMENTUM, Largest), id="feedback"),
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


@pytest.mark.nightly
def test_it_begins_at_the_start_step():
    method = TopK(0.02, start_step=8)

    def after(epochs: int, compression: Any) -> keras.Model:
        strategy = mirrored(compression)
        model = in_scope(strategy, lambda: network(MOMENTUM))
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
        for name, variable in self.strategy._gradient_options.compressor.variables_of(self.model.optimizer).items():
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
        model = ready(
            keras.Sequential([keras.Input((SIZE,)), dense]),
            keras.optimizers.SGD(1.0),
            lambda y, p: tf.reduce_mean(y * p, -1),
        )
    callbacks = [Forgetting(strategy, forgotten)] if forgotten else []
    batches = tf.data.Dataset.from_tensors((x, y)).repeat(STEPS)
    model.fit(batches, verbose=0, callbacks=callbacks)
    rest = np.sum(kept(strategy, model)["0/rest"], 0).reshape(SIZE, SIZE)
    return -model.get_weights()[0], STEPS * x.T @ y / (64 * SIZE), rest


@pytest.mark.nightly
@pytest.mark.parametrize("method", [TopK(0.02), *daily([PowerSGD(rank=1)])], ids=str)
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


@pytest.mark.nightly
def test_what_is_sent():
    """Bytes, by the shapes of the sums: those of the formula, but for the alignment of what is packed."""
    with noted_exchanges() as sent:
        model = trained(mirrored(PowerSGD(rank=2), bucket_bytes=None), MOMENTUM)
    batch_norm, left, right = sent[0], *sent[-2:]
    assert batch_norm == ((3, 64), tf.float64)
    numbers = [int(np.prod(shape)) for shape, _ in (left, right)]
    expected = sum(PowerSGD(rank=2).numbers(tuple(w.shape)) for w in model.trainable_weights)
    moving = 2 * 64
    assert sum(numbers) == pytest.approx(expected + moving, abs=15 * 12)
    whole = sum(int(np.prod(w.shape)) for w in model.trainable_weights)
    assert sum(numbers) < whole / 5

    with noted_exchanges() as sent:
        trained(mirrored(TopK(0.01), bucket_bytes=None), MOMENTUM)
    rows, plain = sent[-2:]
    assert rows == ((20 + 31, 1), tf.int64) and plain[1] == tf.float32


class Overflowing(keras.layers.Layer):
    """Adds a weight whose gradient is infinite; all others are finite."""

    def build(self, input_shape: Any) -> None:
        self.offset = self.add_weight(shape=(input_shape[-1],), initializer="zeros")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        @tf.custom_gradient
        def offset(value: tf.Tensor) -> Any:
            return tf.identity(value), lambda upstream: upstream * float("inf")

        return x + offset(tf.convert_to_tensor(self.offset))


@pytest.mark.nightly
def test_an_overflow_of_another_gradient_leaves_them_alone_as_well():
    """Such a step is left out as a whole: what was sent of other buckets must not be taken for applied."""
    method = PowerSGD(2)
    strategy = mirrored(method, bucket_bytes=1)
    model = in_scope(
        strategy,
        lambda: ready(
            keras.Sequential([keras.Input((32,)), keras.layers.Dense(64), Overflowing()]),
            keras.optimizers.LossScaleOptimizer(MOMENTUM(), 2.0),
            "mse",
        ),
    )
    x, _ = data()
    model.fit(x[:32], np.ones((32, 64)), batch_size=16, shuffle=False, verbose=0)
    kernel = kept(strategy, model)
    assert {name for name, parts in kernel.items() if np.any(parts)} <= {"0/factor"}
    np.testing.assert_allclose(kernel["0/factor"][0], method.slots((32, 64))["factor"].initial, atol=1e-7)


@pytest.mark.nightly
def test_embeddings_are_sent_as_they_are():
    random = np.random.default_rng(2)
    words, targets = random.integers(0, 300, (32, 4)), random.normal(size=(32, 8))
    weights = []
    for method in (None, PowerSGD(rank=1)):
        with (strategy := mirrored(method)).scope():
            keras.utils.set_random_seed(1)
            layers = [keras.Input((4,), dtype="int32"), keras.layers.Embedding(300, 16), keras.layers.Flatten()]
            model = ready(
                keras.Sequential([*layers, keras.layers.Dense(64, "tanh"), keras.layers.Dense(8)]),
                keras.optimizers.SGD(1.0),
                "mse",
            )
        model.fit(words, targets, batch_size=32, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    assert set(kept(strategy, model)) == {"1/rest", "1/factor", "3/rest", "3/factor"}
    np.testing.assert_allclose(weights[1][0], weights[0][0], atol=1e-7)
    assert np.abs(weights[1][1] - weights[0][1]).max() > 1e-3


@pytest.mark.nightly
def test_clipping():
    """The optimizer clips the sum, as without compression."""
    clipped = functools.partial(keras.optimizers.SGD, 0.05, global_clipnorm=0.01)
    assert_close(trained(mirrored(RANK), clipped), by_hand(Low(RANK), clipped))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: PowerSGD(rank=0), "Received: rank=0. Expected: a whole number, at least 1."),
        (lambda: PowerSGD(rank=True), "Received: rank=True."),
        (lambda: PowerSGD(start_step=-1), "Received: start_step=-1. Expected: a number of steps, 0 or more."),
        (lambda: TopK(fraction=0), "Received: fraction=0. Expected: a share of the elements"),
        (lambda: TopK(fraction=2), "Received: fraction=2."),
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
        (keras.optimizers.Adam, r"with Adam\(momentum=None\)\. Expected: keras\.optimizers\.SGD with a momentum"),
        (functools.partial(MOMENTUM, global_clipnorm=1.0), r"with SGD\(global_clipnorm=1\.0\)\. Expected: "),
    ],
)
def test_momentum_correction_needs_a_plain_momentum(optimizer, text):
    with pytest.raises(ValueError, match=text):
        trained(mirrored(TopK(0.05, momentum_correction=True)), optimizer)


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


@pytest.mark.nightly
def test_several_compiled_steps():
    method, options = TopK(0.05), {"jit_compile": True, "steps_per_execution": 2}
    assert_close(trained(mirrored(method), MOMENTUM, **options), trained(mirrored(method), MOMENTUM))


@pytest.mark.parametrize(("compression", "clipnorm", "is_told"), [(TopK(0.05), None, True), ("bf16", 1.0, False)])
def test_a_loop_of_ones_own_is_told(compression, clipnorm, is_told):
    strategy = tfdist.MirroredStrategy(["CPU:0", "CPU:1"], compression=compression)
    model = in_scope(strategy, lambda: network(lambda: keras.optimizers.SGD(0.05, clipnorm=clipnorm), normalized=False))

    @tf.function
    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True))
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    told = warned(lambda: strategy.run(step, (tf.ones((4, 32)),)), "strategy.run. It sends gradients as they are")
    assert len(set(told)) == is_told
