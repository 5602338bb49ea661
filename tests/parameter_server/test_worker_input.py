"""Input pipelines on the workers: every row is trained on once an epoch, whatever the pipeline is."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.parameter_server.sections import found, run_sections
from tests.tiers import daily
from tfdist.testing import run_local

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(270)]

_DEADLINE = 240
ROWS = 650
ALL = ROWS * (ROWS - 1) / 2

# Steps of three epochs, by the pipeline and the steps in an execution; 325 rows make 11 batches of each worker.
ITERATIONS = {"dataset 4": 63, "function 1": 66, "distributed function 4": 66, "uneven 1": 63}
REFUSED = {
    "generator function": ["cannot be sent to the workers", "Python function or generator", "worker_input=False"],
    "not a sum": ["Received: metric 'sum', whose state is not a sum, and input on the workers."],
    "no dataset": ["Received: a dataset function that returns ndarray. Expected: a tf.data.Dataset"],
}
# What `make test` runs: a function of the worker, batches dealt out; one step and several in an execution.
DAILY = ("function 1", "steps of an epoch 4", "generator function", "not a sum")
REST = (
    "evaluation",
    "as in the tutorial",
    "order of epochs",
    *(name for name in (*ITERATIONS, *REFUSED) if name not in DAILY),
)


def worker_input(wanted: tuple[str, ...]) -> dict[str, Any]:
    """In the chief: counts and sums of the epochs."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist
    from tests.cluster.attempt import error_of
    from tests.parameter_server.models import BATCH, Count, Largest, Sum, batches, dense_model, rows
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

    def uneven(context: tf.distribute.InputContext) -> tf.data.Dataset:
        """The first worker has 20 batches, the other one 1, of unknown number."""
        first = context.input_pipeline_id == 0
        return (data.take(20) if first else data.skip(20)).filter(lambda x, y: True)

    def evaluation() -> float:
        model, plain = model_of(strategy), dense_model("sgd", metrics=[Sum("sum")], loss="mse")
        plain.set_weights(model.get_weights())
        assert largest(*([m.predict(data, verbose=0)] for m in (model, plain))) <= 1e-6
        seen, expected = (m.evaluate(data, verbose=0) for m in (model, plain))
        return max(abs(a - b) / max(abs(b), 1.0) for a, b in zip(seen, expected, strict=True))

    def from_generator(context: tf.distribute.InputContext) -> tf.data.Dataset:
        signature = (tf.TensorSpec([None, 8]), tf.TensorSpec([None, 1]))
        return tf.data.Dataset.from_generator(lambda: iter([(x[:8], numbers[:8])]), output_signature=signature)

    class Weights(Count):
        """Sum of the sample weights of an epoch."""

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.total.assign_add(tf.reduce_sum(tf.cast(sample_weight, "float32")))

    def as_in_the_tutorial() -> dict[str, Any]:
        """Words looked up, rows augmented, classes weighted; shuffled without a seed, without an end."""
        with from_chief.scope():
            lookup = keras.layers.StringLookup(vocabulary=["a", "b"], num_oov_indices=0)
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, "sigmoid")])
            metrics = [Count("count"), Sum("sum"), Weights("weights")]
            model.compile("sgd", "binary_crossentropy", weighted_metrics=metrics, steps_per_execution=2)

        def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
            rows = tf.data.Dataset.from_tensor_slices((x, np.where(numbers[:, 0] % 2 == 0, "a", "b")))
            rows = rows.map(lambda x, word: (x + 0.1 * tf.random.normal([8]), tf.cast(lookup(word), tf.float32)))
            return rows.shuffle(200).batch(context.get_per_replica_batch_size(BATCH)).repeat().prefetch(2)

        return model.fit(dataset_fn, epochs=3, steps_per_epoch=10, class_weight={0: 1.0, 1: 3.0}, verbose=0).history

    class Ordered(keras.Sequential):
        """Its metric depends on the order of the batches, of which each worker has 11 in an epoch."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.order = keras.metrics.Sum(name="order")

        def train_step(self, data: Any) -> Any:
            place = tf.cast(self.optimizer.iterations.value % 22, tf.float32)
            self.order.update_state(place * tf.reduce_sum(data[1]))
            return super().train_step(data) | {"order": self.order.result()}

    def orders_of_epochs() -> list[float]:
        one_at_a_time = tfdist.ParameterServerStrategy(max_inflight=1, start_timeout=120)
        with one_at_a_time.scope():
            model = Ordered([keras.Input((8,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")

        def shuffled(context: tf.distribute.InputContext) -> tf.data.Dataset:
            rows = tf.data.Dataset.from_tensor_slices((x, numbers))
            rows = rows.shard(context.num_input_pipelines, context.input_pipeline_id)
            return rows.shuffle(ROWS, seed=1).batch(BATCH)

        return model.fit(shuffled, epochs=3, verbose=0).history["order"]

    distributed = functools.partial(from_chief.distribute_datasets_from_function, of_worker)
    sections = {
        "generator function": lambda: error_of(model_of(from_chief).fit, from_generator, verbose=0),
        "no dataset": lambda: error_of(model_of(from_chief).fit, lambda context: x, verbose=0),
        "not a sum": lambda: error_of(model_of(strategy, metric=Largest).fit, data, verbose=0),
        "evaluation": evaluation,
        "as in the tutorial": as_in_the_tutorial,
        "order of epochs": orders_of_epochs,
        "steps of an epoch 4": lambda: (
            train(strategy, data.repeat(), 4, steps_per_epoch=7),
            train(strategy, data, 4, steps_per_epoch=7),
            train(from_chief, uneven, 4, steps_per_epoch=7),
        ),
        "dataset 4": lambda: train(strategy, data, 4, validation_data=data),
        "function 1": lambda: train(from_chief, of_worker, 1, validation_data=data),
        "distributed function 4": lambda: train(from_chief, distributed(), 4),
        "uneven 1": lambda: train(from_chief, uneven, 1),
    }
    return run_sections({name: sections[name] for name in wanted})


@functools.cache
def _results(wanted: tuple[str, ...]) -> dict[str, Any]:
    return run_local(worker_input, workers=2, ps=1, timeout=_DEADLINE, args=(wanted,))[0]


def result(name: str) -> Any:
    """What a section has found, in the part of the program that it belongs to."""
    return found(_results(DAILY if name in DAILY else REST), name)


@pytest.mark.parametrize("section", daily(ITERATIONS, "function 1"))
def test_every_row_once_an_epoch(section):
    outcome = result(section)
    assert outcome["iterations"] == ITERATIONS[section]
    for kind in ("", "val_") if section in ("dataset 4", "function 1") else ("",):
        assert outcome[f"{kind}count"] == [float(ROWS)] * 3
        assert outcome[f"{kind}sum"] == [ALL] * 3


def test_steps_per_epoch():
    repeated, finite, ends_early = result("steps of an epoch 4")
    # Keras rounds an epoch's steps up to whole executions.
    assert repeated["iterations"] == 3 * 8
    # Some batch may have been the last one, of 10 rows.
    assert sum(repeated["count"]) in (3 * 8 * 32, 3 * 8 * 32 - 22)
    assert finite["iterations"] == 21
    assert sum(finite["count"]) <= ROWS
    # A step that finds no data on its worker is done on another one, in the same epoch.
    assert ends_early["iterations"] == 21
    assert sum(ends_early["count"]) == ROWS
    # One that is quick comes to its last batch, of 10 rows, in the first epoch.
    assert ends_early["count"][0] in (8 * 32, 8 * 32 - 22)


@pytest.mark.nightly
def test_each_epoch_is_shuffled_otherwise():
    assert len(set(result("order of epochs"))) == 3


@pytest.mark.nightly
def test_as_in_the_tutorial():
    history = result("as in the tutorial")
    for count, ones, weights in zip(history["count"], history["sum"], history["weights"], strict=True):
        # Two of the batches may be the last ones of their worker's, of 10 rows.
        assert 320 - 2 * 22 <= count <= 320 and 0 < ones < count and weights == count + 2 * ones


@pytest.mark.nightly
def test_predictions_and_evaluation():
    assert result("evaluation") <= 1e-6


@pytest.mark.parametrize("name", daily(REFUSED, "generator function", "not a sum"))
def test_what_is_refused(name):
    kind, message = result(name)
    assert kind == "ValueError"
    for word in REFUSED[name]:
        assert word in message
