"""Input pipelines on the workers: every row is trained on once an epoch, whatever the pipeline is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.parameter_server.sections import found, part
from tests.tiers import daily
from tfdist.testing import run_local

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(270)]

_DEADLINE = 240
ROWS = 650
ALL = ROWS * (ROWS - 1) / 2


# Sections of `make test`: batches dealt out, and a function of the worker; one step and several in an execution.
DAILY = ("dataset 4", "function 1", "steps of an epoch 4", "evaluation", "generator function", "not a sum")


def worker_input(is_daily: bool) -> dict[str, Any]:
    """In the chief: counts and sums of the epochs."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist
    from tests.cluster.attempt import error_of
    from tests.parameter_server.models import BATCH, Largest, Sum, batches, dense_model, rows
    from tests.parameter_server.sections import largest

    strategy = tfdist.ParameterServerStrategy(worker_input=True, start_timeout=120)
    from_chief = tfdist.ParameterServerStrategy(start_timeout=120)
    x, _ = rows(ROWS)
    numbers = np.arange(ROWS, dtype="float32")[:, None]
    data = batches(x, numbers)

    def model_of(strategy: Any, steps: int = 1, metric: type = Sum) -> keras.Model:
        with strategy.scope():
            return dense_model("sgd", metrics=[metric("sum")], loss="mse", steps_per_execution=steps)

    def train(strategy: Any, data: Any, steps: int, **fit_arguments: Any) -> dict[str, Any]:
        model = model_of(strategy, steps)
        history = model.fit(data, epochs=3, verbose=0, **fit_arguments).history
        return {**history, "iterations": int(model.optimizer.iterations.numpy())}

    def of_worker(context: tf.distribute.InputContext) -> tf.data.Dataset:
        rows = tf.data.Dataset.from_tensor_slices((x, numbers))
        return rows.shard(context.num_input_pipelines, context.input_pipeline_id).batch(BATCH)

    def of_unknown_size(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return of_worker(context).filter(lambda x, y: True)

    def uneven(context: tf.distribute.InputContext) -> tf.data.Dataset:
        """The first worker has 20 batches, the other one 1, of unknown number."""
        first = context.input_pipeline_id == 0
        return (data.take(20) if first else data.skip(20)).filter(lambda x, y: True)

    def with_steps(steps: int) -> dict[str, Any]:
        history = train(strategy, data.repeat(), steps, steps_per_epoch=7)
        finite = train(strategy, data, steps, steps_per_epoch=7)
        ends_early = train(from_chief, uneven, steps, steps_per_epoch=7)
        return {
            "repeated": (history["count"], history["iterations"]),
            "finite": (finite["count"], finite["iterations"]),
            "ends early": (ends_early["count"], ends_early["iterations"]),
        }

    def predictions() -> float:
        model, plain = model_of(strategy), dense_model("sgd")
        plain.set_weights(model.get_weights())
        return largest([model.predict(data, verbose=0)], [plain.predict(data, verbose=0)])

    def evaluation() -> float:
        model, plain = model_of(strategy), dense_model("sgd", metrics=[Sum("sum")], loss="mse")
        plain.set_weights(model.get_weights())
        seen, expected = (m.evaluate(data, verbose=0) for m in (model, plain))
        return max(abs(a - b) / max(abs(b), 1.0) for a, b in zip(seen, expected, strict=True))

    def from_generator(context: tf.distribute.InputContext) -> tf.data.Dataset:
        signature = (tf.TensorSpec([None, 8]), tf.TensorSpec([None, 1]))
        return tf.data.Dataset.from_generator(lambda: iter([(x[:8], numbers[:8])]), output_signature=signature)

    sections: dict[str, Callable[[], Any]] = {
        "generator function": lambda: error_of(model_of(from_chief).fit, from_generator, verbose=0),
        "generator dataset": lambda: error_of(model_of(strategy).fit, from_generator(None), verbose=0),
        "no dataset": lambda: error_of(model_of(from_chief).fit, lambda context: x, verbose=0),
        "not a sum": lambda: error_of(model_of(strategy, metric=Largest).fit, data, verbose=0),
        "predict of a function": lambda: error_of(
            model_of(from_chief).predict, from_chief.distribute_datasets_from_function(of_worker), verbose=0
        ),
        "predictions": predictions,
        "evaluation": evaluation,
    }
    for steps in (1, 4):
        sections |= {
            f"dataset {steps}": functools.partial(train, strategy, data, steps, validation_data=data),
            f"function {steps}": functools.partial(train, from_chief, of_worker, steps, validation_data=data),
            f"distributed function {steps}": lambda steps=steps: train(
                from_chief, from_chief.distribute_datasets_from_function(of_worker), steps
            ),
            f"unknown size {steps}": functools.partial(train, from_chief, of_unknown_size, steps),
            f"uneven {steps}": functools.partial(train, from_chief, uneven, steps),
            f"steps of an epoch {steps}": functools.partial(with_steps, steps),
        }
    return part(sections, DAILY, is_daily)


@functools.cache
def _results(is_daily: bool) -> dict[str, Any]:
    (outcome,) = run_local(worker_input, workers=2, ps=1, timeout=_DEADLINE, args=(is_daily,))
    return outcome


def result(name: str) -> Any:
    """What a section has found, in the part of the program that it belongs to."""
    return found(_results(name in DAILY), name)


# 325 rows make 11 batches of each worker.
ITERATIONS = {"dataset": 63, "function": 66, "distributed function": 66, "unknown size": 66, "uneven": 63}


@pytest.mark.parametrize("section", daily([f"{name} {steps}" for name in ITERATIONS for steps in (1, 4)], *DAILY[:2]))
def test_every_row_once_an_epoch(section):
    outcome, name = result(section), section.rpartition(" ")[0]
    assert outcome["count"] == [float(ROWS)] * 3
    assert outcome["sum"] == [ALL] * 3
    assert outcome["iterations"] == ITERATIONS[name]
    if name in ("dataset", "function"):
        assert outcome["val_count"] == [float(ROWS)] * 3
        assert outcome["val_sum"] == [ALL] * 3


@pytest.mark.parametrize("steps", daily([1, 4], "4"))
def test_steps_per_epoch(steps):
    outcome = result(f"steps of an epoch {steps}")
    # Keras rounds an epoch's steps up to whole executions.
    whole = -(-7 // steps) * steps
    counts, iterations = outcome["repeated"]
    assert iterations == 3 * whole
    # Some batch may have been the last one, of 10 rows.
    assert sum(counts) in (3 * whole * 32, 3 * whole * 32 - 22)
    assert outcome["finite"][1] == min(3 * whole, 21)
    assert sum(outcome["finite"][0]) <= ROWS
    # A step that finds no data on its worker is done on another one, in the same epoch.
    counts, iterations = outcome["ends early"]
    assert iterations == 21
    assert sum(counts) == ROWS
    # One that is quick comes to its last batch, of 10 rows, in the first epoch.
    assert counts[0] in (whole * 32, whole * 32 - 22)


@pytest.mark.parametrize("name", daily(["predictions", "evaluation"], "evaluation"))
def test_predictions_and_evaluation(name):
    assert result(name) <= 1e-6


@pytest.mark.parametrize(
    ("name", "words"),
    daily(
        [
            (
                "generator function",
                ["cannot be sent to the workers", "Python function or generator", "worker_input=False"],
            ),
            (
                "generator dataset",
                ["cannot be sent to the workers", "Python function or generator", "worker_input=False"],
            ),
            ("no dataset", ["Received: a dataset function that returns ndarray. Expected: a tf.data.Dataset"]),
            ("not a sum", ["Received: metric 'sum', whose state is not a sum, and input on the workers."]),
            (
                "predict of a function",
                ["Received: a dataset function for predict, which needs the batches in their order"],
            ),
        ],
        "generator function",
        "not a sum",
    ),
)
def test_what_is_refused(name, words):
    kind, message = result(name)
    assert kind == "ValueError"
    for word in words:
        assert word in message
