"""Parts of `ParameterServerStrategy` that need no cluster."""

from __future__ import annotations

import functools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.logical.test_row_trial import MinibatchDeviation, root
from tests.models import ready, warned
from tfdist.cluster import ClusterConfig, ClusterError
from tfdist.strategies.hooks import install
from tfdist.strategies.parameter_server import data, synchronous
from tfdist.strategies.parameter_server.step import only_adds
from tfdist.strategies.parameter_server.strategy import ParameterServerHooks, check_arguments, find_cluster

JOBS = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"], "evaluator": ["e:1"]}


class TestOnlyAdds:
    @pytest.mark.parametrize(
        ("function", "adds"),
        [
            (lambda state, other, x: state + 2 * x, True),
            (lambda state, other, x: x + state + x, True),
            (lambda state, other, x: tf.identity(tf.reshape(state - x, [])), True),
            (lambda state, other, x: state, True),
            (lambda state, other, x: tf.maximum(state, x), False),
            (lambda state, other, x: 0.9 * state + x, False),
            (lambda state, other, x: x - state, False),
            (lambda state, other, x: state + state, False),
            (lambda state, other, x: state + x * other, False),
            (lambda state, other, x: x, False),
            (lambda state, other, x: state + tf.cond(x > 0.0, lambda: other, lambda: x), False),
        ],
    )
    def test_functions(self, function, adds):
        with tf.Graph().as_default():
            state, other, x = (tf.compat.v1.placeholder("float32", []) for _ in range(3))
            assert only_adds(state, function(state, other, x), [state, other]) is adds


class TestCut:
    DENSE = (tf.TensorSpec([None]), None)

    @pytest.fixture(autouse=True)
    def without_a_cluster(self, monkeypatch):
        monkeypatch.setattr(synchronous, "COORDINATOR", "/device:CPU:0")

    @pytest.mark.parametrize(
        ("rows", "count", "sizes"), [(10, 2, [5, 5]), (10, 3, [3, 3, 4]), (2, 3, [1, 1]), (1, 2, [1]), (0, 2, [0])]
    )
    def test_sizes(self, rows, count, sizes):
        weights, parts = synchronous._cut([tf.range(float(rows))], self.DENSE, count)
        assert [len(part[0]) for part in parts] == sizes
        assert weights == [size / max(rows, 1) if rows else 1.0 for size in sizes]
        assert tf.concat([part[0] for part in parts], 0).numpy().tolist() == list(range(rows))

    def test_what_has_no_rows_stays_whole(self):
        # Values and row splits of a ragged tensor, by chance as long as the targets.
        tensors = [tf.zeros([4]), tf.constant([0, 1, 2, 4]), tf.zeros([4])]
        assert synchronous._cut(tensors, tf.RaggedTensorSpec([None, None]), 2) == ([1.0], [tensors])
        for tensors in ([tf.zeros([4]), tf.zeros([3])], [tf.zeros([])], []):
            assert synchronous._cut(tensors, self.DENSE, 2) == ([1.0], [tensors])


class TestShards:
    """Steps on the shards of a batch, traced without a cluster."""

    ROWS = np.random.RandomState(0).randn(8, 4).astype("float32"), np.ones((8, 1), "float32")
    SPEC = tf.TensorSpec([None, 4]), tf.TensorSpec([None, 1])

    @pytest.fixture(autouse=True)
    def strategy(self, monkeypatch):
        install()
        strategy = tf.distribute.get_strategy()
        monkeypatch.setattr(strategy, "_num_workers", 2, raising=False)
        monkeypatch.setattr(strategy, "_run_replica", lambda function, *given: function(*given), raising=False)
        return strategy

    def test_sums_of_a_step_are_those_of_the_batch(self, strategy):
        model = ready(Counting(), keras.optimizers.SGD(0.0), "mse")
        expected = model.fit(*self.ROWS, batch_size=8, verbose=0).history
        step = synchronous.GradientStep(strategy, model)
        function = step.single(self.SPEC).function
        for size in (4, 3):
            parts = [[one[:size] for one in self.ROWS], [one[size:] for one in self.ROWS]]
            given = [(tf.constant(len(one[0]) / 8, tf.float64), *map(tf.constant, one)) for one in parts]
            found = [function(tf.constant(i, tf.int64), *one)[0] for i, one in enumerate(given)]
            model.reset_metrics()
            for vectors in found:
                values = step._packing.unpack([vector.numpy() for vector in vectors])
                for variable, value in zip(step.variables, values, strict=True):
                    variable.assign_add(value)
            for metric in model.sums:
                assert float(metric.result()) == pytest.approx(expected[metric.name][0], rel=1e-5), metric.name

    @pytest.mark.parametrize(
        ("make", "culprit"),
        [
            (lambda: MinibatchDeviation(), "(MinibatchDeviation), which mixes the rows of a batch"),
            (lambda: keras.layers.Dense(2), ""),
        ],
    )
    def test_steps_that_mix_rows_are_told(self, strategy, make, culprit):
        keras.utils.set_random_seed(1)
        model = ready(keras.Sequential([keras.Input((4,)), make(), keras.layers.Dense(1)]), "sgd", "mse")
        model.train_on_batch(*self.ROWS)
        said = warned(lambda: synchronous.GradientStep(strategy, model).single(self.SPEC), "Received: ")
        assert len(said) == bool(culprit)
        for message in said:
            assert culprit in message and "Each worker sees its own rows" in message
            assert message.endswith("or mode='async' with max_inflight=1, where each worker gets whole batches.")

    def test_a_loss_that_mixes_rows_is_told(self, strategy):
        model = ready(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), "sgd", root)
        model.train_on_batch(*self.ROWS)
        (said,) = warned(lambda: synchronous.GradientStep(strategy, model).single(self.SPEC), "Received: ")
        assert said.startswith("Received: loss 'root', which mixes the rows of a batch")

    @pytest.mark.parametrize(
        ("parts", "whole"),
        [
            ([[0.0, 1.0], [2.0]], [0.0, 1.0, 2.0]),
            ([[[1], [2]], [[3]]], [[1], [2], [3]]),
            ([1.0, 4.0], 2.0),
            ([1, 4], None),
            ([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]], None),
        ],
    )
    def test_what_a_metric_is_given_of_a_batch(self, monkeypatch, parts, whole):
        for module in (synchronous, data):
            monkeypatch.setattr(module, "COORDINATOR", "/device:CPU:0")
        metric = object()
        updates = [[(metric, (tf.constant(part), None), {"sample_weight": tf.constant(part)})] for part in parts]
        found = synchronous._of_batch(updates, [2, 1], [2 / 3, 1 / 3])
        if whole is None:
            assert found is None
            return
        ((same, (given, nothing), more),) = found
        assert same is metric and nothing is None
        assert given.numpy().tolist() == more["sample_weight"].numpy().tolist() == whole


