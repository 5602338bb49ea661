"""Calls within calls: what a callback evaluates, predicts or trains takes no step away from the fit around it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.parameter_server.sections import found, run_sections
from tfdist.testing import run_local

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(240)]

NESTED = (
    "evaluate",
    "predict",
    "predict_on_batch",
    "test_on_batch",
    "other fit",
    "other predict",
    "other train_on_batch",
)


def nested_calls() -> dict[str, Any]:
    """In the chief: iterations of a fit of 50 steps, for each call that a callback makes at every fifth of them."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist

    strategy = tfdist.ParameterServerStrategy(start_timeout=120)
    x, y = np.ones((400, 4), "float32"), np.ones((400, 1), "float32")

    class Slow(keras.layers.Layer):
        """Takes longer than the callback, so that steps are under way whenever it is called."""

        def call(self, inputs: Any) -> Any:
            product = tf.random.stateless_uniform([300, 300], [1, 2])
            for _ in range(30):
                product = tf.tanh(product @ product)
            return inputs + 0.0 * tf.reduce_sum(product)

    def build() -> keras.Model:
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), Slow(), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        return model

    model, other = build(), build()
    calls: dict[str, Callable[[], Any]] = {
        "evaluate": lambda: model.evaluate(x[:16], y[:16], verbose=0),
        "predict": lambda: model.predict(x[:16], verbose=0),
        "predict_on_batch": lambda: model.predict_on_batch(x[:8]),
        "test_on_batch": lambda: model.test_on_batch(x[:8], y[:8]),
        "other fit": lambda: other.fit(x[:16], y[:16], verbose=0),
        "other predict": lambda: other.predict(x[:16], verbose=0),
        "other train_on_batch": lambda: other.train_on_batch(x[:8], y[:8]),
    }

    def iterations(call: Callable[[], Any]) -> int:
        before = int(model.optimizer.iterations.numpy()) if model.optimizer.built else 0
        at_every_fifth = keras.callbacks.LambdaCallback(on_train_batch_end=lambda i, logs: i % 5 or call())
        model.fit(x, y, batch_size=8, epochs=1, verbose=0, callbacks=[at_every_fifth])
        return int(model.optimizer.iterations.numpy()) - before

    sections: dict[str, Callable[[], Any]] = {name: functools.partial(iterations, calls[name]) for name in NESTED}

    def dead_models_are_forgotten() -> bool:
        import gc
        import weakref

        dead = build()
        dead.fit(x[:64], y[:64], verbose=0)
        dead.predict(x[:64], verbose=0)
        reference = weakref.ref(dead)
        del dead
        gc.collect()
        return reference() is None

    sections["dead models are forgotten"] = dead_models_are_forgotten

    def makes_a_metric_each_time() -> str:
        class Wasteful(keras.Model):
            def train_step(self, data: Any) -> Any:
                keras.metrics.Mean().update_state(1.0)
                return super().train_step(data)

        with strategy.scope():
            inputs = keras.Input((4,))
            wasteful = Wasteful(inputs, keras.layers.Dense(1)(inputs))
            wasteful.compile("sgd", "mse")
        try:
            wasteful.fit(x[:8], y[:8], verbose=0)
        except ValueError as error:
            return str(error)
        return "nothing"

    sections["makes a metric each time"] = makes_a_metric_each_time

    def error_in_a_layer() -> str:
        class Faulty(keras.layers.Layer):
            def call(self, inputs: Any) -> Any:
                return tf.gather(inputs, tf.cast(tf.reduce_sum(inputs), tf.int32) + 99, axis=1)[:, None]

        with strategy.scope():
            faulty = keras.Sequential([keras.Input((4,)), Faulty(), keras.layers.Dense(1)])
            faulty.compile("sgd", "mse")
        try:
            faulty.fit(x[:8], y[:8], verbose=0)
        except tf.errors.InvalidArgumentError as error:
            return str(error)
        return "nothing"

    sections["error in a layer"] = error_in_a_layer

    def without_scope() -> str:
        import warnings

        unused = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        unused.compile("sgd", "mse")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            unused.fit(x[:8], y[:8], verbose=0)
            unused.fit(x[:8], y[:8], verbose=0)
        return "\n".join(str(w.message) for w in caught if "scope()" in str(w.message))

    # Before any model has used the strategy.
    sections = {"without scope": without_scope, **sections}

    def other_weights_of_rows() -> list[float]:
        class Largest(keras.metrics.Metric):
            def __init__(self) -> None:
                super().__init__(name="largest")
                self.value = self.add_variable((), "zeros", name="value")

            def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
                self.value.assign(tf.maximum(self.value, tf.reduce_max(y_pred)))

            def result(self) -> Any:
                return self.value

        with strategy.scope():
            judged = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, "sigmoid")])
            judged.compile("sgd", "mse", metrics=[Largest()])
        expected = float(judged.predict(x[:16], verbose=0).max())
        weights = np.ones(16, "float32")
        seen = [
            judged.evaluate(x[:16], y[:16], verbose=0, return_dict=True)["largest"],
            judged.evaluate(x[:16], y[:16], sample_weight=weights, verbose=0, return_dict=True)["largest"],
            judged.evaluate(x[:16], y[:16], verbose=0, return_dict=True)["largest"],
        ]
        return [value - expected for value in seen]

    sections["other weights of rows"] = other_weights_of_rows
    return run_sections(sections)


@functools.cache
def results() -> dict[str, Any]:
    return run_local(nested_calls, 2, ps=1, timeout=200, env={"TF_NUM_INTEROP_THREADS": "4"})[0]


@pytest.mark.parametrize("name", NESTED)
def test_no_step_is_lost(name):
    assert found(results(), name) == 50


def test_dead_models_are_forgotten():
    assert found(results(), "dead models are forgotten")


def test_variables_made_in_every_step_are_refused():
    assert found(results(), "makes a metric each time").startswith("Received: a step that makes variable 'mean")


def test_errors_name_their_place():
    text = found(results(), "error in a layer")
    assert "is not in [0, 4)" in text
    assert f'File "{__file__}", line ' in text and ", in call" in text


def test_a_forgotten_scope_is_told_once():
    text = found(results(), "without scope")
    assert text.startswith("Received: a call of fit, evaluate or predict for a model that was created outside of")
    assert text.count("Expected:") == 1


def test_functions_of_other_batches_do_not_mix():
    assert found(results(), "other weights of rows") == pytest.approx([0.0] * 3, abs=1e-6)
