"""Two workers at a time: counters and metrics are exact, predictions in order, errors arrive; all in one cluster."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest

from tests.parameter_server.sections import found, largest, part
from tests.tiers import daily
from tfdist.testing import run_local

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(270)]

_DEADLINE = 240
DAILY = ("counters_are_exact", "predictions_are_in_order", "an_error", "the_last_batch_is_logged")
REST = (
    *("batches_of_ones_own", "an_interrupt", "metrics_that_are_sums_and_one_that_is_not", "functions_of_python"),
    "numbers_of_steps",
)


def asynchronous(wanted: tuple[str, ...]) -> dict[str, Any]:
    """In the chief: each section asserts what it is about."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist
    from tests.cluster.attempt import error_of
    from tests.parameter_server.models import BATCH, ROWS, Largest, Sum, batches, dense_model, rows
    from tfdist.strategies.parameter_server.runner import Runner

    strategy = tfdist.ParameterServerStrategy(start_timeout=120)
    x, y = rows()
    counts = {1: [float(ROWS)], 2: [float(ROWS)] * 2}

    def in_scope(optimizer: Any = "adam", *extra: Any, metrics: tuple = (), **more: Any) -> keras.Model:
        """Optimizer and metrics are strings, or functions that make them."""
        with strategy.scope():
            keras.utils.set_random_seed(0)
            made = optimizer() if callable(optimizer) else optimizer
            return dense_model(made, *extra, metrics=[metric() for metric in metrics], **more)

    def steps_of(model: keras.Model) -> int:
        return int(model.optimizer.iterations.numpy())

    def counters_are_exact() -> None:
        schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 100, 0.5)
        model = in_scope(lambda: keras.optimizers.Adam(schedule))
        x, y = rows(800)
        history = model.fit(x, y, batch_size=8, epochs=4, verbose=0).history
        assert history["count"] == [800.0] * 4
        assert float(model.optimizer.learning_rate.numpy()) == pytest.approx(float(schedule(400)), rel=1e-6)
        assert steps_of(model) == 400

    def metrics_that_are_sums_and_one_that_is_not() -> None:
        numbers = np.random.default_rng(1).permutation(ROWS).astype("float32")[:, None]
        more = (lambda: Sum("sum"), lambda: Largest("largest"))
        model = in_scope("sgd", metrics=more, steps_per_execution=4, loss="mse")
        data = batches(x, numbers)
        history = model.fit(data, epochs=3, validation_data=data.take(3), verbose=0).history
        assert history["sum"] == [650 * 649 / 2] * 3
        assert history["largest"] == [649.0] * 3
        assert history["val_largest"] == [float(numbers[: 3 * BATCH].max())] * 3

    def batches_of_ones_own() -> None:
        model = in_scope(metrics=(lambda: Largest("largest"),))
        plain = dense_model(metrics=[Largest("largest")])
        x, y = rows(17)
        found, expected = (
            [float(trained.train_on_batch(x[:n], y[:n], return_dict=True)["count"]) for n in (10, 17, 1)]
            for trained in (model, plain)
        )
        # Since Keras 3.15, metrics begin again with each of them.
        assert found == expected and expected in ([10.0, 17.0, 1.0], [10.0, 27.0, 28.0])
        assert steps_of(model) == 3
        plain.set_weights(model.get_weights())
        for each in (model, plain):
            each.reset_metrics()
        assert largest(model.test_on_batch(x, y), plain.test_on_batch(x, y)) <= 1e-6
        assert largest([model.predict_on_batch(x)], [plain.predict_on_batch(x)]) <= 1e-6

    def predictions_are_in_order() -> None:
        model, plain = in_scope(steps_per_execution=4), dense_model(steps_per_execution=4)
        plain.set_weights(model.get_weights())
        assert largest(*([m.predict(x, batch_size=BATCH, verbose=0)] for m in (model, plain))) <= 1e-6
        model.fit(x, y, verbose=0)
        plain.set_weights(model.get_weights())
        data = batches(x, y)
        for some in ({}, {"steps": 3}):
            assert largest(*([m.predict(data, verbose=0, **some)] for m in (model, plain))) <= 1e-6
        assert largest(*(m.evaluate(data, verbose=0) for m in (model, plain))) <= 1e-6

    def the_last_batch_is_logged() -> None:
        class Slowly(keras.Model):
            def test_step(self, data: Any) -> Any:
                (x,) = tf.unstack(tf.reshape(data[0], [1]))
                product = tf.random.stateless_uniform([500, 500], [1, 2])
                rounds = tf.where(x > 0, 0, 300)  # the first batch takes a second
                product = tf.while_loop(lambda i, _: i < rounds, lambda i, p: (i + 1, tf.tanh(p @ p)), [0, product])[1]
                value = x + 0.0 * product[0, 0]
                return {"value": value, "deep": {"rows": tf.shape(data[0])[0], "twice": 2.0 * value}}

        with strategy.scope():
            inputs = keras.Input((1,))
            model = Slowly(inputs, keras.layers.Dense(1)(inputs))
            model.compile("sgd", "mse")
        x = np.array([[0.0], [1.0]], "float32")

        def evaluated() -> Any:
            return model.evaluate(x, x, batch_size=1, verbose=0, return_dict=True)

        assert evaluated() == {"value": 1.0, "rows": 1, "twice": 2.0}
        deliver = Runner._deliver

        def deliver_last(runner: Any, position: int, outcome: Any) -> None:
            deliver(runner, runner._next_position(), outcome)

        # Nothing is compared if the first batch does not end last.
        with mock.patch.object(Runner, "_deliver", deliver_last):
            assert any(evaluated()["value"] == 0.0 for _ in range(5))

    def an_error() -> None:
        class Checked(keras.layers.Layer):
            def call(self, x: Any) -> Any:
                with tf.control_dependencies([tf.debugging.assert_less(x, 50.0, message="a feature is too large")]):
                    return tf.identity(x)

        model = in_scope("adam", Checked())
        bad = x.copy()
        bad[300] = 1e6
        for method, *data in ((model.fit, bad, y), (model.evaluate, bad, y), (model.predict, bad)):
            kind, message = error_of(method, *data, verbose=0)
            assert kind == "InvalidArgumentError" and "a feature is too large" in message
        model.optimizer.iterations.assign(0)
        assert model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0).history["count"] == counts[2]
        assert steps_of(model) == 42
        assert model.predict(x, verbose=0).shape == (650, 1)

    def an_interrupt() -> None:
        class Slow(keras.layers.Layer):
            """A tenth of a second: steps are under way when the next fit begins."""

            def call(self, x: Any) -> Any:
                filler = tf.fill((1000, 1000), x[0, 0])
                for _ in range(3):
                    filler = tf.tanh(filler @ filler)
                return x + 0.0 * filler[0, 0]

        class Interrupt(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                if batch == 7:
                    raise KeyboardInterrupt

        model = in_scope("adam", Slow())
        begins: list[int] = []
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                model.fit(x, y, batch_size=BATCH, callbacks=[Interrupt()], verbose=0)
        begin = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: begins.append(steps_of(model)))
        history = model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[begin]).history
        # All that was handed out until the eighth step's end, twice, before callbacks restore anything.
        assert begins == [2 * 8]
        assert history["count"] == counts[1] and steps_of(model) == begins[0] + 21

    def functions_of_python() -> None:
        """Only the chief has them; a step may call them all the same."""

        class Doubled(keras.layers.Layer):
            def call(self, x: Any) -> Any:
                return tf.ensure_shape(tf.py_function(lambda x: 2.0 * x, [x], tf.float32), x.shape)

        def exact(y: Any, p: Any) -> Any:
            return tf.ensure_shape(tf.numpy_function(lambda y, p: np.float32(np.median(y)), [y, p], tf.float32), ())

        for steps in (1, 4):
            model = in_scope("sgd", Doubled(), metrics=(lambda: keras.metrics.MeanMetricWrapper(exact, "median"),))
            plain = dense_model("sgd", Doubled(), metrics=[keras.metrics.MeanMetricWrapper(exact, "median")])
            plain.set_weights(model.get_weights())
            assert largest(*([m.predict(x, verbose=0)] for m in (model, plain))) <= 1e-6
            model.steps_per_execution = steps
            history = model.fit(x, y, batch_size=BATCH, verbose=0).history
            assert history["count"] == counts[1] and 0.0 <= history["median"][0] <= 1.0

    def numbers_of_steps() -> None:
        class Numbered(keras.layers.Layer):
            def build(self, shape: Any) -> None:
                self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)
                self.sums = self.add_weight(shape=(3,), initializer="zeros", trainable=False)

            def call(self, x: Any) -> Any:
                self.sums.assign_add(1.0)
                return x + 0.0 * self.sums[0] + self.count.assign_add(1.0)

        with strategy.scope():
            layer = Numbered()
            model = keras.Sequential([keras.Input((1,)), layer])
        found = model.predict(np.zeros((6, 1), "float32"), batch_size=1, verbose=0)
        # A worker may see an addition of the other's together with its own.
        assert max(found[:, 0]) == 6.0 and set(found[:, 0]) <= {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}
        assert layer.sums.numpy().tolist() == [6.0] * 3
        assert float(layer.count.assign_add(1.0)) == 7.0

    sections = [counters_are_exact, an_error, an_interrupt, metrics_that_are_sums_and_one_that_is_not]
    sections += [batches_of_ones_own, predictions_are_in_order, the_last_batch_is_logged]
    sections += [functions_of_python, numbers_of_steps]
    return part(sections, wanted)


@functools.cache
def results(wanted: tuple[str, ...]) -> dict[str, Any]:
    return run_local(asynchronous, workers=2, ps=1, timeout=_DEADLINE, args=(wanted,))[0]


@pytest.mark.parametrize("name", daily(DAILY + REST, *DAILY))
def test_section(name):
    found(results(DAILY if name in DAILY else REST), name)
