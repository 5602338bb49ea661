"""Parts of `ParameterServerStrategy` that need no cluster."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.branching_steps import Accumulates, LeavesOut, ReturnsNothing
from tests.logical import test_common_lookups
from tests.logical.test_layer_state import Centre, Keeping, moving_mean, running_total, whole_number
from tests.logical.test_row_trial import MinibatchDeviation, root
from tests.models import ready, warned
from tests.parameter_server.test_embedding_traffic import used_tables
from tfdist.cluster import ClusterConfig, ClusterError
from tfdist.compat.upstream import TFDatasetAdapter, coordinator_values
from tfdist.steps.local_values import LocalValues
from tfdist.strategies.hooks import install
from tfdist.strategies.parameter_server import data, synchronous
from tfdist.strategies.parameter_server.dispatcher import Worker
from tfdist.strategies.parameter_server.step import StepFunction, only_adds
from tfdist.strategies.parameter_server.strategy import (
    ParameterServerHooks,
    ServerVariable,
    check_arguments,
    find_cluster,
)

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

    @pytest.mark.parametrize("state", ["weights", "tf.Variable"])
    def test_state_after_the_update_is_refused(self, strategy, state):
        """A momentum encoder, say: gradients are applied after the step."""
        for late in (False, True):
            model = built(Following(late, state))
            trace = functools.partial(synchronous.GradientStep(strategy, model).single, self.SPEC)
            if not late:
                assert trace().state
                continue
            with pytest.raises(
                NotImplementedError, match=r"computes variable '.*(kernel|sum).*' from '.*' after optim"
            ):
                trace()

    def test_state_that_counts_updates_is_refused(self, strategy):
        model = built(Following(True, "iterations"))
        with pytest.raises(NotImplementedError, match=r"computes variable '.*seen' from '.*iteration' after optim"):
            synchronous.GradientStep(strategy, model).single(self.SPEC)

    @pytest.mark.parametrize("kind", [LeavesOut, ReturnsNothing, Accumulates])
    def test_gradients_of_a_branch_are_refused(self, strategy, kind):
        """Those of a step to leave out were applied."""
        model = built(kind())
        with pytest.raises(NotImplementedError, match="applies gradients in a branch"):
            synchronous.GradientStep(strategy, model).single(self.SPEC)

    @pytest.mark.parametrize("kind", [StepFunction, synchronous.GradientStep])
    def test_metrics_that_are_built_in_the_step(self, strategy, kind):
        model = built(Late())
        step = kind(strategy, model, *[model.train_step][: kind is StepFunction])
        trace = step.single(self.SPEC)
        assert {id(one) for one in model.f1.variables} <= {id(one) for one in step.variables}
        given = [tf.constant(0, tf.int64), tf.constant(1.0, tf.float64)] if kind is not StepFunction else []
        vectors = trace.function(*given, *map(tf.constant, self.ROWS))[0]
        added = dict(zip(map(id, step.variables), step._packing.unpack([one.numpy() for one in vectors]), strict=True))
        assert added[id(model.f1.true_positives)].tolist() == [8.0]
        assert model.f1.true_positives.numpy().tolist() == [0.0]

    @pytest.mark.parametrize("kind", [StepFunction, synchronous.GradientStep])
    @pytest.mark.parametrize(("uses", "times"), [("", 0), ("logs", 0), ("loss", 1), ("state", 1)])
    def test_results_that_change_variables_give_a_warning(self, strategy, kind, uses, times):
        model = built(Judging(uses))
        step = kind(strategy, model, *[model.train_step][: kind is StepFunction])
        said = warned(lambda: step.single(self.SPEC), "changes variables by the result of metric 'gap'")
        assert len(said) == times

    @pytest.mark.parametrize("kind", [StepFunction, synchronous.GradientStep])
    def test_a_metric_that_is_updated_in_a_branch_is_refused(self, strategy, kind):
        model = built(Branching())
        step = kind(strategy, model, *[model.train_step][: kind is StepFunction])
        with pytest.raises(NotImplementedError, match=r"^Received: variable '.*', assigned in a branch \(tf.cond\)"):
            step.single(self.SPEC)

    def test_a_frozen_table_is_read_by_rows(self, strategy):
        table = keras.layers.Embedding(5000, 2, trainable=False)
        model = keras.Sequential([keras.Input((4,)), table, keras.layers.Flatten(), keras.layers.Dense(1)])
        model = ready(model, keras.optimizers.SGD(0.1), "mse")
        model.train_on_batch(*self.ROWS)
        table.embeddings.__class__ = ServerVariable
        graph = synchronous.GradientStep(strategy, model).single(self.SPEC).function.graph
        assert used_tables(graph, 5000) == set()

    def test_variables_of_tensorflow_are_trained_and_summed(self, strategy):
        model = ready(Weighing(), keras.optimizers.SGD(0.1), "mse")
        model.build((None, 4))
        model.optimizer.build([*model.trainable_variables, model.weighing])
        trace = synchronous.GradientStep(strategy, model).single(self.SPEC)
        assert len(trace.gradients.specs) == 1 and [one.name for one in trace.state] == ["seen:0"]
        assert synchronous._combined(model.seen, [np.float32(5), np.float32(3)], [5 / 8, 3 / 8]) == 8

    @pytest.mark.parametrize(
        ("make", "times"),
        [
            (lambda: Keeping((4,), moving_mean), 0),
            (lambda: Keeping((4,), running_total), 1),
            (lambda: Keeping((4,), running_total, aggregation="sum"), 0),
            (lambda: Keeping((4,), whole_number, dtype="int32"), 1),
            (lambda: behind_dropout(tf.reduce_mean), 0),
            (lambda: behind_dropout(tf.reduce_max), 1),
        ],
    )
    def test_state_that_is_no_mean_is_told(self, strategy, make, times):
        model = ready(make(), keras.optimizers.SGD(0.1), "mse")
        model.train_on_batch(*self.ROWS)
        step = synchronous.GradientStep(strategy, model)
        said = warned(lambda: [step.single(self.SPEC), step._trace(self.SPEC)], "Received: variable ")
        assert len(said) == times
        for message in said:
            assert "/kept', which each worker updates from its own rows" in message
            assert "not for queues of rows, counts or maxima" in message

    def test_float8_is_refused(self, strategy):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(16), keras.layers.Dense(1)])
        model.layers[0].quantize("float8")
        with pytest.raises(NotImplementedError, match=r"is overwritten with its gradient \(float8 scaling factors\)"):
            synchronous.GradientStep(strategy, built(model)).single(self.SPEC)

    @pytest.mark.usefixtures("in_float64", "on_this_device")
    @pytest.mark.parametrize(
        ("name", "is_known", "least"),
        [
            *((name, True, 0.0) for name in test_common_lookups.KINDS),
            *((name, False, least) for name, least in test_common_lookups.UNKNOWN.items()),
        ],
    )
    def test_rows_that_all_shards_look_up(self, strategy, monkeypatch, name, is_known, least):
        """Keras squares slices one by one."""
        if not is_known:
            monkeypatch.setattr(LocalValues, "is_of_no_row", lambda self, value: False)
        model, expected = (test_common_lookups.build(name, "adam") for _ in range(2))
        x, y = test_common_lookups.X[:7], test_common_lookups.Y[:7]
        for one in (model, expected):
            one.train_on_batch(x, y)
        step = synchronous.GradientStep(strategy, model)
        trace = step.single((tf.TensorSpec([None, *model.input_shape[1:]], x.dtype), tf.TensorSpec([None, 1], y.dtype)))
        weights = [4 / 7, 3 / 7]
        for _ in range(3):
            expected.train_on_batch(x, y)
            done = []
            for i, rows in enumerate((slice(4), slice(4, 7))):
                shard = tf.constant(i, tf.int64), tf.constant(weights[i], tf.float64)
                outputs = trace.function(*shard, tf.constant(x[rows]), tf.constant(y[rows]))
                done.append(step.shard_outcome(trace, outputs))
            step.apply(trace, done, weights)
        pairs = zip(model.get_weights(), expected.get_weights(), strict=True)
        gap = max(float(np.max(np.abs(one - other))) for one, other in pairs)
        assert gap < 1e-9 if is_known else gap > least

    @pytest.mark.parametrize(
        ("parts", "whole"),
        [
            ([[0.0, 1.0], [2.0]], [0.0, 1.0, 2.0]),
            ([[[1], [2]], [[3]]], [[1], [2], [3]]),
            ([[0, 1, 2, 3], [4, 5]], [0, 1, 2, 3, 4, 5]),
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


def built(model: keras.Model) -> keras.Model:
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.build((None, 4))
    model.optimizer.build(model.trainable_variables)
    return model


def behind_dropout(of_rows: Callable) -> keras.Model:
    return keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5), Centre(of_rows), keras.layers.Dense(1)])


class Following(keras.Model):
    """Its `train_step` keeps something of its weights, before it updates them or after."""

    def __init__(self, late: bool, state: str) -> None:
        super().__init__()
        self.online, self.target = keras.layers.Dense(1), keras.layers.Dense(1, trainable=False)
        self.sum = tf.Variable(0.0, trainable=False, name="sum")
        self.late, self.state = late, state

    def build(self, shape: tuple) -> None:
        self.online.build(shape)
        self.target.build(shape)
        self.seen = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False, name="seen")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.online(x) + 0.1 * self.target(x)

    def follow(self) -> None:
        if self.state == "iterations":
            self.seen.assign(tf.cast(self.optimizer.iterations.value, "int64"))
        elif self.state == "weights":
            for slow, fast in zip(self.target.weights, self.online.weights, strict=True):
                slow.assign(0.9 * slow + 0.1 * fast)
        else:
            self.sum.assign(tf.reduce_sum(self.online.kernel.value))

    def train_step(self, data: tuple) -> dict:
        if not self.late:
            self.follow()
        logs = super().train_step(data)
        # What it reads only to log is as it was.
        logs["kernel"] = tf.reduce_sum(self.online.kernel.value)
        if self.late:
            self.follow()
        return logs


class Late(keras.Model):
    """Its metric makes its variables when it is updated first."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.f1 = keras.layers.Dense(1), keras.metrics.F1Score(threshold=0.5, name="f1")

    def build(self, shape: tuple) -> None:
        self.dense.build(shape)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.dense(x)

    def train_step(self, data: tuple) -> dict:
        self.f1.update_state(data[1], tf.ones_like(data[1]))
        return super().train_step(data)


