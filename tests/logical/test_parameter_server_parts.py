"""Parts of `ParameterServerStrategy` that need no cluster."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework.none_tensor import NoneTensorSpec

import tfdist
from tfdist.cluster import ClusterConfig, ClusterError
from tfdist.strategies.parameter_server import batches, synchronous
from tfdist.strategies.parameter_server.captured_state import CapturedState, only_adds
from tfdist.strategies.parameter_server.connection import find, resolver
from tfdist.strategies.parameter_server.transfer import Packing
from tfdist.strategies.parameter_server.validation import check_arguments
from tfdist.strategies.parameter_server.variables import ServerVariable, adopt

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


class TestPacking:
    def test_there_and_back(self):
        shapes, dtypes = [(2, 3), (), (4,), (0, 2)], [tf.float32, tf.int64, tf.float32, tf.float32]
        parts = zip(shapes, dtypes, strict=True)
        arrays = [np.arange(int(np.prod(s)), dtype=d.as_numpy_dtype).reshape(s) + 7 for s, d in parts]
        packing = Packing(shapes, dtypes)
        vectors = packing.pack([tf.constant(array) for array in arrays])
        assert len(vectors) == 2
        assert [(v.dtype, v.shape.as_list()) for v in vectors] == [(tf.float32, [10]), (tf.int64, [1])]
        for unpacked in (packing.unpack(vectors), packing.unpack([vector.numpy() for vector in vectors])):
            for array, again in zip(arrays, unpacked, strict=True):
                np.testing.assert_array_equal(array, again)
                assert array.dtype == again.dtype

    def test_nothing(self):
        packing = Packing([], [])
        assert packing.length == 0 and packing.pack([]) == [] and packing.unpack([]) == []


class TestBatches:
    SPEC = ({"a": tf.TensorSpec([8, 2]), "b": tf.RaggedTensorSpec([None, None])}, None, tf.TensorSpec([]))

    def test_any_rows(self):
        spec = batches.any_rows(self.SPEC)
        assert spec[0]["a"] == tf.TensorSpec([None, 2]) and spec[2] == tf.TensorSpec([])
        assert spec[0]["b"] == self.SPEC[0]["b"] and spec[1] is None

    def test_batch_spec(self):
        dataset = tf.data.Dataset.from_tensor_slices(np.zeros((4, 2), "float32")).batch(2)
        assert batches.batch_spec((dataset.element_spec, NoneTensorSpec())) == (tf.TensorSpec([None, 2]), None)

    def test_spec_of(self):
        spec = batches.spec_of((np.zeros((3, 2), "int32"), None, 5.0))
        assert spec == (tf.TensorSpec([None, 2], tf.int32), None, tf.TensorSpec([]))

    def test_flatten_and_unflatten(self):
        ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
        batch = ({"a": tf.ones([8, 2]), "b": ragged}, None, tf.constant(3.0))
        tensors = batches.flatten(batch)
        assert [t.shape.as_list() for t in tensors] == [[8, 2], [3], [3], []]
        assert len(batches.flatten_spec(self.SPEC)) == 4
        again = batches.unflatten(self.SPEC, tensors)
        assert again[0]["b"].to_list() == ragged.to_list() and again[1] is None
        np.testing.assert_array_equal(again[0]["a"], batch[0]["a"])

    def test_what_can_be_cut_by_rows(self):
        assert not batches.is_dense(self.SPEC)
        assert batches.is_dense((tf.TensorSpec([None]), None))
        assert batches.rows_of([tf.zeros([3, 2]), tf.zeros([3])]) == 3
        for tensors in ([tf.zeros([3]), tf.zeros([2])], [tf.zeros([3]), tf.zeros([])], []):
            assert batches.rows_of(tensors) is None

    def test_ahead_and_drawn(self):
        iterator = batches.BatchIterator(tf.data.Dataset.range(10).batch(3), steps=3)
        assert iterator.look_ahead(1)[0].numpy().tolist() == [3, 4, 5]
        assert next(iterator).numpy().tolist() == [0, 1, 2]
        assert iterator.look_ahead(2) is None  # Keras will ask for three batches only
        assert [batch[0].numpy().tolist() for batch in iterator.draw(9)] == [[3, 4, 5], [6, 7, 8], [9]]
        with pytest.raises(StopIteration):
            iterator.draw(1)


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

    def test_logs(self):
        first, second = [np.float32(1.0), np.int64(3)], [np.float32(5.0), np.int64(4)]
        mean, last = synchronous._means([first, second], [0.25, 0.75])
        assert (mean, mean.dtype, last, last.dtype) == (4.0, np.float32, 4, np.int64)


class TestCapturedState:
    def test_captured_and_others(self):
        inside, outside = keras.Variable(1.0), keras.Variable(10.0)
        with CapturedState([inside], [tf.constant(5.0)]) as state:
            inside.assign_add(1.0)
            inside.assign(2.0 * inside)
            outside.assign_add(1.0)
            assert state.holds(inside) and not state.holds(outside)
            assert float(outside.value) == 11.0
        assert float(state.values()[0]) == 12.0
        assert (float(inside.numpy()), float(outside.numpy())) == (1.0, 11.0)

    def test_losses_of_layers_are_collected(self):
        layer = keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.5), kernel_initializer="ones")
        layer.build((None, 2))
        with CapturedState([], []):
            assert float(sum(layer.losses)) == 1.0


class TestServerVariable:
    def test_additions_and_rows(self):
        variable = keras.Variable(np.arange(6.0).reshape(3, 2))
        adopt([variable])
        assert type(variable) is ServerVariable
        variable.assign_add(np.ones((3, 2)))
        variable.assign_sub(2 * np.ones((3, 2)))
        assert variable.numpy().tolist() == [[-1, 0], [1, 2], [3, 4]]
        assert tf.gather(variable, [2, 0]).numpy().tolist() == [[3, 4], [-1, 0]]

    def test_other_classes_are_left_alone(self):
        class Own(keras.Variable):
            pass

        variable = Own(1.0)
        adopt([variable])
        assert type(variable) is Own

    def test_in_a_stateless_scope(self):
        variable = keras.Variable([1.0, 2.0])
        adopt([variable])
        with keras.StatelessScope() as scope:
            variable.assign_add([1.0, 1.0])
            variable.assign_sub([3.0, 3.0])
            assert variable.sparse_read([1]).numpy().tolist() == [0.0]
        assert scope.get_current_value(variable).numpy().tolist() == [-1.0, 0.0]
        assert variable.numpy().tolist() == [1.0, 2.0]


class TestMistakes:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"mode": "fast"}, "Received: mode='fast'. Expected: 'async', in which each worker's gradient"),
            ({"max_inflight": 0}, "Received: max_inflight=0. Expected: at least 1"),
            ({"backup_workers": 2, "mode": "sync"}, "Received: backup_workers=2 of 2 workers. Expected: 0 or more"),
            ({"backup_workers": -1, "mode": "sync"}, "Received: backup_workers=-1 of 2 workers."),
            ({"mode": "sync", "worker_input": True}, "Received: mode='sync' and worker_input=True."),
            ({"backup_workers": 1}, "Received: mode='async' and backup_workers=1. Nobody waits for the slowest"),
        ],
    )
    def test_arguments(self, arguments, message):
        right = {"mode": "async", "max_inflight": None, "worker_input": False, "backup_workers": 0, "workers": 2}
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
        for function in (functools.partial(find, start_timeout=1.0), tfdist.ParameterServerStrategy):
            with pytest.raises(ClusterError) as error:
                function(cluster=cluster)
            assert str(error.value).startswith(f"Received: {text}")
            assert "Expected: a chief, which runs the program, at least one worker" in str(error.value)
            assert "`tfdist run -n 2 --ps 1 train.py` starts" in str(error.value)

    def test_a_single_process(self):
        with pytest.raises(ClusterError, match=r"^Received: no cluster \(.*Expected: a chief, workers and parameter"):
            tfdist.ParameterServerStrategy()

    def test_the_evaluator(self):
        with pytest.raises(ClusterError, match=r"^Received: task evaluator 0\. Expected: chief, worker or ps"):
            find(ClusterConfig(JOBS, "evaluator", 0), start_timeout=1.0)

    def test_wrong_arguments_in_a_cluster(self):
        """They are refused before anything waits for other processes."""
        with pytest.raises(ValueError, match=r"^Received: mode='fast'"):
            tfdist.ParameterServerStrategy(cluster=ClusterConfig(JOBS, "chief", 0), mode="fast")

    def test_resolver(self):
        found = resolver(ClusterConfig(JOBS, "chief", 0))
        assert found.cluster_spec().as_dict() == {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}
        assert (found.task_type, found.task_id) == ("chief", 0)
