"""What a strategy refuses, what it leaves alone, and that it leaves nothing behind."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.features.reference import only_fit
from tests.features.table import BATCH, mlp, rows
from tests.logical.conftest import DEVICES
from tests.models import in_scope, ready, warned
from tests.tiers import daily
from tfdist.inspection.model_state import metrics_of
from tfdist.strategies.data_parallel.replica_step import _ScaledLosses
from tfdist.testing import assert_transparent, train_and_observe


def fit(model: keras.Model, n: int = 32, **arguments: object) -> None:
    model.fit(*rows(n), batch_size=BATCH, verbose=0, **arguments)


def refusal(model: keras.Model, method: str = "fit") -> str:
    """The message with which a method is refused."""
    with pytest.raises(ValueError) as error:
        getattr(model, method)(*rows(32), batch_size=BATCH, verbose=0)
    return str(error.value)


class TwoOptimizers(keras.Model):
    """Trains two layers around a normalisation, one with and one without `scale_loss`."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = layers.Dense(8), layers.BatchNormalization(), layers.Dense(8)
        self.second_optimizer = keras.optimizers.SGD(0.05)

    def call(self, x: object, training: bool = False) -> object:
        return self.second(self.norm(self.first(x), training=training))

    def train_step(self, data: tuple) -> dict:
        x, _ = data
        pending = []
        for layer, optimizer in ((self.first, self.optimizer), (self.second, self.second_optimizer)):
            variables = layer.trainable_variables
            with tf.GradientTape() as tape:
                loss = original = keras.ops.mean(keras.ops.square(self(x, training=True) - x))
                if optimizer is self.optimizer:
                    loss = optimizer.scale_loss(loss)
            # The input of the second layer depends on the statistics, too.
            gradients = tape.gradient(loss, [*variables, self.norm.gamma])[: len(variables)]
            pending.append((optimizer, gradients, variables))
        for optimizer, gradients, variables in pending:
            optimizer.apply(gradients, variables)
        return {"gap": original}

    def test_step(self, data: tuple) -> dict:
        return {"gap": keras.ops.mean(keras.ops.square(self(data[0]) - data[0]))}


class OneMoreLoss(keras.Sequential):
    """After Keras' step, which scales its loss, the same optimizer applies the gradients of a loss that is not."""

    def train_step(self, data: tuple) -> dict:
        logs = super().train_step(data)
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(self(data[0], training=True) - 0.5))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return logs


class InTwoCalls(keras.Sequential):
    """Applies the gradients of one loss, which is scaled, in two calls."""

    def train_step(self, data: tuple) -> dict:
        with tf.GradientTape() as tape:
            loss = self.compute_loss(None, data[1], self(data[0], training=True))
            scaled = self.optimizer.scale_loss(loss)
        weights = self.trainable_variables
        gradients = tape.gradient(scaled, weights)
        for part in (slice(2), slice(2, None)):
            self.optimizer.apply(gradients[part], weights[part])
        return {"loss": loss}


class OneLossForTwo(keras.Sequential):
    """Two optimizers apply the gradients of one loss, which the first one scales, and the step logs."""

    def __init__(self, parts: list) -> None:
        super().__init__(parts)
        self.second = keras.optimizers.SGD(0.05)

    def train_step(self, data: tuple) -> dict:
        with tf.GradientTape() as tape:
            loss = self.compute_loss(None, data[1], self(data[0], training=True))
            loss = self.optimizer.scale_loss(loss)
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply(gradients[:2], weights[:2])
        self.second.apply(gradients[2:], weights[2:])
        return {"loss": loss}


class Lookahead(keras.optimizers.Optimizer):
    """A user's own, around another: every second step goes back half of the way."""

    def __init__(self, fast: keras.optimizers.Optimizer) -> None:
        super().__init__(learning_rate=0.0)
        self.fast = fast

    def build(self, variables: list) -> None:
        if not self.built:
            super().build(variables)
            self.slow = [self.add_variable_from_reference(one, "slow") for one in variables]

    def apply(self, grads: list, trainable_variables: list) -> None:
        self.build(trainable_variables)
        self.fast.apply(grads, trainable_variables)
        self._iterations.assign_add(1)
        part = 0.5 * keras.ops.cast(self._iterations % 2 == 0, "float32")
        for slow, fast in zip(self.slow, trainable_variables, strict=True):
            fast.assign(fast + part * (slow - fast))
            slow.assign(slow + 2 * part * (fast - slow))


