"""`FullyShardedStrategy` on the four devices of one process: rows of the feature table, layouts, what is kept."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tfdist
from tests import branching_steps
from tests.features import reference
from tests.features.running import differences_of
from tests.features.selection import VARIANTS
from tests.features.table import FEATURES
from tests.gathers_ahead import blocks_ahead
from tests.models import in_scope
from tests.tiers import daily
from tfdist.checkpoint import backup_and_restore
from tfdist.checkpoint.training_state import rows_between
from tfdist.memory import kinds
from tfdist.optimizers import in_parts
from tfdist.steps import shards
from tfdist.steps.flat_bucket import FlatBucket
from tfdist.steps.gradients import weighted
from tfdist.testing import assert_transparent

DAILY = (
    "last batch of one row (81 rows)",
    "BatchNormalization",
)
# What is refused, rows that are summed first (see docs/fully-sharded.md), and batches that four replicas cannot share.
REFUSED = (
    "jit_compile=True (XLA), with BatchNormalization",
    "Embedding and Adam (sparse gradients)",
    "labelled and unlabelled rows, of other numbers, in one batch (FixMatch)",
)


@pytest.fixture(scope="module")
def sharded(four_devices: list[str]) -> tf.distribute.Strategy:
    return tfdist.FullyShardedStrategy()


@pytest.mark.parametrize("name", daily([name for name in FEATURES if name not in (*REFUSED, *VARIANTS)], *DAILY))
def test_equals_one_process(sharded: tf.distribute.Strategy, name: str) -> None:
    assert sharded.num_replicas_in_sync == 4
    assert differences_of(sharded, name, reference.folder()), "nothing was compared"


@pytest.mark.parametrize(
    ("optimizer", "is_tied", "words"),
    daily(
        [
            pytest.param(
                "adam", False, "optimizer Adam for weight '(.*/)?table/embeddings' of an embedding", id="Adam"
            ),
            pytest.param("loss scale", False, "optimizer Adagrad for weight", id="in a LossScaleOptimizer"),
            pytest.param("sgd", False, "", id="SGD"),
            pytest.param("adam", True, "", id="used by a layer that needs all of it, too"),
        ],
        "Adam",
    ),
)
def test_optimizers_that_square_sums_of_rows_are_told(
    four_devices: list[str], recwarn: pytest.WarningsRecorder, optimizer: str, is_tied: bool, words: str
) -> None:
    """An embedding's gradient is whole here; Keras squares each of a row's gradients by itself."""
    with tfdist.FullyShardedStrategy().scope():
        inputs = keras.Input((6,), dtype="int32")
        table = keras.layers.Embedding(9, 8, name="table")
        x = table(inputs)
        if is_tied:
            logits = keras.layers.Lambda(lambda x: keras.ops.matmul(x, keras.ops.transpose(table.embeddings)))
            logits._table = table
            x = logits(x)
        model = keras.Model(inputs, keras.layers.Dense(1)(x))
        scaled = (
            keras.optimizers.LossScaleOptimizer(keras.optimizers.Adagrad()) if optimizer == "loss scale" else optimizer
        )
        model.compile(scaled, "mse")
    x, y = np.random.default_rng(0).integers(0, 9, (24, 6)), np.ones((24, 6, 1))
    for _ in range(2):
        model.fit(x, y, batch_size=8, verbose=0)
    said = [str(one.message) for one in recwarn if "squares the sum" in str(one.message)]
    assert len(said) == bool(words)
    assert all(re.search(words, text) for text in said), said


def deep(optimizer: Callable[[], Any] = lambda: "adam", width: int = 32) -> keras.Model:
    """A model of several blocks, whose gradients are larger than what clips them."""
    inputs = x = keras.Input((5,))
    for _ in range(5):
        x = keras.layers.Dense(width, "tanh")(x)
    model = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.LayerNormalization()(x)))
    model.compile(optimizer(), "mse")
    return model


DATA = np.random.default_rng(1).normal(size=(42, 5)), np.random.default_rng(2).normal(size=(42, 2))


@pytest.mark.nightly
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(
    ("changes", "clipped"),
    [
        pytest.param({}, {"global_clipnorm": 0.05}, id="gathered twice"),
        pytest.param({"reshard_after_forward": False}, {"clipnorm": 0.03}, id="kept", marks=pytest.mark.nightly),
        pytest.param({"memory": "recompute"}, {}, id="run again", marks=pytest.mark.nightly),
    ],
)
def test_deep_models_equal_one_process(four_devices: list[str], changes: dict, clipped: dict) -> None:
    strategy = tfdist.FullyShardedStrategy(**changes)
    assert assert_transparent(
        strategy, lambda: deep(lambda: keras.optimizers.Adam(0.01, **clipped)), DATA, batch_size=16, tolerance=1e-12
    )


@pytest.mark.nightly
def test_a_model_whose_steps_are_cut_into_blocks(sharded: tf.distribute.Strategy) -> None:
    """Each block gathers its weights once before its forward pass, and all but the last again; see the graph."""
    model = in_scope(sharded, lambda: deep(width=64))
    model.fit(*DATA, batch_size=16, verbose=0)
    blocks = [call for layer in model._flatten_layers() for call in [vars(layer).get("call")] if call]
    assert len(blocks[0].plan.chunks) >= 3
    assert set(blocks[0].plan.modes) == {"gather"}


def test_each_replica_keeps_its_part_of_weights_and_slots(sharded: tf.distribute.Strategy) -> None:
    model = in_scope(sharded, lambda: deep(width=64))
    model.fit(*DATA, batch_size=16, verbose=0)
    variables = [*model.trainable_variables, *(v for v in model.optimizer.variables if v.shape.rank)]
    kept = sum(variable.value._values[0].shape.num_elements() for variable in variables)
    whole = sum(int(np.prod(variable.shape)) for variable in variables)
    assert whole / 4 <= kept < 0.28 * whole
    assert [v.shape for v in model.trainable_variables] == [tuple(w.shape) for w in model.get_weights()]


def test_parts_are_no_rows_of_a_whole_that_stays(
    sharded: tf.distribute.Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorFlow's slices share the memory of what they are cut from: a part would keep the whole."""
    cut, kept, places = FlatBucket.cut, [], set()

    def place_of(value: tf.Tensor) -> int:
        return np.asarray(memoryview(value)).__array_interface__["data"][0]

    def noting(self: FlatBucket, *args: Any) -> tf.Tensor:
        kept.append(cut(self, *args))
        places.add(place_of(kept[-1]))
        return kept[-1]

    monkeypatch.setattr(FlatBucket, "cut", noting)
    model = in_scope(sharded, lambda: deep(width=64))
    with sharded.scope():
        model.optimizer.build(model.trainable_variables)
    model.set_weights(model.get_weights())
    variables = [*model.trainable_variables, *(v for v in model.optimizer.variables if v.shape.rank)]
    parts = [part.read_value() for variable in variables for part in variable.value._values]
    assert len(places) > len(parts)
    assert not places.intersection(map(place_of, parts))


