"""What a strategy refuses, what it leaves alone, and that it leaves nothing behind."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.features.reference import only_fit
from tests.features.table import BATCH, batches, mlp, rows
from tests.logical.conftest import DEVICES
from tfdist.inspection.model_parts import metrics_of
from tfdist.testing import assert_transparent, train_and_observe


def fit(model: keras.Model, n: int = 32, **arguments: object) -> None:
    model.fit(*rows(n), batch_size=BATCH, verbose=0, **arguments)


def refusal(model: keras.Model, method: str = "fit") -> str:
    """The message with which a method is refused."""
    with pytest.raises(ValueError) as error:
        getattr(model, method)(*rows(32), batch_size=BATCH, verbose=0)
    return str(error.value)


class TwoOptimizers(keras.Model):
    """Trains two layers around a normalisation, one with and one without `scale_loss`.

    Args:
        apply_at_once: whether the gradients of one loss are applied before the other is back-propagated.
    """

    def __init__(self, apply_at_once: bool):
        super().__init__()
        self.apply_at_once = apply_at_once
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
            if self.apply_at_once:
                optimizer.apply(gradients, variables)
        if not self.apply_at_once:
            for optimizer, gradients, variables in pending:
                optimizer.apply(gradients, variables)
        return {"gap": original}

    def test_step(self, data: tuple) -> dict:
        return {"gap": keras.ops.mean(keras.ops.square(self(data[0]) - data[0]))}


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

    def test_optimizer_created_outside(self, mirrored):
        optimizer = keras.optimizers.SGD(name="mine")
        with mirrored.scope():
            model = mlp(optimizer=lambda: optimizer)()
        message = refusal(model)
        assert message.startswith("Received: optimizer 'mine', created outside of strategy.scope().")
        assert "Expected: an optimizer created in this strategy's scope, `with strategy.scope(): optimizer = ...`" in (
            message
        )

    def test_inner_optimizer_created_outside(self, mirrored):
        inner = keras.optimizers.SGD(name="inner")
        with mirrored.scope():
            model = mlp(optimizer=lambda: keras.optimizers.LossScaleOptimizer(inner))()
        assert refusal(model).startswith("Received: optimizer 'inner', created outside of strategy.scope().")

    def test_second_optimizer_created_outside(self, mirrored):
        with mirrored.scope():
            model = mlp()()
        model.other_optimizer = keras.optimizers.Adam(name="other")
        assert refusal(model).startswith("Received: optimizer 'other', created outside of strategy.scope().")

    def test_optimizer_created_outside_is_refused_by_evaluate_too(self, mirrored):
        """Keras builds the optimizer there as well."""
        optimizer = keras.optimizers.SGD(name="outside")
        with mirrored.scope():
            model = mlp(optimizer=lambda: optimizer)()
        message = refusal(model, "evaluate")
        assert message.startswith("Received: optimizer 'outside', created outside of strategy.scope().")

    @pytest.mark.parametrize("method", ["fit", "evaluate"])
    def test_metric_created_outside(self, mirrored, method):
        metric = keras.metrics.MeanSquaredError(name="outside")
        with mirrored.scope():
            model = mlp(metrics=[metric])()
        message = refusal(model, method)
        assert "outside" in message.split(",")[0] and message.lower().startswith("received: metric")
        assert "created outside of strategy.scope()" in message
        assert "Expected: model, metrics and loss objects are created in this strategy's scope" in message

    @pytest.mark.parametrize("method", ["fit", "evaluate"])
    def test_layer_created_outside(self, mirrored, method):
        layer = layers.Dense(16, name="outer")
        layer.build((None, 16))
        with mirrored.scope():
            model = mlp(lambda: layer)()
        message = refusal(model, method)
        assert "outer/kernel" in message and "created outside of strategy.scope()" in message
        assert message.endswith("`with strategy.scope(): ...`.")

    def test_model_of_another_strategy(self, mirrored):
        other = tfdist.MirroredStrategy()
        with other.scope():
            layer = layers.Dense(16, name="others")
            layer.build((None, 16))
        with mirrored.scope():
            model = mlp(lambda: layer)()
        assert "others/kernel', created in the scope of another MirroredStrategy" in refusal(model)

    def test_metric_created_outside_that_only_the_step_uses(self, mirrored):
        class Net(keras.Sequential):
            metrics = property(lambda self: [])

        with mirrored.scope():
            model = Net([keras.Input((8,)), layers.Dense(1, activation="sigmoid")])
            model.compile("sgd", "binary_crossentropy")
        model.kept = {"mine": keras.metrics.Mean(name="outside")}
        message = refusal(model)
        assert message.startswith("Received: metric variable 'outside/total', created outside of strategy.scope();")

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

    def test_model_created_outside_with_layers_of_the_scope(self, mirrored):
        with mirrored.scope():
            layer = layers.Dense(1, name="inner")
            layer.build((None, 8))
        model = keras.Sequential([keras.Input((8,)), layer], name="outer")
        model.compile("sgd", "mse")
        assert "model 'outer', created outside of strategy.scope(), with variable 'inner/kernel'" in refusal(model)

    def test_wrong_cluster_ends_in_a_short_traceback(self, monkeypatch):
        monkeypatch.setenv(
            "TF_CONFIG", '{"cluster": {"wroker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'
        )
        with pytest.raises(tfdist.ClusterError) as error:
            tfdist.MultiWorkerMirroredStrategy()
        assert error.value.problems == [
            "TF_CONFIG: unknown job 'wroker'; did you mean \"worker\"? Valid jobs: chief, worker, ps, evaluator"
        ]
        assert [entry.name for entry in error.traceback][1:] == ["__init__"]
        assert error.value.__cause__ is None and error.value.__suppress_context__

    def test_float8(self, mirrored):
        with mirrored.scope():
            model = mlp(lambda: layers.Dense(16))()
            model.layers[1].quantize("float8")
        with pytest.raises(NotImplementedError) as error:
            fit(model)
        assert "is overwritten with its gradient (float8 scaling factors)" in str(error.value)
        assert "Use the dtype policy 'mixed_bfloat16' or 'mixed_float16' instead." in str(error.value)

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
        with mirrored.scope():
            model = mlp()()
        with pytest.raises(ValueError, match=r"without rows cannot be split over replicas.*\.batch\(n\)"):
            model.fit(tf.data.Dataset.from_tensors((1.0, 2.0)), verbose=0)


class TestOwnTrainingLoop:
    """A function that is not a Keras step keeps what `tf.distribute` documents."""

    def train(self, strategy: tf.distribute.Strategy) -> tuple[list[float], list[np.ndarray]]:
        with strategy.scope():
            keras.utils.set_random_seed(3)
            model = keras.Sequential([keras.Input((8,)), layers.Dense(4), layers.BatchNormalization(), layers.Dense(1)])
            optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
            optimizer.build(model.trainable_variables)

        @tf.function
        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(model(x, training=True) - y)) / BATCH
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
            return loss

        losses = []
        for x, y in strategy.experimental_distribute_dataset(batches(*rows(96))):
            losses.append(float(strategy.reduce("SUM", strategy.run(step, (x, y)), axis=None)))
        return losses, model.get_weights()

    def test_equals_stock_mirrored_strategy(self, mirrored):
        expected, received = self.train(tf.distribute.MirroredStrategy(DEVICES)), self.train(mirrored)
        np.testing.assert_allclose(received[0], expected[0], rtol=1e-6)
        for a, b in zip(expected[1], received[1], strict=True):
            np.testing.assert_allclose(b, a, atol=1e-6)

    def test_elements_are_plain_rows_in_order(self, mirrored):
        dataset = mirrored.experimental_distribute_dataset(tf.data.Dataset.range(20).batch(8))
        seen = [[x.numpy().tolist() for x in mirrored.experimental_local_results(batch)] for batch in dataset]
        assert seen == [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9, 10, 11], [12, 13, 14, 15]], [[16, 17], [18, 19]]]

    def test_missing_rows_are_not_made_up(self, mirrored):
        dataset = mirrored.experimental_distribute_dataset(tf.data.Dataset.range(9).batch(8))
        *_, last = [[x.numpy().tolist() for x in mirrored.experimental_local_results(batch)] for batch in dataset]
        assert last == [[8], []]

    def test_structure_of_elements_is_the_users(self, mirrored):
        dataset = tf.data.Dataset.from_tensor_slices({"x": [1, 2], "y": [3, 4]}).batch(2)
        (element,) = list(mirrored.experimental_distribute_dataset(dataset))
        assert sorted(element) == ["x", "y"]
        assert [int(x[0]) for x in mirrored.experimental_local_results(element["y"])] == [3, 4]

    def test_values_of_functions_are_per_replica(self, mirrored):
        result = mirrored.run(lambda: tf.distribute.get_replica_context().replica_id_in_sync_group)
        assert [int(x) for x in mirrored.experimental_local_results(result)] == [0, 1]


class TestOptions:
    def trained(self, strategy: tf.distribute.Strategy, build: object, **arguments: object) -> dict[str, np.ndarray]:
        with only_fit():
            seen = train_and_observe(strategy, build, rows(96), batch_size=BATCH, epochs=1, **arguments)
        return {name.split(" (")[0]: value for name, value in seen.items()}

    @pytest.mark.parametrize(
        ("compression", "precision"), [("bf16", 2.0**-8), pytest.param("fp16", 2.0**-11, marks=pytest.mark.exhaustive)]
    )
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

    @pytest.mark.exhaustive
    def test_bf16_does_not_touch_moving_statistics(self, mirrored):
        """They are kept from step to step: rounding them would add up."""
        build = mlp(layers.BatchNormalization, optimizer=lambda: keras.optimizers.SGD(0.0))
        exact = self.trained(tfdist.MirroredStrategy(DEVICES), build)
        rounded = self.trained(tfdist.MirroredStrategy(DEVICES, compression="bf16"), build)
        for name, value in exact.items():
            np.testing.assert_allclose(rounded[name], value, atol=1e-6, err_msg=name)

    def test_local_batch_norm(self, mirrored):
        local = tfdist.MirroredStrategy(DEVICES, batch_norm="local")
        x, y = rows(BATCH)

        def build() -> keras.Model:
            model = keras.Sequential([keras.Input((8,)), layers.BatchNormalization(momentum=0.5), layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1), "mse")
            return model

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


@pytest.mark.parametrize("apply_at_once", [pytest.param(True, marks=pytest.mark.exhaustive), False])
def test_one_of_two_losses_is_scaled(mirrored, apply_at_once):
    def build() -> keras.Model:
        model = TwoOptimizers(apply_at_once)
        model.compile(keras.optimizers.SGD(0.1))
        return model

    with only_fit():
        gaps = assert_transparent(mirrored, build, rows(83), batch_size=15)
    assert max(gaps.values()) < 1e-5


class TestNothingStays:
    def everything(self, model: keras.Model) -> list[object]:
        generators = [g for layer in model._flatten_layers() for g in getattr(layer, "_seed_generators", [])]
        return [model, model.optimizer, *model._flatten_layers(), *metrics_of(model), *generators]

    @pytest.mark.parametrize("fails", [False, True])
    def test_no_shadow_after_fit(self, mirrored, fails):
        with mirrored.scope():
            model = mlp(layers.BatchNormalization, lambda: layers.Dropout(0.5), jit_compile=False)()
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
    with mirrored.scope():
        model = keras.Sequential([keras.Input((4,)), layers.BatchNormalization(), layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.25), "mse")
    model.fit(np.ones((32, 4)), np.ones((32, 1)), batch_size=8, verbose=0)
    assert int(model.optimizer.iterations) == 4
    assert float(model.optimizer.learning_rate) == 0.25
    with pytest.raises(TypeError, match="Only scalar arrays"):
        float(model.layers[0].gamma)


def test_code_without_a_name_is_warned_that_no_model_has_used_the_strategy(four_devices):
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    strategy = tfdist.PipelineStrategy(four_devices[:2])
    with pytest.warns(UserWarning, match="no model has used the PipelineStrategy yet"):
        exec("model.predict(x, verbose=0)", {"model": model, "x": np.ones((2, 2))})
    assert strategy.is_chief
