"""Two workers at a time: counters and metrics are exact, predictions in order, errors arrive; all in one cluster."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.parameter_server.sections import found, largest, part
from tests.tiers import daily
from tfdist.testing import run_local

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(270)]

_DEADLINE = 240
TRIES = 5


# Sections of `make test`.
DAILY = (
    "counters 1",
    "lost updates",
    "on batch",
    "predictions 4",
    "errors",
    "interrupt",
)


def asynchronous(is_daily: bool) -> dict[str, Any]:
    """In the chief: everything that the tests below assert on."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist
    from tests.cluster.attempt import error_of
    from tests.parameter_server.models import BATCH, ROWS, Largest, Sum, batches, dense_model, rows

    strategy = tfdist.ParameterServerStrategy(start_timeout=120)

    def in_scope(optimizer: Any = "adam", *extra: Any, metrics: tuple = (), **more: Any) -> keras.Model:
        """Optimizer and metrics are strings, or functions that make them."""
        with strategy.scope():
            keras.utils.set_random_seed(0)
            made = optimizer() if callable(optimizer) else optimizer
            return dense_model(made, *extra, metrics=[metric() for metric in metrics], **more)

    def counters(steps_per_execution: int, as_keras: bool = False) -> dict[str, Any]:
        schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 100, 0.5)
        model = in_scope(lambda: keras.optimizers.Adam(schedule), steps_per_execution=steps_per_execution)
        x, y = rows(800)
        if as_keras:
            model.fit(x[:8], y[:8], verbose=0)
            for variable in [*model.optimizer.variables, *model.variables]:
                variable.__class__ = keras.Variable
            model.optimizer.iterations.assign(0)
            with strategy.scope():
                model.compile(model.optimizer, "binary_crossentropy")
        history = model.fit(x, y, batch_size=8, epochs=4, verbose=0).history
        iterations = int(model.optimizer.iterations.numpy())
        rate = float(model.optimizer.learning_rate.numpy())
        expected = float(schedule(tf.constant(400)))
        return {"iterations": iterations, "count": history.get("count"), "rate": rate, "expected rate": expected}

    def lost_updates() -> list[int]:
        """Tries until it has happened."""
        iterations: list[int] = []
        while len(iterations) < TRIES and min(iterations, default=400) == 400:
            iterations.append(counters(1, as_keras=True)["iterations"])
        return iterations

    def many_epochs() -> list[float]:
        x, y = rows(40)
        return in_scope().fit(x, y, batch_size=8, epochs=40, verbose=0).history["count"]

    def other_metrics() -> dict[str, Any]:
        x, _ = rows(ROWS)
        numbers = np.random.default_rng(1).permutation(ROWS).astype("float32")[:, None]
        more = (lambda: Sum("sum"), lambda: Largest("largest"))
        model = in_scope("sgd", metrics=more, steps_per_execution=4, loss="mse")
        data = batches(x, numbers)
        return model.fit(data, epochs=3, validation_data=data.take(3), verbose=0).history | {
            "expected": float(numbers[: 3 * BATCH].max())
        }

    def on_batch() -> dict[str, Any]:
        model = in_scope(metrics=(lambda: Largest("largest"),))
        plain = dense_model(metrics=[Largest("largest")])
        x, y = rows(17)

        def counts(trained: keras.Model) -> list[float]:
            logs = [trained.train_on_batch(x[:n], y[:n], return_dict=True) for n in (10, 17, 1)]
            return [float(log["count"]) for log in logs]

        found, expected = counts(model), counts(plain)
        plain.set_weights(model.get_weights())
        for each in (model, plain):
            each.reset_metrics()
        tested = largest(model.test_on_batch(x, y), plain.test_on_batch(x, y))
        predicted = largest([model.predict_on_batch(x)], [plain.predict_on_batch(x)])
        return {
            "counts": found,
            "expected": expected,
            "iterations": int(model.optimizer.iterations.numpy()),
            "test": tested,
            "predict": predicted,
        }

    def predictions(steps_per_execution: int) -> dict[str, Any]:
        model = in_scope(steps_per_execution=steps_per_execution)
        x, y = rows()
        before = model.predict(x, batch_size=BATCH, verbose=0)
        plain = dense_model(steps_per_execution=steps_per_execution)
        plain.set_weights(model.get_weights())
        shape = before.shape
        gap = largest([before], [plain.predict(x, batch_size=BATCH, verbose=0)])
        model.fit(x, y, verbose=0)
        plain.set_weights(model.get_weights())
        data = batches(x, y)
        after = largest([model.predict(data, verbose=0)], [plain.predict(data, verbose=0)])
        some = largest([model.predict(data, steps=3, verbose=0)], [plain.predict(data, steps=3, verbose=0)])
        evaluated = largest(model.evaluate(data, verbose=0), plain.evaluate(data, verbose=0))
        return {"shape": shape, "before": gap, "after": after, "some": some, "evaluate": evaluated}

    def ragged(steps_per_execution: int) -> dict[str, Any]:
        class Pairs(keras.Model):
            def build(self, shape: Any) -> None:
                self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

            def call(self, x: Any) -> Any:
                return x * self.scale.value

        lengths = np.random.default_rng(0).integers(1, 6, 90)
        x = tf.RaggedTensor.from_row_lengths(np.arange(lengths.sum(), dtype="float32"), lengths)
        with strategy.scope():
            model = Pairs()
            model.compile("sgd", lambda y_true, y_pred: tf.reduce_mean(y_pred), steps_per_execution=steps_per_execution)
        y = np.zeros((90, 1), "float32")
        history = model.fit(batches(x, y, 8), epochs=2, verbose=0).history
        model.scale.assign(2.0)
        predicted = model.predict(tf.data.Dataset.from_tensor_slices(x).batch(8), verbose=0)
        return {
            "values": largest([predicted.flat_values], [2 * x.flat_values]),
            "lengths": predicted.row_lengths().numpy().tolist() == lengths.tolist(),
            "iterations": int(model.optimizer.iterations.numpy()),
            "loss": history["loss"],
        }

    def errors() -> dict[str, Any]:
        class Checked(keras.layers.Layer):
            def call(self, x: Any) -> Any:
                with tf.control_dependencies([tf.debugging.assert_less(x, 50.0, message="a feature is too large")]):
                    return tf.identity(x)

        model = in_scope("adam", Checked())
        x, y = rows()
        bad = x.copy()
        bad[300] = 1e6
        raised = [error_of(call, bad, y, verbose=0) for call in (model.fit, model.evaluate)]
        raised.append(error_of(model.predict, bad, verbose=0))
        model.optimizer.iterations.assign(0)
        history = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0).history
        return {
            "errors": raised,
            "count": history["count"],
            "iterations": int(model.optimizer.iterations.numpy()),
            "predictions": model.predict(x, verbose=0).shape,
        }

    def interrupt() -> dict[str, Any]:
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
        x, y = rows()
        begins: list[int] = []

        def note_begin(logs: Any = None) -> None:
            begins.append(int(model.optimizer.iterations.numpy()))

        interrupted = 0
        for _ in range(3):
            try:
                model.fit(x, y, batch_size=BATCH, callbacks=[Interrupt()], verbose=0)
            except KeyboardInterrupt:
                interrupted += 1
        begin = keras.callbacks.LambdaCallback(on_train_begin=note_begin)
        history = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[begin]).history
        return {
            "interrupted": interrupted,
            "count": history["count"],
            "begin": begins[0],
            "steps": int(model.optimizer.iterations.numpy()) - begins[0],
        }

    def batch_callbacks(steps_per_execution: int) -> dict[str, Any]:
        seen: dict[str, list] = {"train": [], "test": [], "predict": [], "epochs": []}

        class Watch(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                seen["train"].append((batch, sorted(logs), float(logs["count"])))

            def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
                seen["test"].append((batch, sorted(logs)))

            def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
                seen["predict"].append((batch, len(logs["outputs"])))

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                seen["epochs"].append((epoch, logs["count"], int(self.model.optimizer.iterations.numpy())))

        model = in_scope(steps_per_execution=steps_per_execution)
        x, y = rows()
        model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[Watch()], validation_data=(x, y))
        model.predict(x, batch_size=BATCH, verbose=0, callbacks=[Watch()])
        return seen

    sections: dict[str, Callable[[], Any]] = {
        "counters 1": lambda: counters(1),
        "counters 8": lambda: counters(8),
        "lost updates": lost_updates,
        "many epochs": many_epochs,
        "other metrics": other_metrics,
        "on batch": on_batch,
        "predictions 1": lambda: predictions(1),
        "predictions 4": lambda: predictions(4),
        "ragged 1": lambda: ragged(1),
        "ragged 4": lambda: ragged(4),
        "errors": errors,
        "interrupt": interrupt,
        "batch callbacks 1": lambda: batch_callbacks(1),
        "batch callbacks 4": lambda: batch_callbacks(4),
    }
    return part(sections, DAILY, is_daily)


