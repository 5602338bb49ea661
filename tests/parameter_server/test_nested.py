"""Calls within calls: what a callback does to a model takes no step away from the fit around it, or from the next."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.cluster.attempt import error_of
from tests.parameter_server.sections import found, part
from tfdist.testing import run_local

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(300)]

SECTIONS = (
    "no_step_is_lost",
    "variables_made_in_every_step_are_refused",
    "errors_name_their_place",
    "functions_of_other_batches_do_not_mix",
    "no_step_changes_weights_that_were_set",
    "functions_that_are_made_again",
    "logs_of_an_earlier_fit",
)


def nested_calls() -> dict[str, Any]:
    """In the chief: each section asserts what it is about."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist
    from tests.parameter_server.models import Count, Largest

    strategy = tfdist.ParameterServerStrategy(start_timeout=120)
    x, y = np.ones((400, 4), "float32"), np.ones((400, 1), "float32")

    class Slow(keras.layers.Layer):
        """Takes longer than the callback, so that steps are under way whenever it is called."""

        def call(self, inputs: Any) -> Any:
            product = tf.random.stateless_uniform([300, 300], [1, 2])
            for _ in range(30):
                product = tf.tanh(product @ product)
            return inputs + 0.0 * tf.reduce_sum(product)

    def build(layer: Any = Slow, kind: type = keras.Model, **arguments: Any) -> keras.Model:
        with strategy.scope():
            inputs = keras.Input((4,))
            model = kind(inputs, keras.layers.Dense(1, "sigmoid")(layer()(inputs)))
            model.compile("sgd", "mse", **arguments)
        return model

    def no_step_is_lost() -> None:
        model, other = build(), build()
        calls = (
            lambda: model.evaluate(x[:16], y[:16], verbose=0),
            lambda: model.predict(x[:16], verbose=0),
            lambda: model.test_on_batch(x[:8], y[:8]),
            lambda: other.fit(x[:16], y[:16], verbose=0),
        )
        for number, call in enumerate(calls, start=1):
            at_every_fifth = keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda i, logs, call=call: i % 5 or call()
            )
            model.fit(x, y, batch_size=8, epochs=1, verbose=0, callbacks=[at_every_fifth])
            assert int(model.optimizer.iterations.numpy()) == 50 * number

    def variables_made_in_every_step_are_refused() -> None:
        class Wasteful(keras.Model):
            def train_step(self, data: Any) -> Any:
                keras.metrics.Mean().update_state(1.0)
                return super().train_step(data)

        kind, message = error_of(build(kind=Wasteful).fit, x[:8], y[:8], verbose=0)
        assert kind == "ValueError" and message.startswith("Received: a step that makes variable 'mean")

    def errors_name_their_place() -> None:
        class Faulty(keras.layers.Layer):
            def call(self, inputs: Any) -> Any:
                return tf.gather(inputs, tf.cast(tf.reduce_sum(inputs), tf.int32) + 99, axis=1)[:, None]

        kind, message = error_of(build(Faulty).fit, x[:8], y[:8], verbose=0)
        assert kind == "InvalidArgumentError" and "is not in [0, 4)" in message
        assert f'File "{__file__}", line ' in message and ", in call" in message

    def functions_of_other_batches_do_not_mix() -> None:
        model = build(keras.layers.Identity, metrics=[Largest("largest")])
        for weights in ({}, {"sample_weight": np.ones(16, "float32")}, {}):
            seen = model.evaluate(x[:16], 2.0 * y[:16], verbose=0, return_dict=True, **weights)["largest"]
            assert seen == 2.0  # of the labels

    def no_step_changes_weights_that_were_set() -> None:
        class Reset(keras.callbacks.Callback):
            """Goes back to the first weights, as after a loss that is NaN."""

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                if batch % 5 == 4:
                    self.model.set_weights(first)
                    done.append((batch + 1, int(self.model.optimizer.iterations.numpy())))

        model = build()
        first, done = model.get_weights(), []
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[Reset()])
        assert len(done) == 10 and all(batches == iterations for batches, iterations in done)

    def functions_that_are_made_again() -> None:
        class Phase(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                if batch == 19:
                    self.model.make_train_function(force=True)
                    self.model.make_test_function(force=True)

        model = build(metrics=[Count()])
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8).filter(lambda x, y: True)
        before = sum(strategy.executions_done)
        history = model.fit(data, epochs=2, verbose=0, validation_data=data, callbacks=[Phase()]).history
        assert sum(strategy.executions_done) - before == 2 * 2 * 50
        assert int(model.optimizer.iterations.numpy()) == 2 * 50
        assert history["count"] == history["val_count"] == [400.0] * 2

    def logs_of_an_earlier_fit() -> None:
        model, stop = build(), keras.callbacks.TerminateOnNaN
        weights = model.get_weights()
        bad = np.full_like(x, np.nan)
        assert np.isnan(model.fit(bad, y, batch_size=8, verbose=0, callbacks=[stop()]).history["loss"][0])
        model.set_weights(weights)
        steps = int(model.optimizer.iterations.numpy())
        model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[stop()])
        assert int(model.optimizer.iterations.numpy()) - steps == 2 * 50

    sections = [no_step_is_lost, variables_made_in_every_step_are_refused]
    sections += [errors_name_their_place, functions_of_other_batches_do_not_mix]
    sections += [no_step_changes_weights_that_were_set, functions_that_are_made_again, logs_of_an_earlier_fit]
    return part(sections, SECTIONS)


@functools.cache
def results() -> dict[str, Any]:
    return run_local(nested_calls, 2, ps=1, timeout=270, env={"TF_NUM_INTEROP_THREADS": "4"})[0]


@pytest.mark.parametrize("name", SECTIONS)
def test_section(name):
    found(results(), name)
