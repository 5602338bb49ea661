"""`ShardedOptimizer` trains as the optimizer inside of it, and each replica keeps its part of the slots only."""

from __future__ import annotations

import collections
import contextlib
import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

import tfdist
from tests.logical.conftest import DEVICES
from tests.models import assert_arrays, ready
from tests.tiers import daily
from tfdist.optimizers import LazyAdam, ShardedOptimizer, in_parts, sharded_optimizer
from tfdist.optimizers.flat import in_buckets
from tfdist.steps import gradients
from tfdist.steps.flat_bucket import FlatBucket
from tfdist.steps.keras_step import global_replica

optimizers = keras.optimizers
ELEMENTWISE = {
    "Adam": lambda: optimizers.Adam(0.01),
    "AdamW": lambda: optimizers.AdamW(0.01, weight_decay=0.1, amsgrad=True),
    "RMSprop": lambda: optimizers.RMSprop(0.01, momentum=0.9, centered=True),
}
# What needs numbers of all shards, and the same without it.
FEATURES = {
    "global_clipnorm": (
        lambda: optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.05),
        lambda: optimizers.SGD(0.1, momentum=0.9),
    ),
    "accumulation and all that": (
        lambda: optimizers.AdamW(
            0.01, gradient_accumulation_steps=3, clipvalue=0.01, use_ema=True, ema_overwrite_frequency=2
        ),
        lambda: optimizers.AdamW(0.01),
    ),
}
X = np.random.default_rng(1).normal(size=(48, 12)).astype("float32")
Y = (X[:, :3] ** 2).astype("float32")


def network():
    """Variables of 12 * 70, 70, 70 * 40, 40, 40 * 3 and 3 elements: shards begin within them."""
    layers = keras.layers
    hidden = [layers.Dense(size, "relu", name=f"hidden_{size}") for size in (70, 40)]
    return keras.Sequential([layers.Input((12,)), *hidden, layers.Dense(3, name="out")], name="network")


def compiled(strategy, make, build=network, sharded=True, **arguments):
    with strategy.scope() if strategy else contextlib.nullcontext():
        keras.utils.set_random_seed(7)
        model = ready(build(), ShardedOptimizer(make()) if sharded else make(), "mse", **arguments)
    return model


def train(model, epochs=2, rows=48):
    """Three steps an epoch."""
    model.fit(X[:rows], Y[:rows], batch_size=16, epochs=epochs, shuffle=False, verbose=0)
    return model


def largest_gap(model, other):
    pairs = zip(model.get_weights(), other.get_weights(), strict=True)
    return max(float(np.abs(one - two).max()) for one, two in pairs)


def slots(model):
    return [np.array(variable.numpy()) for variable in model.optimizer.variables]


@pytest.fixture(scope="module")
def four_replicas(four_devices):
    return tfdist.MirroredStrategy(four_devices)


# Grappler computes x / sqrt(y) as x * rsqrt(y), and the two of Eigen's rsqrt, for one number and for several at a
# time, round differently: where the rest of a variable begins depends on where the variable does.
@pytest.mark.parametrize(
    ("replicas", "name", "tolerance"),
    [(2, "AdamW", 0), *daily([(4, "RMSprop", 1e-6)])],
)
def test_equals_the_optimizer_inside(mirrored, four_replicas, replicas, name, tolerance):
    strategy = mirrored if replicas == 2 else four_replicas
    # The last batch has fewer rows.
    models = (compiled(strategy, ELEMENTWISE[name], sharded=kind) for kind in (True, False))
    sharded, whole = (train(model, rows=40) for model in models)
    assert largest_gap(sharded, whole) <= tolerance
    assert largest_gap(sharded, compiled(strategy, ELEMENTWISE[name])) > 1e-3
    for slot, expected in zip(sharded.optimizer.variables, whole.optimizer.variables, strict=True):
        assert slot.path.split("/")[-1] == expected.path.split("/")[-1]
        np.testing.assert_allclose(slot.numpy(), np.array(expected.numpy()), rtol=0, atol=tolerance)


@pytest.mark.nightly
@pytest.mark.parametrize("name", FEATURES)
def test_features_of_keras_optimizers(mirrored, name):
    make, without = FEATURES[name]
    sharded, whole = (train(compiled(mirrored, make, sharded=kind)) for kind in (True, False))
    assert largest_gap(sharded, whole) < 1e-6
    assert largest_gap(sharded, train(compiled(mirrored, without, sharded=False))) > 1e-4


