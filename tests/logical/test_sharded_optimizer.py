"""`ShardedOptimizer` trains as the optimizer inside of it, and each replica keeps its part of the slots only."""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import warnings
import weakref

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

import tfdist
from tests.logical.conftest import DEVICES
from tfdist.optimizers import LazyAdam, ShardedOptimizer, sharded_optimizer
from tfdist.optimizers.flat_bucket import FlatBucket, in_buckets

optimizers = keras.optimizers
ELEMENTWISE = {
    "Adam": lambda: optimizers.Adam(0.01),
    "AdamW": lambda: optimizers.AdamW(0.01, weight_decay=0.1, amsgrad=True),
    "SGD": lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "SGD without slots": lambda: optimizers.SGD(0.05),
    "RMSprop": lambda: optimizers.RMSprop(0.01, momentum=0.9, centered=True),
    "Adagrad": lambda: optimizers.Adagrad(0.1),
    "Adadelta": lambda: optimizers.Adadelta(1.0),
    "Adamax": lambda: optimizers.Adamax(0.01),
    "Lion": lambda: optimizers.Lion(0.001),
    "Ftrl": lambda: optimizers.Ftrl(0.1, l1_regularization_strength=0.001),
}
FEATURES = {
    "schedule": lambda: optimizers.Adam(optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)),
    "weight decay": lambda: optimizers.Adam(0.01, weight_decay=0.5),
    "clipnorm": lambda: optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05),
    "global_clipnorm": lambda: optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.05),
    "clipvalue": lambda: optimizers.SGD(0.1, momentum=0.9, clipvalue=0.01),
    "EMA": lambda: optimizers.Adam(0.01, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3),
    "EMA at the end": lambda: optimizers.Adam(0.01, use_ema=True, ema_momentum=0.8),
    "accumulation": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "accumulation and all that": lambda: optimizers.AdamW(
        0.01, gradient_accumulation_steps=3, clipvalue=0.01, use_ema=True, ema_overwrite_frequency=2
    ),
    "loss_scale_factor": lambda: optimizers.Adam(0.01, loss_scale_factor=64.0),
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
        model = build()
        model.compile(ShardedOptimizer(make()) if sharded else make(), "mse", **arguments)
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


@pytest.fixture
def strategies(mirrored, four_replicas):
    return {1: None, 2: mirrored, 4: four_replicas}


# Grappler computes x / sqrt(y) as x * rsqrt(y), and the two of Eigen's rsqrt, for one number and for several at a
# time, round differently: where the rest of a variable begins depends on where the variable does.
@pytest.mark.parametrize(
    ("replicas", "name", "tolerance"),
    [
        pytest.param(1, "SGD", 0, marks=pytest.mark.exhaustive),
        (2, "AdamW", 0),
        pytest.param(4, "RMSprop", 1e-6, marks=pytest.mark.exhaustive),
        *(
            pytest.param(2, name, 1e-6 if name in ("Adagrad", "Adadelta") else 0, marks=pytest.mark.exhaustive)
            for name in ELEMENTWISE
            if name not in ("SGD", "AdamW", "RMSprop")
        ),
    ],
)
def test_equals_the_optimizer_inside(strategies, replicas, name, tolerance):
    strategy = strategies[replicas]
    # The last batch has fewer rows.
    models = (compiled(strategy, ELEMENTWISE[name], sharded=kind) for kind in (True, False))
    sharded, whole = (train(model, rows=40) for model in models)
    assert largest_gap(sharded, whole) <= tolerance
    assert largest_gap(sharded, compiled(strategy, ELEMENTWISE[name])) > 1e-3
    for slot, expected in zip(sharded.optimizer.variables, whole.optimizer.variables, strict=True):
        assert slot.path.split("/")[-1] == expected.path.split("/")[-1]
        np.testing.assert_allclose(slot.numpy(), np.array(expected.numpy()), rtol=0, atol=tolerance)


@functools.cache
def plain_weights(strategy, kind, rate):
    return train(compiled(strategy, lambda: kind(rate), sharded=False)).get_weights()