@functools.cache
def _results(is_daily: bool) -> dict[str, Any]:
    (outcome,) = run_local(asynchronous, workers=2, ps=1, timeout=_DEADLINE, args=(is_daily,))
    return outcome


def result(name: str) -> Any:
    """What a section has found, in the part of the program that it belongs to."""
    return found(_results(name in DAILY), name)


@pytest.mark.parametrize("steps", daily([1, 8], "1"))
def test_counters_are_exact(steps):
    outcome = result(f"counters {steps}")
    assert outcome["iterations"] == 400
    assert outcome["count"] == [800.0] * 4
    assert outcome["rate"] == pytest.approx(outcome["expected rate"], rel=1e-6)


def test_variables_of_keras_lose_updates():
    """What finds exact counters above would find lost updates."""
    iterations = result("lost updates")
    assert min(iterations) < 400 and max(iterations) <= 400, iterations


@pytest.mark.exhaustive
def test_a_metric_starts_anew_in_each_of_many_epochs():
    assert result("many epochs") == [40.0] * 40


@pytest.mark.exhaustive
def test_metrics_that_are_sums_and_one_that_is_not():
    outcome = result("other metrics")
    assert outcome["sum"] == [650 * 649 / 2] * 3
    assert outcome["largest"] == [649.0] * 3
    assert outcome["val_largest"] == [outcome["expected"]] * 3