@pytest.mark.nightly
def test_weights_are_read_set_saved_and_loaded_as_wholes(sharded: tf.distribute.Strategy, tmp_path: Any) -> None:
    plain = deep()
    plain.fit(*DATA, batch_size=16, verbose=0)
    plain.save(tmp_path / "plain.keras")
    with sharded.scope():
        model = keras.models.load_model(tmp_path / "plain.keras")
    for one, other in zip(plain.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    losses = [one.fit(*DATA, batch_size=16, shuffle=False, verbose=0).history["loss"] for one in (model, plain)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    model.save(tmp_path / "sharded.keras")
    back = keras.models.load_model(tmp_path / "sharded.keras")
    for one, other in zip(model.get_weights(), back.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    model.set_weights([np.ones_like(w) for w in model.get_weights()])
    assert all((w == 1).all() for w in model.get_weights())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), max_size=3), st.integers(1, 5), st.sampled_from(["float16", "float32", "float64"]))
def test_layouts_of_any_shape_and_number_of_replicas(shape: list[int], replicas: int, dtype: str) -> None:
    layout = FlatBucket(tf.as_dtype(dtype), (tf.TensorShape(shape),), replicas)
    value = tf.reshape(tf.range(1, int(np.prod(shape)) + 1, dtype="int32"), shape)
    value = tf.cast(value, dtype)
    parts = [layout.cut(replica, lambda _: value) for replica in range(replicas)]
    assert {tuple(part.shape) for part in parts} == {(layout.shard_rows, layout.width)}
    np.testing.assert_array_equal(layout.whole(lambda _: value), tf.concat(parts, 0))
    np.testing.assert_array_equal(layout.values(tf.concat(parts, 0))[0], value)
    # What is not the value's is 0, so that it adds nothing to a norm.
    assert sum(float(tf.reduce_sum(tf.cast(part, "float64"))) for part in parts) == pytest.approx(
        float(tf.reduce_sum(tf.cast(value, "float64")))
    )