class Counting(keras.Model):
    """Its `train_step` gives numbers to sums, one a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.sums = [keras.metrics.Sum(name=name) for name in ("energy", "rows", "labels", "steps")]

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.dense(x)

    def train_step(self, data: tuple) -> dict:
        logs = super().train_step(data)
        energy, rows, labels, steps = self.sums
        energy.update_state(tf.reduce_sum(data[0] ** 2))
        rows.update_state(tf.cast(tf.shape(data[0])[0], tf.float32))
        labels.update_state(tf.reduce_sum(tf.cast(data[1], tf.int32)))
        steps.update_state(1.0)
        return logs | {metric.name: metric.result() for metric in self.sums}


class TestMistakes:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"mode": "fast"}, "Received: mode='fast'. Expected: 'async', in which each worker's gradient"),
            ({"max_inflight": 0}, "Received: max_inflight=0. Expected: a whole number, at least 1"),
            ({"mode": "sync", "worker_input": True}, "Received: mode='sync' and worker_input=True."),
        ],
    )
    def test_arguments(self, arguments, message):
        right = {"mode": "async", "max_inflight": None, "worker_input": False}
        check_arguments(**right)
        with pytest.raises(ValueError) as error:
            check_arguments(**right | arguments)
        assert str(error.value).startswith(message)

    @pytest.mark.parametrize(
        ("missing", "text"),
        [
            (["ps"], "a cluster without ps: "),
            (["worker"], "a cluster without worker: "),
            (["chief", "ps"], "a cluster without chief and ps: "),
        ],
    )
    def test_clusters(self, missing, text):
        jobs = {name: places for name, places in JOBS.items() if name not in missing}
        cluster = ClusterConfig(jobs, next(iter(jobs)), 0)
        for function in (functools.partial(find_cluster, start_timeout=1.0), tfdist.ParameterServerStrategy):
            with pytest.raises(ClusterError) as error:
                function(cluster=cluster)
            assert str(error.value).startswith(f"Received: {text}")
            assert "Expected: a chief, which runs the program, at least one worker" in str(error.value)
            assert "`tfdist run -n 2 --ps 1 train.py` starts" in str(error.value)

    def test_a_single_process(self):
        with pytest.raises(ClusterError, match=r"^Received: no cluster \(.*Expected: a chief, workers and parameter"):
            tfdist.ParameterServerStrategy()

    def test_wrong_arguments_in_a_cluster(self):
        """They are refused before anything waits for other processes."""
        with pytest.raises(ValueError, match=r"^Received: mode='fast'"):
            tfdist.ParameterServerStrategy(cluster=ClusterConfig(JOBS, "chief", 0), mode="fast")


@pytest.mark.parametrize(("mode", "times"), [("async", 0), ("sync", 1)])
def test_statistics_of_a_part_are_warned_of_once(mode, times):
    model = ready(keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization()]), "sgd", "mse")
    model.optimizer._distribution_strategy = strategy = types.SimpleNamespace(_mode=mode, _max_inflight=1)
    hooks = ParameterServerHooks(strategy)

    def check() -> None:
        with pytest.raises(ValueError, match=r"model variable '.*', created outside of strategy\.scope\(\)"):
            hooks.check(model)

    assert len(warned(lambda: [check(), check()], "the rows of one worker's part of a batch")) == times