@pytest.mark.parametrize("eagerly", daily([False, True], "False"))
def test_an_optimizer_around_another(mirrored, eagerly):
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((8,)), layers.Dense(4, "tanh"), layers.Dense(1)])
        return ready(model, Lookahead(keras.optimizers.SGD(0.1, momentum=0.9)), "mse", run_eagerly=eagerly)

    with only_fit():
        gaps = assert_transparent(mirrored, build, rows(43), batch_size=15)
    assert max(gaps.values()) < 1e-5


def applying(kind: type[keras.Sequential], eagerly: bool = False) -> object:
    def build() -> keras.Model:
        parts = [layers.Dense(6, "tanh"), layers.BatchNormalization(), layers.Dense(1)]
        model = ready(kind([keras.Input((8,)), *parts]), keras.optimizers.SGD(0.1), "mse", run_eagerly=eagerly)
        model.optimizer.build(model.trainable_variables)
        return model

    return build


def always(made: object) -> object:
    return lambda: made


def built(layer: layers.Layer) -> layers.Layer:
    layer.build((None, 16))
    return layer


# What makes the building function: its parts are made outside of the scope.
MADE_OUTSIDE = {
    "inner optimizer": (
        lambda: mlp(optimizer=functools.partial(keras.optimizers.LossScaleOptimizer, keras.optimizers.SGD(name="own"))),
        "Received: optimizer 'own'",
        "Expected: an optimizer created in this strategy's scope, `with strategy.scope(): optimizer = ...`",
    ),
    "metric": (
        lambda: mlp(metrics=[keras.metrics.MeanSquaredError(name="own")]),
        "Received: metric",
        "Expected: model, metrics and loss objects are created in this strategy's scope",
    ),
    "layer": (
        lambda: mlp(always(built(layers.Dense(16, name="outer")))),
        "outer/kernel",
        "`with strategy.scope(): ...`, around load_model, too.",
    ),
}


class TestRefusals:
    @pytest.mark.parametrize("device", ["CPU:99", "GPU:7", "a processor", 1])
    def test_devices_that_do_not_exist(self, device):
        """TensorFlow takes them, and hangs in the first step."""
        with pytest.raises(ValueError, match=r"Expected: one of /device:CPU:0, .*tfdist run -n N") as refused:
            tfdist.MirroredStrategy(["CPU:0", device])
        assert str(refused.value).startswith(f"Received: device {device!r}. ")

    def test_devices_by_other_names(self):
        strategy = tfdist.MirroredStrategy(["/cpu:0", tf.config.list_logical_devices("CPU")[1]])
        assert [name[-6:] for name in strategy.extended.worker_devices] == [":CPU:0", ":CPU:1"]

    def test_stateful_layers(self, mirrored):
        with mirrored.scope():
            model = keras.Sequential([keras.Input((8,), batch_size=4), layers.Reshape((2, 4))])
            model.add(layers.LSTM(2, stateful=True, name="memory"))
            model.compile("sgd", "mse")
        with pytest.raises(ValueError, match=r"Received: layer 'memory' with stateful=True.*Expected: stateful=False"):
            model.fit(np.ones((4, 8)), np.ones((4, 2)), batch_size=4, verbose=0)

    @pytest.mark.parametrize("method", ["fit", "evaluate"])
    @pytest.mark.parametrize("name", MADE_OUTSIDE)
    def test_made_outside(self, mirrored, name, method):
        make, *words = MADE_OUTSIDE[name]
        message = refusal(in_scope(mirrored, make()), method)
        for word in ("created outside of strategy.scope()", *words):
            assert word in message

    @pytest.mark.parametrize("method", ["fit", "evaluate"])
    def test_model_created_outside_and_compiled_in_the_scope(self, mirrored, method):
        model = keras.Sequential([keras.Input((8,)), layers.Dense(1)], name="outer")
        with mirrored.scope():
            model.compile(keras.optimizers.SGD(name="inner"), "mse")
        assert refusal(model, method) == (
            "Received: model 'outer', created outside of strategy.scope(), with optimizer 'inner', created in the "
            "scope of a MirroredStrategy. Expected: the model is created and compiled in one scope, "
            "`with strategy.scope(): model = ...; model.compile(...)`."
        )

    def test_float8(self, mirrored):
        with mirrored.scope():
            model = mlp(lambda: layers.Dense(16))()
            model.layers[1].quantize("float8")
        with pytest.raises(NotImplementedError) as error:
            fit(model)
        assert "is overwritten with its gradient (float8 scaling factors)" in str(error.value)
        assert "Expected: the dtype policy 'mixed_bfloat16' or 'mixed_float16'." in str(error.value)

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ({"compression": "fp8"}, ["Received: compression='fp8'", "Expected one of [None, 'bf16', 'fp16']"]),
            ({"batch_norm": "sync"}, ["Received: batch_norm='sync'", "Expected 'global'", "'local'"]),
        ],
    )
    def test_unknown_values(self, arguments, words):
        with pytest.raises(ValueError) as error:
            tfdist.MirroredStrategy(**arguments)
        for word in words:
            assert word in str(error.value)

    def test_batch_without_rows(self, mirrored):
        model = in_scope(mirrored, mlp())
        with pytest.raises(ValueError, match=r"without rows cannot be split over replicas.*\.batch\(n\)"):
            model.fit(tf.data.Dataset.from_tensors((1.0, 2.0)), verbose=0)