def test_gradients_travel_in_buckets(mirrored, monkeypatch):
    """Each replica has rows of all of them, and adds up no more than these."""
    whole = train(compiled(mirrored, ELEMENTWISE["AdamW"], sharded=False))
    strategy, sizes = tfdist.MirroredStrategy(DEVICES, bucket_bytes=4000), []
    original = gradients.reduce_scatter

    def reduce_scatter(matrices):
        rows = original(matrices)
        sizes.extend((matrix.shape[0], part.shape[0]) for matrix, part in zip(matrices, rows, strict=True))
        return rows

    monkeypatch.setattr(gradients, "reduce_scatter", reduce_scatter)
    monkeypatch.setattr(gradients, "all_reduce", None)  # nothing else is added up
    assert largest_gap(train(compiled(strategy, ELEMENTWISE["AdamW"])), whole) < 1e-6
    # From the last variable on: "out" and the bias before it, a large matrix, and the others; rows of 16 numbers.
    assert list(dict.fromkeys(sizes)) == [(12, 6), (176, 88), (58, 29)]


def test_what_is_not_finite_on_one_replica_is_skipped_by_all(mirrored):
    """The last variable's gradient is in the shard of the last replica, while loss scaling asks the first one."""

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = network()
            self.bad = keras.Variable(0.0, trainable=False)

        def train_step(self, data):
            grads = [tf.ones(v.shape) for v in self.trainable_variables]
            grads[-1] *= tf.where(self.bad > 0, np.inf, 1.0)
            self.optimizer.apply(grads)
            return {}

    with mirrored.scope():
        model = Own()
        model.build((None, 12))
        optimizer = optimizers.LossScaleOptimizer(ShardedOptimizer(optimizers.SGD(0.1)), initial_scale=8.0)
        model.compile(optimizer, jit_compile=False)
    for bad, changes in [(0.0, True), (1.0, False)]:
        model.bad.assign(bad)
        before = model.layer.get_weights()
        model.train_on_batch(X[:4], Y[:4])
        assert np.array_equal(before[0], model.layer.get_weights()[0]) != changes
        assert np.isfinite(model.layer.get_weights()[-1]).all()
    assert float(np.asarray(optimizer.dynamic_scale)) == 4.0


@pytest.mark.nightly
@pytest.mark.parametrize("bucket_bytes", ["auto", 1])
def test_embeddings_are_summed_by_row(four_devices, bucket_bytes):
    """In a bucket with other gradients, and in one of its own."""
    mirrored = tfdist.MirroredStrategy(four_devices[:2], bucket_bytes=bucket_bytes)
    ids = np.random.default_rng(2).integers(0, 5, (48, 6))

    def after(make, sharded=True):
        def build():
            layers = [keras.layers.Embedding(11, 3), keras.layers.Flatten(), keras.layers.Dense(3)]
            return keras.Sequential([keras.layers.Input((6,), dtype="int32"), *layers])

        model = compiled(mirrored, make, build, sharded)
        model.fit(ids, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)
        return model

    class Dense(optimizers.Adam):
        def update_step(self, gradient, variable, learning_rate):
            super().update_step(tf.convert_to_tensor(gradient), variable, learning_rate)

    sharded, adam = after(ELEMENTWISE["Adam"]), ELEMENTWISE["Adam"]
    assert largest_gap(sharded, after(lambda: Dense(0.01), False)) < 1e-6
    assert largest_gap(sharded, after(adam, False)) > 1e-4


@pytest.mark.nightly
def test_own_training_loop(mirrored):
    def after(sharded):
        with mirrored.scope():
            keras.utils.set_random_seed(7)
            model, optimizer = network(), ELEMENTWISE["Adam"]()
            optimizer = ShardedOptimizer(optimizer) if sharded else optimizer
            optimizer.build(model.trainable_variables)

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x) - y)) / 2
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        @tf.function
        def steps(x, y):
            mirrored.run(step.python_function, (x, y))

        for _ in range(3):
            steps(X, Y)
        return model

    assert largest_gap(after(True), after(False)) < 1e-6