def test_batches_of_ones_own():
    outcome = result("on batch")
    # Since Keras 3.15, metrics begin anew with each of them.
    assert outcome["expected"] in ([10.0, 17.0, 1.0], [10.0, 27.0, 28.0])
    assert outcome["counts"] == outcome["expected"]
    assert outcome["iterations"] == 3
    assert outcome["test"] <= 1e-6 and outcome["predict"] <= 1e-6, outcome


@pytest.mark.parametrize("steps", daily([1, 4], "4"))
def test_predictions_are_in_order(steps):
    outcome = result(f"predictions {steps}")
    assert outcome["shape"] == (650, 1)
    assert max(outcome[name] for name in ("before", "after", "some", "evaluate")) <= 1e-6, outcome


@pytest.mark.exhaustive
@pytest.mark.parametrize("steps", [1, 4])
def test_ragged_batches_and_outputs(steps):
    outcome = result(f"ragged {steps}")
    assert outcome["values"] == 0.0
    assert outcome["lengths"]
    assert outcome["iterations"] == 24
    assert outcome["loss"][1] < outcome["loss"][0]


def test_an_error_in_a_step_reaches_its_caller():
    outcome = result("errors")
    for name, message in outcome["errors"]:
        assert name == "InvalidArgumentError"
        assert "a feature is too large" in message
    assert outcome["count"] == [650.0, 650.0]
    assert outcome["iterations"] == 42
    assert outcome["predictions"] == (650, 1)


def test_an_interrupt_leaves_nothing_behind():
    outcome = result("interrupt")
    assert outcome["interrupted"] == 3
    assert outcome["count"] == [650.0, 650.0]
    # All that was handed out until the eighth step's end, three times, before callbacks restore anything.
    assert outcome["begin"] == 3 * 8
    assert outcome["steps"] == 42


# As Keras counts them, also where the last execution has fewer steps.
@pytest.mark.exhaustive
@pytest.mark.parametrize(("steps", "ends"), [(1, list(range(21))), (4, [3, 7, 11, 15, 19, 23])])
def test_callbacks_of_batches(steps, ends):
    seen = result(f"batch callbacks {steps}")
    assert [batch for batch, _, _ in seen["train"]] == ends * 2
    assert [batch for batch, _ in seen["test"]] == ends * 2
    assert {tuple(names) for _, names, _ in seen["train"]} == {("accuracy", "count", "loss")}
    assert {tuple(names) for _, names in seen["test"]} == {("accuracy", "count", "loss")}
    counts = [count for _, _, count in seen["train"][: len(ends)]]
    assert counts == sorted(counts) and 0 < counts[0] <= counts[-1] <= 650
    assert seen["epochs"] == [(0, 650.0, 21), (1, 650.0, 42)]
    assert sum(rows for _, rows in seen["predict"]) == 650