# What needs numbers of all shards, and the rest at once.
DAILY = ("global_clipnorm", "accumulation and all that")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DAILY else pytest.mark.exhaustive) for name in FEATURES]
)
def test_features_of_keras_optimizers(mirrored, name):
    sharded, whole = (train(compiled(mirrored, FEATURES[name], sharded=kind)) for kind in (True, False))
    assert largest_gap(sharded, whole) < 1e-6
    inside = sharded.optimizer.inner_optimizer
    plain = plain_weights(mirrored, type(inside), 0.1 if isinstance(inside, optimizers.SGD) else 0.01)
    changes_nothing = name == "loss_scale_factor"
    gap = max(float(np.abs(a - b).max()) for a, b in zip(sharded.get_weights(), plain, strict=True))
    assert gap < 1e-6 if changes_nothing else gap > 1e-4


@pytest.mark.parametrize("replicas", [2, 1])
@pytest.mark.exhaustive
def test_loss_scaling(strategies, replicas):
    def scaled(wrap):
        # Too large a scale: the first steps overflow, and are left out.
        optimizer = optimizers.LossScaleOptimizer(wrap(optimizers.Adam(0.01)), initial_scale=2.0**127)
        model.compile(optimizer, "mse", loss_weights=[32.0])
        return train(model, 4)

    models = []
    for wrap in (ShardedOptimizer, lambda inner: inner):
        model = compiled(strategies[replicas], ELEMENTWISE["Adam"])
        with strategies[replicas].scope() if replicas > 1 else contextlib.nullcontext():
            models.append(scaled(wrap))
    sharded, whole = models
    assert largest_gap(sharded, whole) < 1e-6
    steps = int(sharded.optimizer.iterations.numpy())
    assert steps == int(whole.optimizer.iterations.numpy())
    assert 0 < steps < 12


def test_mixed_precision(mirrored):
    def build():
        return keras.Sequential([keras.layers.Input((12,)), keras.layers.Dense(30, dtype="bfloat16"), *_head()])

    def _head():
        return [keras.layers.Dense(3, dtype="float32")]

    sharded, whole = (train(compiled(mirrored, ELEMENTWISE["Adam"], build, kind)) for kind in (True, False))
    assert [bucket.dtype for bucket, _ in sharded.optimizer._buckets] == [tf.bfloat16, tf.float32]
    assert largest_gap(sharded, whole) == 0


@pytest.mark.exhaustive
def test_excluded_from_weight_decay(mirrored):
    def make(exclude=True):
        optimizer = optimizers.Adam(0.01, weight_decay=0.5)
        if exclude:
            optimizer.exclude_from_weight_decay(var_names=["bias"])
        return optimizer

    sharded, whole = (train(compiled(mirrored, make, sharded=kind)) for kind in (True, False))
    assert len(sharded.optimizer._buckets) == 2
    assert largest_gap(sharded, whole) == 0
    assert largest_gap(sharded, train(compiled(mirrored, lambda: make(False)))) > 1e-4


@pytest.mark.exhaustive
def test_variables_without_gradients(mirrored):
    class Unused(keras.layers.Layer):
        def build(self, shape):
            self.used, self.unused = (self.add_weight(shape=(12, 9), initializer="ones", name=n) for n in "ab")

        def call(self, x):
            return x @ self.used

    def build():
        return keras.Sequential([keras.layers.Input((12,)), Unused(), keras.layers.Dense(3)])

    def make():
        return optimizers.AdamW(0.01, weight_decay=0.5)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Gradients do not exist")
        sharded, whole = (train(compiled(mirrored, make, build, kind)) for kind in (True, False))
    assert largest_gap(sharded, whole) == 0
    for found, expected in zip(slots(sharded), slots(whole), strict=True):
        np.testing.assert_array_equal(found, expected)
    (unused,) = (w for w in sharded.layers[0].weights if w.name == "b")
    np.testing.assert_array_equal(unused.numpy(), 1)


def test_embeddings_are_summed_by_row(mirrored):
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