@pytest.fixture
def made(monkeypatch):
    """References to all TensorFlow variables that are made."""
    original, found = ResourceVariable.__init__, []

    def noted(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if type(self) is ResourceVariable:
            found.append(weakref.ref(self))

    monkeypatch.setattr(ResourceVariable, "__init__", noted)
    return found


@pytest.mark.nightly
def test_bytes_on_each_device(four_replicas, made):
    added = []
    for sharded in (True, False):
        model = compiled(four_replicas, FEATURES["accumulation and all that"][0], sharded=sharded)
        made.clear()
        with four_replicas.scope():
            model.optimizer.build(model.trainable_variables)
        gc.collect()
        sizes = collections.Counter()
        # Truth would be asked of their values.
        for variable in (v for v in (reference() for reference in made) if v is not None):
            sizes[variable.device] += variable.shape.num_elements() * variable.dtype.size
        added.append([sizes[device] for device in four_replicas.extended.worker_devices])
    sharded, whole = added
    # Two moments, the sum of gradients and the average, of four bytes each.
    assert whole == [4 * 4 * sum(weight.size for weight in model.get_weights())] * 4
    assert len(set(sharded)) == 1
    assert 1 / 4 < sharded[0] / whole[0] < 1.05 / 4


@pytest.mark.parametrize(
    ("place", "name", "wrong"),
    [
        (sharded_optimizer, "all_gather", lambda shards: [tf.concat([s, s], 0) for s in shards]),
        (
            sharded_optimizer,
            "own_rows_of_sums",
            lambda given, *_: [2 * tf.split(x, 2)[global_replica()] for x in given],
        ),
        (in_parts, "all_reduce", lambda squares, **_: squares),
    ],
)
def test_negative_control_with_the_shards_of_others_left_out(mirrored, monkeypatch, place, name, wrong):
    make = FEATURES["global_clipnorm"][0]
    whole = train(compiled(mirrored, make, sharded=False))
    monkeypatch.setattr(place, name, wrong)
    assert largest_gap(train(compiled(mirrored, make)), whole) > 1e-4


@pytest.mark.nightly
def test_saved_on_two_replicas_loaded_on_four_and_one(tmp_path, mirrored, four_replicas):
    saved = train(compiled(mirrored, ELEMENTWISE["AdamW"]), 1)
    saved.save(tmp_path / "model.keras")
    before = slots(saved)
    train(saved)
    for target in (four_replicas, None):
        with target.scope() if target else contextlib.nullcontext():
            loaded = keras.models.load_model(tmp_path / "model.keras")
        assert type(loaded.optimizer) is ShardedOptimizer
        assert_arrays(slots(loaded), before)
        assert largest_gap(train(loaded), saved) < 1e-5


def test_config(mirrored):
    with mirrored.scope():
        optimizer = ShardedOptimizer(optimizers.AdamW(0.05, beta_1=0.8, clipnorm=1.0), name="split")
        copy = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))
        assert type(copy) is ShardedOptimizer
        assert type(copy.inner_optimizer) is optimizers.AdamW
        assert copy.get_config() == optimizer.get_config()
        assert copy.name == "split"
        assert ShardedOptimizer("adam").inner_optimizer.beta_1 == 0.9


class Own(keras.optimizers.Adam):
    pass


@pytest.mark.parametrize(
    "make, message",
    [
        *(
            (make, r"sees only a shard of each variable. Expected: one of SGD, RMSprop, .*each element by itself")
            for make in (
                *(optimizers.Muon, optimizers.Adafactor, optimizers.Lamb, optimizers.Nadam, LazyAdam, Own),
                lambda: ShardedOptimizer("adam"),
                lambda: optimizers.LossScaleOptimizer(optimizers.Adam()),
            )
        ),
        (lambda: optimizers.Adam(gradient_accumulation_steps=2, clipnorm=1.0), "clipnorm=1.0.*Expected: clipvalue"),
        (
            lambda: optimizers.Adam(gradient_accumulation_steps=2, global_clipnorm=1.0),
            "global_clipnorm=1.0.*Expected: clipvalue",
        ),
    ],
)
def test_refused(make, message):
    with pytest.raises(ValueError, match=f"Received: .*{message}"):
        ShardedOptimizer(make())


def test_weights_and_state_are_those_of_the_optimizer_inside(mirrored):
    """`set_weights`, and the tree of a model's state, which Keras' callbacks and tools read and write."""
    source = train(compiled(mirrored, ELEMENTWISE["Adam"]), 1)
    before = slots(source)
    for how in ("weights", "tree"):
        target = compiled(mirrored, ELEMENTWISE["Adam"])
        target.optimizer.build(target.trainable_variables)
        if how == "weights":
            target.optimizer.set_weights(before)
        else:
            own = source.get_state_tree()["optimizer_variables"]
            target.set_state_tree({"optimizer_variables": {target.optimizer.name: next(iter(own.values()))}})
        assert_arrays(slots(target), before)
        assert before[0] == 3 and np.abs(before[2]).max() > 0
    with pytest.raises(
        ValueError, match=r"Received: 1 weights for optimizer 'adam.*' \(built\). Expected: one for each"
    ):
        target.optimizer.set_weights(before[:1])