class Judging(Late):
    """Its `train_step` uses the result of a metric."""

    def __init__(self, uses: str) -> None:
        super().__init__()
        self.gap, self.uses = keras.metrics.Mean(name="gap"), uses

    def build(self, shape: tuple) -> None:
        super().build(shape)
        self.kept = self.add_weight(shape=(), initializer="zeros", trainable=False, name="kept")

    def train_step(self, data: tuple) -> dict:
        x, y = data
        self.gap.update_state(tf.abs(y - self(x)))
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
            if self.uses == "loss":
                loss *= self.gap.result()
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        if self.uses == "state":
            self.kept.assign(self.gap.result())
        return {"root": tf.sqrt(self.gap.result())} if self.uses == "logs" else {"loss": loss}


class Branching(Late):
    """Its `train_step` updates a metric in a branch."""

    def train_step(self, data: tuple) -> dict:
        logs = super().train_step(data)
        tf.cond(data[0][0, 0] > 0, lambda: self.f1.update_state(*data[1:] * 2), lambda: None)
        return logs


class Weighing(keras.Model):
    """A variable of TensorFlow's weighs the loss, and is trained; another one counts rows."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.weighing = tf.Variable(0.0, name="weighing")
        self.seen = tf.Variable(0.0, trainable=False, name="seen", aggregation=tf.VariableAggregation.SUM)

    def build(self, shape: tuple) -> None:
        self.dense.build(shape)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.dense(x)

    def train_step(self, data: tuple) -> dict:
        x, y = data
        self.seen.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
        with tf.GradientTape() as tape:
            loss = tf.exp(-self.weighing) * self.compute_loss(x, y, self(x)) + self.weighing
        variables = [*self.trainable_variables, self.weighing]
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


@pytest.mark.parametrize("value", [1.0, [1.0, 2.0]])
@pytest.mark.parametrize("method", ["assign_add", "assign_sub"])
@pytest.mark.parametrize("wrap", [tf.function, lambda function: function])
def test_a_change_returns_the_new_value(method, value, wrap):
    found = []
    for kind in (keras.Variable, ServerVariable):
        variable = keras.Variable([5.0, 6.0])
        variable.__class__ = kind
        change = wrap(functools.partial(getattr(variable, method), value))
        found.append([[change().numpy().tolist(), variable.numpy().tolist()] for _ in range(2)])
    assert found[0] == found[1]


@pytest.fixture
def on_this_device(monkeypatch):
    monkeypatch.setattr(data, "COORDINATOR", "/device:CPU:0")


class TestData:
    @pytest.fixture
    def rows(self):
        return tf.data.Dataset.range(20)

    @pytest.mark.parametrize(
        ("change", "first"),
        [(lambda rows: rows, 7), (lambda rows: rows.filter(lambda i: i >= 0), 7), (lambda rows: rows.repeat(), 0)],
    )
    def test_another_worker_begins_endless_data_again(self, on_this_device, rows, change, first):
        """To read what a training of days has used would take as long."""
        (shard,) = data.WorkerDataset([change(rows)]).shards()
        shard.done = 7
        assert int(next(shard.iterator_on(Worker(1, "/device:CPU:0")))) == first

    def test_epochs_of_a_worker_are_those_of_one_process(self, on_this_device):
        """Each is shuffled otherwise, and a later one reads what the first has cached."""

        def epochs(epoch):
            return [[int(i) for i in epoch()] for _ in range(3)]

        rows, worker = tf.data.Dataset.range(20).shuffle(20, seed=1), Worker(1, "/device:CPU:0")
        sent = data.WorkerDataset([tf.data.Dataset.range(20).shuffle(20, seed=1)])
        found = epochs(lambda: sent.shards()[0].iterator_on(worker))
        assert found == epochs(lambda: rows) and found[0] != found[1] != found[2]
        drawn = data.WorkerDataset([rows.map(lambda i: tf.random.uniform([], maxval=1000, dtype=tf.int32)).cache()])
        found = epochs(lambda: drawn.shards()[0].iterator_on(worker))
        assert found[0] == found[1] == found[2]

    @pytest.mark.parametrize(
        "change",
        [
            lambda rows: rows.map(lambda i: tf.random.uniform([2]) + tf.cast(i, tf.float32)),
            lambda rows: rows.map(lambda i: tf.image.random_flip_left_right(tf.zeros([4, 4, 3]))),
            lambda rows: rows.shuffle(7).cache().shuffle(7).batch(2).prefetch(2).repeat(),
            lambda rows: rows.interleave(lambda i: tf.data.Dataset.range(i).shuffle(3)).map(
                lambda i: tf.cond(tf.random.uniform([]) > 0.5, lambda: i, lambda: -i)
            ),
        ],
    )
    def test_workers_draw_random_numbers(self, on_this_device, rows, change):
        (shard,) = data.WorkerDataset([change(rows)]).shards()
        next(shard.iterator_on(Worker(1, "/device:CPU:0")))

    @pytest.fixture(params=[None, 3])
    def seed_of_program(self, request):
        tf.random.set_seed(request.param)
        yield
        tf.random.set_seed(None)

    @pytest.mark.parametrize(
        ("change", "times"),
        [
            (lambda rows, of_worker: of_worker(rows).shuffle(9), 0),
            (lambda rows, of_worker: of_worker(rows.shuffle(9, seed=2)).shuffle(9), 0),
            (lambda rows, of_worker: of_worker(rows.shuffle(9)), 1),
            (lambda rows, of_worker: of_worker(tf.data.Dataset.list_files(__file__)).interleave(lambda i: rows), 1),
        ],
    )
    def test_shards_of_different_orders_give_a_warning(self, rows, seed_of_program, change, times):
        def of_worker(context):
            part = functools.partial(tf.data.Dataset.shard, num_shards=2, index=context.input_pipeline_id)
            return change(rows, part).batch(2)

        said = warned(lambda: data.shards_of_function(of_worker, 2), "shards rows or files behind a shuffle")
        assert len(said) == times

    @pytest.mark.parametrize(
        "change",
        [
            lambda rows: rows.map(lambda i: tf.numpy_function(lambda x: x + 1, [i], tf.int64)),
            lambda rows: rows.map(lambda i: tf.random.uniform([]) + tf.py_function(lambda: 0.0, [], tf.float32)),
            lambda rows: rows.map(functools.partial(lambda count, i: count.assign_add(1), tf.Variable(0))),
        ],
    )
    def test_what_is_of_this_process_cannot_be_sent(self, rows, change):
        with pytest.raises(ValueError, match=r"^Received: a dataset that cannot be sent to the workers"):
            data.WorkerDataset([change(rows)]).shards()

    @pytest.mark.parametrize(
        ("make", "text"),
        [
            (lambda rows: data.CoordinatorDataset(rows, print), "experimental_distribute_dataset returns"),
            (lambda rows: data.WorkerDataset([rows]), "distribute_datasets_from_function returns"),
        ],
    )
    def test_what_a_coordinator_is_given(self, rows, make, text):
        with pytest.raises(ValueError, match=f"Received: what strategy.{text}, for create_per_worker_dataset"):
            coordinator_values.get_per_worker_dataset(make(rows), None)

    @pytest.mark.parametrize(
        ("make", "shards"),
        [
            (lambda rows: data.CoordinatorDataset(rows, print), lambda given: [given.source]),
            (lambda rows: data.WorkerDataset([rows]), lambda given: given._datasets),
        ],
    )
    def test_class_weights(self, make, shards):
        rows = tf.data.Dataset.from_tensor_slices((np.zeros((4, 1)), np.array([0, 1, 2, 1]))).batch(4)
        given = TFDatasetAdapter(make(rows), class_weight={0: 1.0, 1: 2.0, 2: 5.0}).get_tf_dataset()
        assert type(given) is type(make(rows))
        (source,) = shards(given)
        *_, weights = next(iter(source))
        assert weights.numpy().tolist() == [1.0, 2.0, 5.0, 2.0]


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