@given(st.integers(1, 40), st.lists(st.integers(1, 6), min_size=2, max_size=4))
def test_rows_are_put_together_and_cut_for_another_number_of_replicas(rows: int, replicas: list[int]) -> None:
    whole = np.arange(rows * 2).reshape(rows, 2)
    pieces = {0: whole}
    for count in replicas:
        size = -(-rows // count)
        bounds = [(first, min(first + size, rows)) for first in range(0, size * count, size)]
        parts = {begin: rows_between(pieces, begin, end) for begin, end in bounds if begin < rows}
        assert all(len(rows_between(pieces, begin, end)) == 0 for begin, end in bounds if begin >= rows)
        np.testing.assert_array_equal(np.concatenate(list(parts.values())), whole)
        pieces = parts


@pytest.mark.nightly
def test_a_backup_goes_on_with_another_number_of_devices(four_devices: list[str], tmp_path: Path) -> None:
    """From one without a strategy to four and back, all weights and slots are the same bits."""

    def state_of(strategy: tf.distribute.Strategy, epochs: int) -> tuple[dict, list[np.ndarray]]:
        backup_and_restore._finished.clear()  # as in another process
        keras.utils.set_random_seed(2)
        with strategy.scope():
            model = deep()
        saving = tfdist.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)
        history = model.fit(*DATA, batch_size=16, epochs=epochs, verbose=0, callbacks=[saving]).history
        return history, [np.asarray(v) for v in (*model.variables, *model.optimizer.variables)]

    sharded, plain = tfdist.FullyShardedStrategy, tf.distribute.get_strategy
    for epochs, (saved, resumed) in enumerate([(plain, sharded), (sharded, plain)], 1):
        (expected, weights), (history, others) = (state_of(make(), epochs) for make in (saved, resumed))
        assert history == expected
        for one, other in zip(weights, others, strict=True):
            np.testing.assert_array_equal(one, other)


# What a mistake does: the test that compares with one process has to notice each.
def _unreduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replica keeps the part of its own gradient."""

    def own_rows(packed: list[tf.Tensor], options: Any, weight: tf.Tensor) -> list[tf.Tensor]:
        return [tf.split(one, 4)[shards.local_replica()] for one in weighted(weight, packed)]

    monkeypatch.setattr(shards, "own_rows_of_sums", own_rows)


def _own_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replica clips by the norm of its parts."""
    monkeypatch.setattr(in_parts, "all_reduce", lambda value, differentiable: value)