@pytest.mark.parametrize(("built", "accumulated"), [(False, None), (True, None), *daily([(True, 2)])])
def test_variables_are_excluded_from_weight_decay(mirrored, built, accumulated):
    """Also by the name of their layer, and after `load_model`, which builds the optimizer; no file says which."""

    def weights(sharded, excluded=("bias", "hidden_40")):
        def make():
            return optimizers.AdamW(0.01, weight_decay=5.0, gradient_accumulation_steps=accumulated)

        model = compiled(mirrored, make, sharded=sharded)
        # Biases of 0 would not decay.
        model.set_weights([np.ones_like(weight) for weight in model.get_weights()])
        if built:
            with mirrored.scope():
                model.optimizer.build(model.trainable_variables)
        model.optimizer.exclude_from_weight_decay(var_names=list(excluded))
        return train(model)

    whole = weights(False)
    assert largest_gap(weights(True), whole) < 1e-6
    for fewer in (["bias"], ["hidden_40"]):
        assert largest_gap(weights(False, fewer), whole) > 1e-2


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "loss scale"])
def test_swapped_averages_are_refused(mirrored, scaled):
    def make():
        optimizer = ShardedOptimizer(optimizers.SGD(0.1, use_ema=True))
        return optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer

    with mirrored.scope():
        model = ready(network(), make(), "mse")
    with pytest.raises(ValueError, match=r"SwapEMAWeights with a ShardedOptimizer\(use_ema=True\).*Expected: no Swap"):
        model.fit(X, Y, batch_size=16, verbose=0, validation_data=(X, Y), callbacks=[keras.callbacks.SwapEMAWeights()])


def test_refused_uses(mirrored):
    built = optimizers.Adam()
    built.build([keras.Variable([1.0])])
    with pytest.raises(ValueError, match=r"has been built already.*Expected: a new optimizer"):
        ShardedOptimizer(built)
    refused = pytest.raises(ValueError, match=r"in the scope of a MirroredStrategy.*Expected: no scope, or that of")
    with tf.distribute.MirroredStrategy(DEVICES).scope(), refused:
        ShardedOptimizer("adam")
    with pytest.raises(ValueError, match=r"of dtype int32.*Expected: floating variables"):
        ShardedOptimizer("adam").build([keras.Variable([1], dtype="int32")])
    model = compiled(mirrored, ELEMENTWISE["Adam"])
    with pytest.raises(ValueError, match=r"built by its first step.*Expected: `optimizer.build"):
        mirrored.run(lambda: model.optimizer.apply([tf.ones(v.shape) for v in model.weights], model.weights))
    model.optimizer.build(model.trainable_variables)
    with pytest.raises(ValueError, match=r"a value of shape \(3,\) for 'adam.*_momentum'. Expected: \(12, 70\)"):
        model.optimizer.variables[2].assign(np.zeros(3))


def test_buckets():
    variables = [keras.Variable(np.zeros(shape, "float32")) for shape in ((3, 5), (), (40,), (2, 2))]
    ((bucket, indices),) = in_buckets(variables, 3, lambda v: None)
    assert (indices, bucket.begins, bucket.shard_rows) == ([0, 1, 2, 3], (0, 1, 2, 5, 6), 2)
    assert [bucket.within(shard) for shard in range(3)] == [[(0, 0, 1), (1, 1, 2)], [(2, 0, 2)], [(2, 0, 1), (3, 1, 2)]]
    values = [tf.random.normal(shape) for shape in bucket.shapes]
    whole = tf.concat([bucket.cut(shard, values.__getitem__) for shard in range(3)], 0)
    assert_arrays(values, bucket.values(whole))
    assert_arrays(tf.split(bucket.whole(values.__getitem__), 3), [bucket.cut(i, values.__getitem__) for i in range(3)])
    parts = bucket.split(2, bucket.cut(2, values.__getitem__))
    assert [part.shape[0] for part in parts] == [0, 0, 1, 1]
    assert_arrays([bucket.join(2, {2: parts[2]})], [tf.concat([parts[2], tf.zeros([1, 16])], 0)])
    more = FlatBucket(tf.float32, (tf.TensorShape([5]),), 4)
    assert [more.cut(shard, lambda _: tf.ones(5)).numpy().sum() for shard in range(4)] == [5, 0, 0, 0]
