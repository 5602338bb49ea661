"""Parts of `ParameterServerStrategy` that need no cluster."""

from __future__ import annotations

import functools
import types

import keras
import pytest
import tensorflow as tf

import tfdist
from tests.models import ready, warned
from tfdist.cluster import ClusterConfig, ClusterError
from tfdist.strategies.parameter_server import synchronous
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