class TestOwnTrainingLoop:
    """A function that is not a Keras step keeps what `tf.distribute` documents."""

    def test_elements_are_plain_rows_in_order(self, mirrored):
        dataset = mirrored.experimental_distribute_dataset(tf.data.Dataset.range(20).batch(8))
        seen = [[x.numpy().tolist() for x in mirrored.experimental_local_results(batch)] for batch in dataset]
        assert seen == [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9, 10, 11], [12, 13, 14, 15]], [[16, 17], [18, 19]]]

    def test_missing_rows_are_not_made_up(self, mirrored):
        dataset = mirrored.experimental_distribute_dataset(tf.data.Dataset.range(9).batch(8))
        *_, last = [[x.numpy().tolist() for x in mirrored.experimental_local_results(batch)] for batch in dataset]
        assert last == [[8], []]


class TestOptions:
    @pytest.mark.parametrize(("compression", "precision"), daily([("bf16", 2.0**-8), ("fp16", 2.0**-11)], "bf16"))
    def test_rounding_is_within_its_bound_and_not_exact(self, mirrored, compression, precision):
        """One step of plain SGD: the update is the gradient, rounded once a cast and once an addition."""
        narrow = tfdist.MirroredStrategy(DEVICES, compression=compression)
        x, y = rows(BATCH)

        def update(strategy: tf.distribute.Strategy) -> list[np.ndarray]:
            with strategy.scope():
                keras.utils.set_random_seed(7)
                model = mlp(optimizer=lambda: keras.optimizers.SGD(1.0))()
            before = model.get_weights()
            model.fit(x, y, batch_size=BATCH, verbose=0)
            return [a - b for a, b in zip(before, model.get_weights(), strict=True)]

        exact, rounded = update(mirrored), update(narrow)
        gaps = [np.abs(a - b) for a, b in zip(exact, rounded, strict=True)]
        assert max(gap.max() for gap in gaps) > 1e-6, "nothing was rounded"
        # Parts of opposite signs cancel: the bound is relative to the parts, which are no larger than the largest.
        bound = 3 * precision * max(np.abs(a).max() for a in exact)
        assert max(gap.max() for gap in gaps) <= bound

    def test_local_batch_norm(self, mirrored):
        local = tfdist.MirroredStrategy(DEVICES, batch_norm="local")
        x, y = rows(BATCH)

        def build() -> keras.Model:
            return ready(
                keras.Sequential([keras.Input((8,)), layers.BatchNormalization(momentum=0.5), layers.Dense(1)]),
                keras.optimizers.SGD(0.1),
                "mse",
            )

        models = []
        for strategy in (tf.distribute.get_strategy(), local):
            with strategy.scope():
                keras.utils.set_random_seed(7)
                models.append(build())
            models[-1].fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        one, model = models
        norm = model.layers[0]
        halves = x[: BATCH // 2], x[BATCH // 2 :]
        mean = 0.5 * np.mean([half.mean(0) for half in halves], 0)
        variance = 0.5 + 0.5 * np.mean([half.var(0) for half in halves], 0)
        np.testing.assert_allclose(norm.moving_mean, mean, atol=1e-6)
        np.testing.assert_allclose(norm.moving_variance, variance, atol=1e-6)
        for variable in (norm.moving_mean, norm.moving_variance):
            first, second = (np.asarray(value) for value in local.experimental_local_results(variable.value))
            assert (first == second).all()
        assert np.abs(one.layers[0].moving_variance - norm.moving_variance).max() > 1e-3
        assert np.abs(one.get_weights()[-2] - model.get_weights()[-2]).max() > 1e-4

    def test_synchronized_batch_norm_is_global_all_the_same(self):
        """In a custom step, too, where Keras' own synchronisation would mix gradients without their weights."""
        local = tfdist.MirroredStrategy(DEVICES, batch_norm="local")
        build = mlp(lambda: layers.BatchNormalization(synchronized=True))
        with only_fit():
            gaps = assert_transparent(local, build, rows(83), batch_size=15)
        assert max(gaps.values()) < 1e-5


@pytest.mark.nightly
def test_one_of_two_losses_is_scaled(mirrored):
    with only_fit():
        gaps = assert_transparent(
            mirrored, lambda: ready(TwoOptimizers(), keras.optimizers.SGD(0.1)), rows(83), batch_size=15
        )
    assert max(gaps.values()) < 1e-5


APPLYING_TWICE = {
    "one more loss": (OneMoreLoss, lambda: tfdist.MirroredStrategy(DEVICES), False),
    "in two calls": (InTwoCalls, lambda: tfdist.MirroredStrategy(DEVICES), False),
    "one loss for two optimizers": (OneLossForTwo, lambda: tfdist.MirroredStrategy(DEVICES), False),
    "in two calls, eagerly": (InTwoCalls, lambda: tfdist.MirroredStrategy(DEVICES), True),
    "one more loss, parts of weights": (OneMoreLoss, tfdist.FullyShardedStrategy, False),
    "in two calls, parts of weights": (InTwoCalls, tfdist.FullyShardedStrategy, False),
}


@pytest.mark.usefixtures("four_devices")
@pytest.mark.parametrize("name", daily(APPLYING_TWICE, "one more loss", "in two calls", "one loss for two optimizers"))
def test_an_optimizer_that_applies_twice_after_one_scaled_loss(name):
    kind, strategy, eagerly = APPLYING_TWICE[name]
    with only_fit():
        gaps = assert_transparent(strategy, applying(kind, eagerly), rows(43), batch_size=15, epochs=1)
    assert max(gaps.values()) < 1e-5


def test_gradients_tell_whether_their_loss_was_scaled():
    weight, kept, found = tf.Variable(2.0), tf.Variable(0.0), {}

    @tf.function(autograph=False)
    def step() -> None:
        losses, divisor = _ScaledLosses(), tf.constant(2.0)
        with tf.GradientTape(persistent=True) as tape:
            scaled, other = weight**2 / divisor, weight**3
        gradient, of_other = tape.gradient(scaled, weight), tape.gradient(other, weight)
        losses.note(divisor)
        assert losses.are_of(None, None, [of_other]), "the first apply after scale_loss"
        losses.note_apply()
        values = {"scaled": 2 * gradient, "not": of_other, "accumulated": kept + 0.0, "none": None}
        found.update({name: losses.are_of(None, None, [value]) for name, value in values.items()})

    step()
    assert found == {"scaled": True, "not": False, "accumulated": True, "none": True}


def test_one_more_loss_in_an_eager_step_is_refused(mirrored):
    model = in_scope(mirrored, applying(OneMoreLoss, eagerly=True))
    with pytest.raises(NotImplementedError, match=r"applies gradients once more after one optimizer\.scale_loss"):
        fit(model)


class ByItsResult(keras.Sequential):
    """Divides its loss by the mean of the losses so far."""

    def train_step(self, data: tuple) -> dict:
        x, y, *_ = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            self.seen.update_state(loss)
            scaled = loss / self.seen.result()
        self.optimizer.apply(tape.gradient(scaled, self.trainable_variables), self.trainable_variables)
        return {"seen": self.seen.result()}


class LogsRows(keras.Sequential):
    """Logs the error of each row."""

    def train_step(self, data: tuple) -> dict:
        return super().train_step(data) | {"errors": keras.ops.abs(self(data[0]) - data[1])[:, 0]}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (ByItsResult, "computes gradients from the result of metric 'seen'. Each replica has the result of its own"),
        (LogsRows, "with a value for each row of a replica. Logs are averaged over the replicas"),
    ],
)
def test_what_differs_in_a_step_is_warned_of_once(mirrored, kind, words):
    model = in_scope(mirrored, lambda: ready(kind([keras.Input((8,)), layers.Dense(1)]), "sgd", "mse"))
    if kind is ByItsResult:
        model.seen = in_scope(mirrored, lambda: keras.metrics.Mean(name="seen"))
    x, y = rows(8)
    call = lambda: [model.train_on_batch(x, y) for _ in range(2)]  # noqa: E731
    assert len(warned(call, words)) == 1
    model.make_train_function(force=True)
    assert not warned(call, words)