def _other_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts are put together in another order."""
    gather = shards.all_gather
    monkeypatch.setattr(shards, "all_gather", lambda parts: [tf.reverse(whole, [0]) for whole in gather(parts)])


def _unweighted(monkeypatch: pytest.MonkeyPatch) -> None:
    add = shards.own_rows_of_sums
    monkeypatch.setattr(shards, "own_rows_of_sums", lambda packed, options, weight: add(packed, options, None))


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(
    "mistake",
    daily(
        [pytest.param(one, id=one.__name__) for one in (_unreduced, _own_norms, _other_order, _unweighted)],
        "_unreduced",
    ),
)
def test_mistakes_are_noticed(four_devices: list[str], mistake: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    strategy = tfdist.FullyShardedStrategy()
    with pytest.raises(AssertionError, match="does not equal one process"):
        assert_transparent(
            strategy,
            lambda: deep(lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.05)),
            DATA,
            batch_size=16,
            tolerance=1e-12,
        )


@pytest.mark.nightly
def test_weights_are_not_kept_for_the_backward_pass(sharded: tf.distribute.Strategy) -> None:
    """What the backward pass reads of a block but the last is computed from the second gather."""
    seen: list[set[str]] = []
    reroute = kinds.Gathered._reroute

    def noting(self: kinds.Gathered, graph: tf.Graph, names: Any, again: Any) -> None:
        reroute(self, graph, names, again)
        read = {t.name for op in map(graph.get_operation_by_name, names) for t in op.inputs}
        first = {t.name for values in self._first for t in values}
        if again is not self._first:
            seen.append(read & first)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kinds.Gathered, "_reroute", noting)
        model = in_scope(sharded, lambda: deep(width=64))
        model.fit(*DATA, batch_size=16, verbose=0)
    assert len(seen) >= 2 * 4  # blocks but the last x replicas
    assert not any(seen)


@pytest.mark.nightly
@pytest.mark.parametrize("prefetch", daily(range(3), "0", "1"))
def test_the_next_block_is_gathered_while_this_one_computes(four_devices: list[str], prefetch: int) -> None:
    """With prefetch=0 a gather waits for the end of the block before; with more, not for so many blocks."""
    found = blocks_ahead(tfdist.FullyShardedStrategy(prefetch=prefetch))
    assert found == {"forward": {prefetch}, "backward": {prefetch}}


@pytest.mark.nightly
def test_weights_of_regularizers_are_gathered_one_by_one(sharded: tf.distribute.Strategy) -> None:
    """Keras reads all of them for the loss; there is one more when the loss of the one before is computed."""
    assert blocks_ahead(sharded, "l2") == {"forward": {1}, "backward": {1}}


@pytest.mark.nightly
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("changes", [{}, {"reshard_after_forward": False}, {"memory": "recompute"}], ids=str)
def test_regularized_models_equal_one_process(four_devices: list[str], changes: dict) -> None:
    """With a weight that two layers use, one that is frozen, and one too small for all replicas."""

    def make() -> keras.Model:
        def of_products(weight: Any) -> Any:
            return 0.01 * keras.ops.sum(keras.ops.abs(keras.ops.matmul(keras.ops.transpose(weight), weight)))

        inputs = x = keras.Input((5,))
        twice = keras.layers.Dense(32, "tanh", kernel_regularizer=of_products)
        frozen = keras.layers.Dense(32, "tanh", kernel_regularizer="l2", trainable=False)
        for layer in (
            keras.layers.Dense(32, kernel_regularizer="l1", bias_regularizer=lambda weight: 0.01 * (weight - 1.0) ** 2),
            twice,
            frozen,
            twice,
        ):
            x = layer(x)
        model = keras.Model(inputs, keras.layers.Dense(2, bias_regularizer="l2")(x))
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        return model

    assert assert_transparent(
        tfdist.FullyShardedStrategy(**changes), make, DATA, batch_size=16, validation_data=DATA, tolerance=1e-12
    )


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: {"optimizer": keras.optimizers.Adafactor()}, ValueError, "Adafactor under FullyShardedStrategy"),
        (lambda: {"optimizer": "sgd", "jit_compile": True}, ValueError, "jit_compile=True"),
        (lambda: {"optimizer": tfdist.ShardedOptimizer("sgd")}, ValueError, "ShardedOptimizer under"),
    ],
)
def test_what_is_refused(sharded: tf.distribute.Strategy, make: Callable, error: type, words: str) -> None:
    with sharded.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
        model.compile(loss="mse", **make())
    with pytest.raises(error, match=words):
        model.fit(*DATA, verbose=0)


class OfStep(keras.Sequential):
    """Its `train_step` is a function of the model, a loss and its gradients."""

    def train_step(self, data: tuple) -> dict:
        with tf.GradientTape() as tape:
            loss = self.compute_loss(None, data[1], self(data[0]))
        return {"loss": loss, **(self.of_gradients(self, loss, tape.gradient(loss, self.trainable_variables)) or {})}


def with_step(of_gradients: Callable) -> keras.Model:
    model = OfStep([keras.Input((5,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(2)])
    model.of_gradients = of_gradients
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.second = keras.optimizers.SGD(0.1)
    # What accumulates gradients by hand.
    first = model.layers[0].weights
    model.sums = [model.add_weight(shape=v.shape, initializer="zeros", trainable=False) for v in first]
    model.variables_of_tensorflow = [tf.Variable(tf.zeros_like(v), trainable=False) for v in first]
    return model


def apply(model: keras.Model, loss: Any, gradients: list) -> None:
    model.optimizer.apply(gradients, model.trainable_variables)


def _clips(model: keras.Model, loss: Any, gradients: list) -> None:
    apply(model, loss, tf.clip_by_global_norm(gradients, 0.1)[0])


def _logs_norm_before(model: keras.Model, loss: Any, gradients: list) -> dict:
    norm = tf.linalg.global_norm(gradients)
    apply(model, loss, gradients)
    return {"norm": norm}


def _logs_norm_after(model: keras.Model, loss: Any, gradients: list) -> dict:
    apply(model, loss, gradients)
    return {"norm": tf.linalg.global_norm(gradients)}


def _never_applies(model: keras.Model, loss: Any, gradients: list) -> dict:
    return {"norm": tf.linalg.global_norm(gradients)}


def _returns(model: keras.Model, loss: Any, gradients: list) -> dict:
    return {"first": gradients[0]}


def _reads_in_branch(model: keras.Model, loss: Any, gradients: list) -> dict:
    def norm() -> Any:
        apply(model, loss, gradients)
        return tf.linalg.global_norm(gradients)

    return {"norm": tf.cond(tf.equal(model.optimizer.iterations % 2, 0), norm, lambda: 0.0)}


def _reads_in_other_branch(model: keras.Model, loss: Any, gradients: list) -> dict:
    def update() -> Any:
        apply(model, loss, gradients)
        return tf.constant(0.0)

    return {
        "norm": tf.cond(tf.equal(model.optimizer.iterations % 2, 0), update, lambda: tf.linalg.global_norm(gradients))
    }


def _accumulates(model: keras.Model, loss: Any, gradients: list) -> None:
    for total, gradient in zip(model.sums, gradients, strict=False):
        total.assign_add(gradient)


def _accumulates_in_variables_of_tensorflow(model: keras.Model, loss: Any, gradients: list) -> None:
    for total, gradient in zip(model.variables_of_tensorflow, gradients, strict=False):
        total.assign_add(gradient)


def _applies_variables(model: keras.Model, loss: Any, gradients: list) -> None:
    apply(model, loss, [*model.variables_of_tensorflow, *gradients[2:]])


@pytest.mark.parametrize(
    ("of_gradients", "words"),
    daily(
        [
            pytest.param(step, words, id=step.__name__)
            for words, steps in {
                "has changed": (_clips, _applies_variables),
                "reads a gradient": (
                    *(
                        _logs_norm_before,
                        _logs_norm_after,
                        _never_applies,
                        _returns,
                        _reads_in_branch,
                        _reads_in_other_branch,
                    ),
                    *(_accumulates, _accumulates_in_variables_of_tensorflow),
                ),
            }.items()
            for step in steps
        ],
        *("_clips", "_logs_norm_after", "_never_applies", "_accumulates"),
    ),
)
def test_what_a_step_does_with_gradients_is_refused(
    sharded: tf.distribute.Strategy, of_gradients: Callable, words: str
) -> None:
    """It would do it with a part of each."""
    model = in_scope(sharded, lambda: with_step(of_gradients))
    with pytest.raises(NotImplementedError, match=words):
        model.fit(*DATA, verbose=0)


def _applies_twice(model: keras.Model, loss: Any, gradients: list) -> None:
    apply(model, loss, gradients)
    model.second.apply(gradients, model.trainable_variables)


def _leaves_out(model: keras.Model, loss: Any, gradients: list) -> dict:
    """Leaves out batches of a large loss: those of a replica's rows may not be."""

    def update() -> float:
        _applies_twice(model, loss, gradients)
        return 1.0

    return {"applied": tf.cond(loss < 1.2, update, lambda: 0.0)}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "of_gradients",
    daily([pytest.param(step, id=step.__name__) for step in (_applies_twice, _leaves_out)], "_leaves_out"),
)
def test_steps_of_their_own_equal_one_process(sharded: tf.distribute.Strategy, of_gradients: Callable) -> None:
    assert assert_transparent(sharded, lambda: with_step(of_gradients), DATA, batch_size=16, epochs=1)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in branching_steps.KINDS if name != "Accumulates"])