def test_learning_rate_and_counter(mirrored):
    model = compiled(mirrored, ELEMENTWISE["Adam"])
    callbacks = [keras.callbacks.LearningRateScheduler(lambda epoch: 0.02 if epoch else 0.0)]
    before = model.get_weights()
    history = model.fit(X, Y, batch_size=16, epochs=1, verbose=0, callbacks=callbacks).history
    assert [float(rate) for rate in history["learning_rate"]] == [0.0]
    assert max(np.abs(a - b).max() for a, b in zip(before, model.get_weights(), strict=True)) == 0
    model.optimizer.learning_rate = 0.5
    assert float(model.optimizer.inner_optimizer.learning_rate.numpy()) == 0.5
    train(model)
    assert int(model.optimizer.iterations.numpy()) == int(model.optimizer.inner_optimizer.iterations.numpy()) == 9
    assert largest_gap(model, compiled(mirrored, ELEMENTWISE["Adam"])) > 0.1


@pytest.mark.exhaustive
def test_run_eagerly(mirrored):
    eager = train(compiled(mirrored, ELEMENTWISE["Adam"], run_eagerly=True))
    assert largest_gap(eager, train(compiled(mirrored, ELEMENTWISE["Adam"], sharded=False))) < 1e-6


@pytest.mark.exhaustive
def test_constraints_and_steps_per_execution(mirrored):
    def build():
        layer = keras.layers.Dense(20, kernel_constraint=keras.constraints.MaxNorm(0.5))
        return keras.Sequential([keras.layers.Input((12,)), layer, keras.layers.Dense(3)])

    models = (compiled(mirrored, ELEMENTWISE["Adam"], build, kind, steps_per_execution=2) for kind in (True, False))
    sharded, whole = (train(model) for model in models)
    assert largest_gap(sharded, whole) < 1e-6
    assert np.linalg.norm(sharded.get_weights()[0], axis=0).max() < 0.5 + 1e-6


@pytest.mark.exhaustive
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


@pytest.mark.parametrize(
    ("replicas", "name"),
    [
        (4, "accumulation and all that"),
        pytest.param(2, "Adam", marks=pytest.mark.exhaustive),
        pytest.param(4, "SGD", marks=pytest.mark.exhaustive),
    ],
)
def test_bytes_on_each_device(mirrored, four_replicas, made, replicas, name):
    strategy = {2: mirrored, 4: four_replicas}[replicas]
    added = []
    for sharded in (True, False):
        model = compiled(strategy, {**ELEMENTWISE, **FEATURES}[name], sharded=sharded)
        made.clear()
        with strategy.scope():
            model.optimizer.build(model.trainable_variables)
        gc.collect()
        sizes = collections.Counter()
        # Truth would be asked of their values.
        for variable in (v for v in (reference() for reference in made) if v is not None):
            sizes[variable.device] += variable.shape.num_elements() * variable.dtype.size
        added.append([sizes[device] for device in strategy.extended.worker_devices])
    sharded, whole = added
    kinds = {"Adam": 2, "SGD": 1}.get(name, 4)
    assert whole == [kinds * 4 * sum(weight.size for weight in model.get_weights())] * replicas
    assert len(set(sharded)) == 1
    assert 1 / replicas < sharded[0] / whole[0] < 1.05 / replicas


@pytest.mark.exhaustive
def test_one_gather_a_bucket(mirrored):
    def operations(sharded):
        model = train(compiled(mirrored, ELEMENTWISE["Adam"], sharded=sharded), 1)

        @tf.function
        def step(x, y):
            mirrored.run(model.train_step, ((x, y),))

        graph = step.get_concrete_function(tf.zeros((16, 12)), tf.zeros((16, 3))).graph
        return collections.Counter(operation.type for operation in graph.get_operations())

    sharded, whole = operations(True), operations(False)
    assert sharded["CollectiveReduceV2"] == whole["CollectiveReduceV2"] > 0
    # On each of two devices: its shard of the weights and of the gradients, and the shards of both.
    assert sharded["ConcatV2"] - whole["ConcatV2"] == 2 * 3
    assert sharded["AssignSubVariableOp"] == 0
    assert whole["AssignSubVariableOp"] == 2 * 6