class TestNothingStays:
    def everything(self, model: keras.Model) -> list[object]:
        generators = [g for layer in model._flatten_layers() for g in getattr(layer, "_seed_generators", [])]
        return [model, model.optimizer, *model._flatten_layers(), *metrics_of(model), *generators]

    @pytest.mark.parametrize("fails", [False, True])
    def test_no_shadow_after_fit(self, mirrored, fails):
        model = in_scope(mirrored, mlp(layers.BatchNormalization, lambda: layers.Dropout(0.5), jit_compile=False))
        before = {id(owner): set(vars(owner)) for owner in self.everything(model)}
        if fails:
            original, model.compute_loss = model.compute_loss, lambda *_, **__: 1 / 0
            with pytest.raises(ZeroDivisionError):
                fit(model)
            model.compute_loss = original
        else:
            fit(model)
            model.evaluate(*rows(32), verbose=0)
        shadows = {"apply", "scale_loss", "_all_reduce_sum_gradients", "_moments", "next", "update_state", "result"}
        for owner in self.everything(model):
            assert not shadows & set(vars(owner)), owner
            added = {
                name
                for name in set(vars(owner)) - before.get(id(owner), set(vars(owner)))
                if callable(vars(owner)[name])
            }
            assert not added & shadows, (owner, added)
        assert mirrored._keras_step is None
        assert mirrored._keras_asks_for_data is False

    def test_model_trains_alone_afterwards(self, mirrored):
        """The functions of tfdist that remain in Keras do nothing without a tfdist strategy."""
        expected = train_and_observe(tf.distribute.get_strategy(), mlp(), rows(81), batch_size=BATCH, epochs=1)
        with mirrored.scope():
            fit(mlp()(), 81)
        again = train_and_observe(tf.distribute.get_strategy(), mlp(), rows(81), batch_size=BATCH, epochs=1)
        for (name, a), b in zip(expected.items(), again.values(), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=name)


def test_scalar_variables_are_numbers(mirrored):
    model = in_scope(
        mirrored,
        lambda: ready(
            keras.Sequential([keras.Input((4,)), layers.BatchNormalization(), layers.Dense(1)]),
            keras.optimizers.Adam(0.25),
            "mse",
        ),
    )
    model.fit(np.ones((32, 4)), np.ones((32, 1)), batch_size=8, verbose=0)
    assert int(model.optimizer.iterations) == 4
    assert float(model.optimizer.learning_rate) == 0.25
    with pytest.raises(TypeError, match="Only scalar arrays"):
        float(model.layers[0].gamma)