def test_branches_of_steps_equal_one_process(sharded: tf.distribute.Strategy, name: str) -> None:
    expected = branching_steps.train(tf.distribute.get_strategy(), name)
    np.testing.assert_allclose(branching_steps.train(sharded, name), expected, atol=2e-6)


@pytest.mark.nightly
@pytest.mark.usefixtures("in_float64")
def test_lora_equals_one_process(sharded: tf.distribute.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its two kernels are float32 in Keras, whose rounding differs with the order of a sum: not here."""
    add_weight = keras.layers.Dense.add_weight

    def add_float64(self: keras.layers.Dense, **arguments: Any) -> Any:
        return add_weight(self, **{**arguments, "dtype": "float64"})

    def make() -> keras.Model:
        model = deep()
        for layer in model.layers[1:4]:
            layer.enable_lora(2)
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    monkeypatch.setattr(keras.layers.Dense, "add_weight", add_float64)
    assert assert_transparent(sharded, make, DATA, batch_size=16, tolerance=1e-12)


class Penalized(keras.Model):
    """Adds the norm of the gradient of its inputs, as a WGAN-GP does: weights get gradients of gradients."""

    def train_step(self, data: tuple) -> dict:
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(data[0])
                outputs = self(data[0], training=True)
            norms = tf.norm(inner.gradient(outputs, data[0]), axis=1)
            loss = self.compute_loss(None, data[1], outputs) + tf.reduce_mean((norms - 1.0) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@pytest.mark.nightly
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("changes", [{}, {"memory": "recompute"}], ids=["gathered twice", "run again"])
def test_gradients_of_gradients_equal_one_process(four_devices: list[str], changes: dict) -> None:
    def make() -> keras.Model:
        inputs = x = keras.Input((5,))
        for _ in range(4):
            x = keras.layers.Dense(32, "tanh")(x)
        model = Penalized(inputs, keras.layers.Dense(2)(x))
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    strategy = tfdist.FullyShardedStrategy(**changes)
    assert assert_transparent(strategy, make, DATA, batch_size=16, tolerance=1e-12)


class Skipping(keras.layers.Layer):
    """A layer in which the number of ways through it doubles and doubles again."""

    def build(self, shape: tuple) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]))

    def call(self, x: Any) -> Any:
        for _ in range(40):
            x = x + tf.tanh(x @ self.kernel)
        return x


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_layer_with_many_skips_is_traced(sharded: tf.distribute.Strategy) -> None:
    with sharded.scope():
        layers = [keras.layers.Dense(32), Skipping(), keras.layers.Dense(32), Skipping(), keras.layers.Dense(2)]
        model = keras.Sequential([keras.Input((5,)), *layers])
        model.compile("sgd", "mse")
    model.fit(*DATA, batch_size=16, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 3


class Scanned(keras.layers.Layer):
    """Reads its weight in a loop."""

    def build(self, shape: tuple) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]))

    def call(self, x: Any) -> Any:
        steps = keras.ops.transpose(x, (1, 0, 2))
        step = lambda state, one: (keras.ops.tanh(state + one @ self.kernel),) * 2  # noqa: E731
        return keras.ops.scan(step, keras.ops.zeros_like(steps[0]), steps)[0]


class Branching(keras.layers.Layer):
    """Reads its weight in a branch, which some replicas need not take."""

    def build(self, shape: tuple) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 4))

    def call(self, x: Any) -> Any:
        x = tf.nn.relu(x)
        return tf.cond(tf.reduce_any(x > 0), lambda: x @ self.kernel, lambda: tf.zeros_like(x)[..., :4])


SEQUENCES = np.random.default_rng(3).normal(size=(42, 6, 5)).astype("float32")
# A third of each batch: the last replicas take another branch of `Branching` than the first ones.
HALF_NEGATIVE = np.where(np.arange(42)[:, np.newaxis, np.newaxis] % 16 < 5, SEQUENCES, -np.abs(SEQUENCES))
TEXTS = np.where(np.arange(6) < np.random.default_rng(4).integers(2, 7, (42, 1)), 1 + np.abs(SEQUENCES[..., 0] * 3), 0)


@pytest.mark.parametrize(
    ("layers", "x"),
    daily(
        [
            pytest.param(lambda: [keras.layers.LSTM(4)], SEQUENCES, id="LSTM"),
            pytest.param(lambda: [Scanned()], SEQUENCES, id="scan"),
            pytest.param(lambda: [Branching(), keras.layers.Flatten()], HALF_NEGATIVE, id="branch"),
            pytest.param(
                lambda: [
                    keras.layers.Embedding(20, 5, mask_zero=True),
                    keras.layers.Bidirectional(keras.layers.LSTM(4, return_sequences=True)),
                    keras.layers.GRU(3),
                ],
                TEXTS.astype("int32"),
                id="mask, both ways",
            ),
        ],
        "branch",
    ),
)
def test_weights_that_loops_and_branches_read(sharded: tf.distribute.Strategy, layers: Callable, x: Any) -> None:
    """Where replicas exchanged something in a loop, `predict` waited for ever, and gradients were of other steps."""
    y, seen = DATA[1], []
    for scope in (contextlib.nullcontext(), sharded.scope()):
        keras.utils.set_random_seed(5)
        with scope:
            model = keras.Sequential([keras.Input(x.shape[1:], dtype=x.dtype), *layers(), keras.layers.Dense(2)])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        before = [model.predict(x, batch_size=16, verbose=0), model.evaluate(x, y, batch_size=16, verbose=0)]
        history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history["loss"]
        seen.append([*before, history, *model.get_weights()])
    for one, other in zip(*seen, strict=True):
        np.testing.assert_allclose(one, other, atol=3e-6)


def _apply_in_branch(model: keras.Model, loss: Any, gradients: list) -> None:
    def update() -> Any:
        apply(model, loss, gradients)
        return 0.0

    tf.cond(loss < 100.0, update, lambda: 0.0)


def constrained(how: str) -> keras.Model:
    dense = functools.partial(keras.layers.Dense, kernel_constraint=keras.constraints.UnitNorm())
    model = (OfStep if how == "branch" else keras.Sequential)([keras.Input((5,)), dense(16, "tanh"), dense(2)])
    model.of_gradients, optimizer = _apply_in_branch, keras.optimizers.SGD(0.1)
    if how == "loss scale":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0)
    model.compile(optimizer, "mse")
    return model


@pytest.mark.parametrize("how", daily(["loss scale", "branch"], "loss scale"))
def test_constraints_are_of_weights_that_a_branch_has_updated(sharded: tf.distribute.Strategy, how: str) -> None:
    """Where weights were read outside of the branch, they became what they were before the update, for good."""
    assert assert_transparent(sharded, lambda: constrained(how), DATA, batch_size=16)


def _moves_weights(model: keras.Model, loss: Any, gradients: list) -> None:
    """Part of the way to what the batch has, as a codebook is."""
    apply(model, loss, gradients)
    weight = model.trainable_variables[-2]
    weight.assign(0.9 * weight + 0.1 * model.seen)
    weight.assign_add(tf.ones_like(weight) * 0.01 * loss)


def with_moved_weights() -> keras.Model:
    class Seeing(OfStep):
        def call(self, x: Any, training: bool | None = None) -> Any:
            self.seen = tf.reduce_mean(x)
            return super().call(x, training=training)

    model = Seeing([keras.Input((5,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(2)])
    model.of_gradients = _moves_weights
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@pytest.mark.nightly
def test_weights_that_a_step_assigns_from_its_rows(sharded: tf.distribute.Strategy) -> None:
    """Each replica had put its part of what its own rows say into the weight."""
    assert assert_transparent(sharded, with_moved_weights, DATA, batch_size=16)


@pytest.mark.nightly
def test_averages_are_swapped(sharded: tf.distribute.Strategy) -> None:
    found = []
    for scope in (contextlib.nullcontext(), sharded.scope()):
        keras.utils.set_random_seed(5)
        with scope:
            model = deep(lambda: keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.8))
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        history = model.fit(
            *DATA, batch_size=16, epochs=3, shuffle=False, verbose=0, validation_data=DATA, callbacks=[swap]
        ).history
        found.append([history["loss"], history["val_loss"], *model.get_weights()])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


@pytest.mark.nightly
def test_a_model_around_one_that_was_trained_has_blocks(sharded: tf.distribute.Strategy) -> None:
    """An encoder is trained, then a model that consists of it and more layers."""
    with sharded.scope():
        inner = deep(width=16)
        outer = keras.Sequential([keras.Input((5,)), inner, keras.layers.Dense(2)])
        outer.compile("sgd", "mse")
    for model in (inner, outer, inner):
        model.fit(*DATA, batch_size=16, verbose=0)
    assert all("call" in vars(model) for model in (inner, outer))


@pytest.mark.parametrize("how", ["around run", "without run", "without a graph", "in the scope"])
def test_a_loop_of_ones_own_is_refused(sharded: tf.distribute.Strategy, how: str) -> None:
    with sharded.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.ones([2, 5])))
        return tape.gradient(loss, model.trainable_variables)

    train = step if how == "without a graph" else tf.function((lambda: sharded.run(step)) if "around" in how else step)
    refused = pytest.raises(NotImplementedError, match="Received: a training loop of your own, or gradients of weights")
    with refused, sharded.scope() if how == "in the scope" else contextlib.nullcontext():
        train()


@pytest.mark.nightly
@pytest.mark.usefixtures("four_devices")
def test_gradients_are_rounded_for_their_sums() -> None:
    """Weights and the rest of the step are not: gradients of float32 are as far from those as one of 16 bits can be."""

    def moved(compression: str | None) -> np.ndarray:
        keras.utils.set_random_seed(3)
        model = in_scope(
            tfdist.FullyShardedStrategy(compression=compression), lambda: deep(lambda: keras.optimizers.SGD(0.1))
        )
        before = model.get_weights()
        model.fit(*DATA, batch_size=42, shuffle=False, verbose=0)
        return np.concatenate([(one - w).reshape(-1) for one, w in zip(model.get_weights(), before, strict=True)])

    exact = moved(None)
    for compression, precision in [("bf16", 2.0**-8), ("fp16", 2.0**-11)]:
        gap = np.max(np.abs(moved(compression) - exact)) / np.max(np.abs(exact))
        assert precision / 20 < gap < 4 * precision, compression


@pytest.mark.parametrize("compression", [tfdist.compression.PowerSGD(rank=2), tfdist.compression.TopK(0.01), "int8"])
def test_methods_that_need_whole_gradients_are_refused(compression: Any) -> None:
    with pytest.raises(ValueError, match=r"where no replica has whole.*Expected: None, 'bf16' or 'fp16'\."):
        tfdist.FullyShardedStrategy(compression=compression)