def test_negative_control_with_the_shards_of_others_left_out(mirrored, monkeypatch):
    whole = train(compiled(mirrored, ELEMENTWISE["Adam"], sharded=False))
    monkeypatch.setattr(sharded_optimizer, "all_gather", lambda shards: [tf.concat([s, s], 0) for s in shards])
    assert largest_gap(train(compiled(mirrored, ELEMENTWISE["Adam"])), whole) > 0.01


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("AdamW", "keras"),
        pytest.param("EMA", "weights.h5", marks=pytest.mark.exhaustive),
        pytest.param("accumulation", "weights.h5", marks=pytest.mark.exhaustive),
    ],
)
def test_saved_on_two_replicas_loaded_on_four_and_one(tmp_path, mirrored, four_replicas, name, format):
    make, path = {**ELEMENTWISE, **FEATURES}[name], tmp_path / f"model.{format}"
    saved = train(compiled(mirrored, make), 1)
    saved.save(path) if format == "keras" else saved.save_weights(path)
    before = slots(saved)
    train(saved)
    for target in (four_replicas, None):
        if format == "keras":
            with target.scope() if target else contextlib.nullcontext():
                loaded = keras.models.load_model(path)
        else:
            loaded = compiled(target, make)
            loaded.optimizer.build(loaded.trainable_variables)
            loaded.load_weights(path)
        assert type(loaded.optimizer) is ShardedOptimizer
        for found, expected in zip(slots(loaded), before, strict=True):
            np.testing.assert_array_equal(found, expected)
        assert largest_gap(train(loaded), saved) < 1e-5


@pytest.mark.parametrize("to_sharded", [True, False])
@pytest.mark.exhaustive
def test_files_are_those_of_the_optimizer_inside(tmp_path, mirrored, to_sharded):
    make, path = FEATURES["EMA"], tmp_path / "x.weights.h5"
    saved, loaded = (compiled(mirrored, make, sharded=kind) for kind in (not to_sharded, to_sharded))
    train(saved, 1).save_weights(path)
    with mirrored.scope():
        loaded.optimizer.build(loaded.trainable_variables)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded.load_weights(path)
    assert largest_gap(train(saved), train(loaded)) < 1e-6
    with h5py.File(path) as file:
        assert len(file["optimizer/vars"]) == 2 + 3 * 6


@pytest.mark.parametrize(("replicas", "tolerance"), [(2, 0), (4, 1e-5)])
@pytest.mark.exhaustive
def test_backup_and_restore(tmp_path, mirrored, strategies, replicas, tolerance):
    stops = False

    def stop(epoch, logs):
        if epoch == 2 and stops:
            raise InterruptedError

    def fit(strategy, folder):
        model = compiled(strategy, ELEMENTWISE["AdamW"])
        callbacks = [tfdist.callbacks.BackupAndRestore(folder), keras.callbacks.LambdaCallback(on_epoch_begin=stop)]
        model.fit(X, Y, batch_size=16, epochs=4, verbose=0, callbacks=callbacks)
        return model

    whole = fit(mirrored, tmp_path / "whole")
    stops = True
    with pytest.raises(InterruptedError):
        fit(mirrored, tmp_path / "parts")
    stops = False
    resumed = fit(strategies[replicas], tmp_path / "parts")
    assert int(resumed.optimizer.iterations.numpy()) == 12
    assert largest_gap(resumed, whole) <= tolerance


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
        (lambda: optimizers.Muon(), "Muon makes the update of a matrix orthogonal"),
        (lambda: optimizers.Adafactor(), "Adafactor factors the second moments"),
        (lambda: optimizers.Lamb(), "Lamb scales the update of a variable by norms"),
        (lambda: optimizers.Nadam(), "Nadam keeps a product over the steps"),
        (lambda: LazyAdam(), "LazyAdam updates only the rows"),
        (lambda: ShardedOptimizer("adam"), r"ShardedOptimizer.Adam.*Expected: ShardedOptimizer.Adam.*once"),
        (lambda: Own(), "Own may do so: tfdist does not know it.*Expected: one of SGD, RMSprop"),
        (lambda: optimizers.LossScaleOptimizer(optimizers.Adam()), "Expected: LossScaleOptimizer.ShardedOptimizer"),
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
    for value, found in zip(values, bucket.values(whole), strict=True):
        np.testing.assert_array_equal(found, value)
    more = FlatBucket(tf.float32, (tf.TensorShape([5]),), 4)
    assert [more.cut(shard, lambda _: tf.ones(5)).numpy().sum() for shard in range(4)] == [5, 0, 0, 0]
