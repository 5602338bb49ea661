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
    """In the chief: the errors. What rows of the feature table are refused for is in test_features.py."""
    import keras
    import tensorflow as tf

    import tfdist
    from tests.models import warned
    from tests.parameter_server.models import Count, dense_model, rows

    strategy = tfdist.ParameterServerStrategy(start_timeout=60)
    x, y = rows(64)

    def fit(optimizer: Any, *data: Any) -> tuple[str, str]:
        with strategy.scope():
            model = dense_model(optimizer)
        return error_of(model.fit, *data, verbose=0)

    optimizer, metric = keras.optimizers.Adam(), Count()
    metric.update_state(tf.zeros(2), None)

    def afterwards() -> list[float]:
        """A metric from outside of the scope counts: it is in the coordinator's process, where metrics are."""
        with strategy.scope():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", metrics=[metric])
        return model.fit(x, y, epochs=2, verbose=0).history["count"]

    def run_alone() -> list[int]:
        """How many warnings there are in a loop of one's own, scheduled and not."""
        step = tf.function(lambda: strategy.run(lambda: tf.constant(1)))

        def scheduled() -> None:
            strategy.coordinator.schedule(step)
            strategy.coordinator.join()

        loops = (scheduled, lambda: [strategy.run(lambda: tf.constant(1)) for _ in range(2)])
        return [len(warned(loop, "The chief does this work alone")) for loop in loops]

    other = tfdist.cluster.ClusterConfig({"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}, "chief", 0)
    build = tfdist.ParameterServerStrategy
    return run_sections(
        {
            "optimizer": lambda: fit(optimizer, x, y),
            "no data": lambda: fit("sgd", x[:0], y[:0]),
            "no data, one process": lambda: error_of(dense_model("sgd").fit, x[:0], y[:0], verbose=0),
            "other cluster": lambda: error_of(build, cluster=other, start_timeout=5),
            "other strategy": lambda: error_of(build, mode="async", max_inflight=0),
            "afterwards": afterwards,
            "alone": run_alone,
        }
    )


@functools.cache
def results() -> dict[str, Any]:
    return run_local(mistakes, workers=2, ps=1, timeout=_DEADLINE)[0]


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        (
            "optimizer",
            "ValueError",
            ["Received: optimizer 'adam", "created outside of strategy.scope().", "compile('adam', ...)"],
        ),
        ("other cluster", "ClusterError", ["which this process has joined already"]),
        ("other strategy", "ValueError", ["Received: max_inflight=0. Expected: a whole number, at least 1"]),
    ],
)
def test_messages(name, kind, words):
    received, message = found(results(), name)
    assert received == kind
    for word in words:
        assert word in message


def test_errors_leave_nothing_behind():
    assert found(results(), "no data")[0] == found(results(), "no data, one process")[0]
    assert found(results(), "afterwards") == [64.0, 64.0]


def test_a_loop_that_the_chief_runs_alone():
    assert found(results(), "alone") == [0, 1]


@pytest.mark.nightly
def test_a_process_that_does_not_come_is_named():
    def program() -> Any:
        import time

        import tfdist

        if tfdist.discover().task_type == "ps":
            return time.sleep(8)
        return error_of(tfdist.ParameterServerStrategy, start_timeout=3)

    ((kind, message),) = run_local(program, workers=1, ps=1, timeout=90)
    assert kind == "BarrierTimeoutError"
    assert "ps 0 (127.0.0.1:" in message and "start_timeout=3" in message
