"""What users get wrong with parameter servers: a message with what was received, what is expected, and the remedy."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.cluster.attempt import error_of
from tests.parameter_server.sections import found, run_sections
from tfdist.testing import run_local

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(150)]

_DEADLINE = 120


def mistakes() -> dict[str, Any]:
    """In the chief: the errors."""
    import keras
    import tensorflow as tf

    import tfdist
    from tests.parameter_server.models import Count, dense_model, rows

    strategy = tfdist.ParameterServerStrategy(start_timeout=60)
    synchronous = tfdist.ParameterServerStrategy(mode="sync", start_timeout=60)
    x, y = rows(64)

    def fit(make: Any, *data: Any, under: Any = strategy) -> tuple[str, str]:
        with under.scope():
            model = make()
        return error_of(model.fit, *(data or (x, y)), verbose=0)

    def sequential(*layers: Any, **compile_arguments: Any) -> keras.Model:
        model = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(1)])
        model.compile("sgd", "mse", **compile_arguments)
        return model

    optimizer, metric, layer = keras.optimizers.Adam(), Count(), keras.layers.Dense(4)
    layer.build((None, 8))
    metric.update_state(tf.zeros(2), None)

    class Decorated(keras.Model):
        @tf.function
        def train_step(self, data: Any) -> dict:
            return {}

    def decorated() -> keras.Model:
        inputs = keras.Input((8,))
        model = Decorated(inputs, keras.layers.Dense(1)(inputs))
        model.compile("sgd", "mse")
        return model

    def stateful() -> keras.Model:
        model = keras.Sequential([keras.Input((4, 2), batch_size=8), keras.layers.LSTM(3, stateful=True)])
        model.compile("sgd", "mse")
        return model

    class TwoOptimizers(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.other = keras.layers.Dense(1), keras.optimizers.SGD(0.1)

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def train_step(self, data: Any) -> dict:
            for optimizer in (self.optimizer, self.other):
                with tf.GradientTape() as tape:
                    loss = keras.ops.mean(self(data[0]))
                optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    def two_optimizers() -> keras.Model:
        model = TwoOptimizers()
        model.compile(keras.optimizers.SGD(0.2), "mse")
        return model

    def masked() -> keras.Model:
        stack = [keras.Input((3,), dtype="int32"), keras.layers.Embedding(5, 2, mask_zero=True)]
        model = keras.Sequential([*stack, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    ids = (x[:, :3] > 0).astype("int32")
    found = {
        "eager": fit(lambda: dense_model("sgd", run_eagerly=True)),
        "jit": fit(lambda: dense_model("sgd", jit_compile=True)),
        "stateful": fit(stateful, x.reshape(64, 4, 2)[:, :, :], y),
        "optimizer": fit(lambda: dense_model(optimizer)),
        "layer": fit(lambda: sequential(layer)),
        "decorated": fit(decorated),
        "two optimizers": fit(two_optimizers, under=synchronous),
        "synchronized": fit(lambda: sequential(keras.layers.BatchNormalization(synchronized=True)), under=synchronous),
        "masked": fit(masked, ids, ids[..., None], under=synchronous),
        "no data": fit(lambda: dense_model("sgd"), x[:0], y[:0]),
        "no data, one process": error_of(dense_model("sgd").fit, x[:0], y[:0], verbose=0),
        "other cluster": error_of(
            tfdist.ParameterServerStrategy,
            cluster=tfdist.cluster.ClusterConfig({"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}, "chief", 0),
            start_timeout=5,
        ),
        "other strategy": error_of(tfdist.ParameterServerStrategy, mode="async", max_inflight=0),
    }

    def own_metric() -> list[float]:
        """It is in the coordinator's process, where metrics are."""
        with strategy.scope():
            model = sequential(metrics=[metric])
        return model.fit(x, y, epochs=2, verbose=0).history["count"]

    def afterwards() -> list[float]:
        with strategy.scope():
            model = dense_model("sgd")
        return model.fit(x, y, verbose=0).history["count"]

    return {name: lambda error=error: error for name, error in found.items()} | {
        "metric": own_metric,
        "afterwards": afterwards,
    }


def program() -> dict[str, Any]:
    return run_sections(mistakes())


@functools.cache
def results() -> dict[str, Any]:
    (outcome,) = run_local(program, workers=2, ps=1, timeout=_DEADLINE)
    return outcome


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("eager", ["Received: run_eagerly=True under ParameterServerStrategy.", "Expected: run_eagerly=False."]),
        ("jit", ["Received: compile(jit_compile=True) under ParameterServerStrategy.", "or 'auto' (the default)."]),
        ("stateful", ["Received: layer 'lstm", "with stateful=True", "Expected: stateful=False."]),
        (
            "optimizer",
            ["Received: optimizer 'adam", "created outside of this strategy's scope.", "compile('adam', ...)"],
        ),
        ("layer", ["Received: model variable '", "it is on no parameter server.", "around load_model, too."]),
        ("decorated", ["Received: a model whose train_step is ", "Expected: a plain method, without @tf.function"]),
        ("two optimizers", ["that applies gradients 2 times (optimizers '", "one optimizer, applied once a step;"]),
        ("synchronized", ["Received: something that needs the whole batch", "BatchNormalization(synchronized=True)"]),
        ("masked", ["Received: something that needs the whole batch", "a loss over masked time steps"]),
        ("other cluster", ["which this process has joined already"]),
        ("other strategy", ["Received: max_inflight=0. Expected: at least 1"]),
    ],
)
def test_messages(name, words):
    kind, message = found(results(), name)
    late = name in ("two optimizers", "synchronized", "masked")
    assert kind == ("ClusterError" if name == "other cluster" else "NotImplementedError" if late else "ValueError")
    for word in words:
        assert word in message


def test_no_data_is_what_it_is_in_one_process():
    (kind, _), (expected, _) = (found(results(), name) for name in ("no data", "no data, one process"))
    assert kind == expected


def test_a_metric_from_outside_of_the_scope_counts():
    assert found(results(), "metric") == [64.0, 64.0]


def test_errors_leave_nothing_behind():
    assert found(results(), "afterwards") == [64.0]


@pytest.mark.exhaustive
def test_a_process_that_does_not_come_is_named():
    def program() -> Any:
        import time

        import tfdist

        cluster = tfdist.discover()
        if cluster.task_type == "ps":
            time.sleep(25)
            return None
        return error_of(tfdist.ParameterServerStrategy, start_timeout=12)

    ((kind, message),) = run_local(program, workers=1, ps=1, timeout=90)
    assert kind == "BarrierTimeoutError"
    assert "ps 0 (127.0.0.1:" in message and "start_timeout=12" in message
