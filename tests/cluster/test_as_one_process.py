"""What two processes do as one does, beside the rows of the feature table; one start of TensorFlow for all sections."""

from __future__ import annotations

import functools
import hashlib
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import branching_steps, metric_sums, own_loops, unlike_replicas
from tests.cluster.attempt import attempt, found_on
from tests.cluster.counting import EPOCHS, ROWS, SIZE, times_seen
from tests.cluster.readings import Model, readings, trained
from tests.logical import test_clear_session as clearing
from tests.logical import test_outside_of_the_scope as outside
from tests.logical import test_row_trial as row_trial
from tests.predicted_values import OUTPUTS, X, assert_same, listed, own_loop, predictions
from tests.tiers import daily
from tfdist.steps import reduce
from tfdist.strategies.data_parallel import replica_step
from tfdist.testing import run_local
from tools.fit_files import files_of_fit

_DEADLINE = 1200
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(_DEADLINE + 30)]

DTYPES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64"),
]


def reading_inside_and_outside(strategy: Any, one: Any, folder: Path) -> None:
    """In scripts that do everything inside: only rank 0 reads while the others wait, and no reading may need them."""
    keras.utils.clear_session()  # names without a counter
    alone = readings(trained())
    keras.utils.clear_session()
    with strategy.scope():
        model: Model = trained()
        inside = readings(model) if strategy.is_chief else {}
    outside = readings(model) if strategy.is_chief else {}
    strategy._peers.gather("test", None, "read")
    for name, found in inside.items():
        expected = found_on([alone], 0, name)
        assert found == outside[name], name
        if isinstance(expected, str):
            assert found == expected
        else:
            assert [np.shape(value) for value in found] == [np.shape(value) for value in expected], name
            for value, own in zip(found, expected, strict=True):
                np.testing.assert_allclose(value, own, atol=1e-5, err_msg=name)


def loops_of_ones_own(strategy: Any, one: Any, folder: Path) -> None:
    for name, compiled in (("Adam", True), ("loss scaling", True), ("global_clipnorm", True), ("clipnorm", False)):
        expected = own_loops.train(one, name, compiled=True)
        np.testing.assert_allclose(own_loops.train(strategy, name, compiled), expected, atol=2e-6, err_msg=name)
    for compiled in (True, False):
        first, second = strategy._peers.gather("masks", own_loops.masks(strategy, compiled), "tell its masks")
        assert first != second


def optimizers_in_branches(strategy: Any, one: Any, folder: Path) -> None:
    for name in branching_steps.KINDS:
        expected = branching_steps.train(one, name)
        np.testing.assert_allclose(branching_steps.train(strategy, name), expected, atol=2e-6, err_msg=name)


def layers_that_python_leaves_out(strategy: Any, one: Any, folder: Path) -> None:
    unlike_layers(strategy, one, ("one of two", "an expert for some rows, eager", "an embedding for one"))
    # The negative control: gradients that meet by their places.
    agree = replica_step.agree
    by_place = mock.patch.object(replica_step, "agree", lambda *args: (agree(*args), args[2:])[1])
    with by_place, pytest.raises(RuntimeError, match=r"different weights after epoch 1\. .*chooses"):
        unlike_replicas.train(strategy, "one of two")
    model = unlike_replicas.make(strategy, unlike_replicas.APART)
    with pytest.raises(
        NotImplementedError, match=r"on worker 0 .* and worker 1 .*layer '.*normalization' and the other"
    ):
        model.fit(unlike_replicas.X, unlike_replicas.Y, batch_size=8, verbose=0)


def more_layers_that_python_leaves_out(strategy: Any, one: Any, folder: Path) -> None:
    unlike_layers(strategy, one, unlike_replicas.KINDS)


def unlike_layers(strategy: Any, one: Any, names: Iterable[str]) -> None:
    for name in names:
        found, said = unlike_replicas.train(strategy, name)
        expected, _ = unlike_replicas.train(one, name)
        assert unlike_replicas.difference(found, expected) < 2e-5, name
        # The chief says it, and not of what the data choose in each step.
        chosen_for_good = "eager" not in name and name not in ("each weight twice", "in a tf.function")
        assert len(said) == (chosen_for_good and strategy.is_chief), (name, said)
        assert all("on worker 0" in one and "than on worker 1" in one for one in said), said


class WideRows(keras.Model):
    """Calls one more layer, which keeps a moving mean, where rows are wide, or of a size that Keras leaves open."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.more = keras.layers.Dense(1), unlike_replicas.Moves()

    def build(self, shape: Any) -> None:
        self.first.build((None, 6))
        self.more.build((None, 6))

    @classmethod
    def built_for_narrow(cls) -> keras.Model:
        model = cls()
        model.build((None, 6))
        model.built = True
        return model

    def call(self, x: Any, training: bool = False) -> Any:
        narrow = x[:, :6]
        return self.first(narrow if x.shape[1] == 6 else self.more(narrow, training=training))


def layers_by_the_size_of_rows(strategy: Any, one: Any, folder: Path) -> None:
    """All processes trace such a step once more, with other gradients and state."""
    x = np.random.default_rng(0).normal(size=(8, 10)).astype("float32")
    found = []
    for each in (strategy, one):
        model = unlike_replicas.make(each, WideRows.built_for_narrow)
        for size in (6, 10, 6):
            model.train_on_batch(x[:, :size], x[:, :1])
        found.append([v.numpy() for v in model.trainable_variables])
        rate = 0.1 if each is strategy else 0.05  # see Moves
        (kept,) = model.non_trainable_variables
        np.testing.assert_allclose(kept, rate * x[:, :6].mean(0), atol=1e-6)
    assert unlike_replicas.difference(found[0], found[1]) < 2e-5


def loops_that_one_rank_traces_again(strategy: Any, one: Any, folder: Path) -> None:
    """A `train_step` in a loop of one's own: rank 1 has batches of another shape, and asks nobody once more."""
    model = unlike_replicas.make(strategy, unlike_replicas.KINDS["one of two"][0])
    traced = []

    @tf.function
    def step(x: Any, y: Any) -> Any:
        traced.append(x.shape)
        return strategy.run(model.train_step, args=((x, y),))

    for rows in (4, 4, 6 if strategy.is_chief else 4, 4):
        step(tf.constant(unlike_replicas.X[:rows]), tf.constant(unlike_replicas.Y[:rows]))
    assert len(set(traced)) == (2 if strategy.is_chief else 1)
    weights = [np.asarray(w, "float64").tolist() for w in model.get_weights()]
    first, second = strategy._peers.gather("weights", weights, "tell its weights")
    assert first == second


def sums_that_are_assigned(strategy: Any, one: Any, folder: Path) -> None:
    for name in metric_sums.WAYS:
        metric_sums.read_back(strategy, name, folder / str(strategy._peers.rank))
    assert metric_sums.iou_of_a_callback(strategy) == metric_sums.iou_of_a_callback(one)


def finished_outside_of_the_scope(strategy: Any, one: Any, folder: Path) -> None:
    for name in ("names", "a head", "enable_lora"):
        for ours, theirs in zip(outside.trained(strategy, name), outside.trained(None, name), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


def folds_that_clear_the_session(strategy: Any, one: Any, folder: Path) -> None:
    expected = clearing.folds(one, clears=False)
    for ours, theirs in zip(clearing.folds(strategy, clears=True), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def steps_that_mix_rows(strategy: Any, one: Any, folder: Path) -> None:
    """What is exchanged for metrics must not stop the trials."""
    for name, (_, _, expected) in row_trial.CALLS.items():
        found = row_trial.said(strategy, name)
        assert len(found) == len(expected) and all(map(str.__contains__, found, expected)), (name, found)


def values_that_are_predicted(strategy: Any, one: Any, folder: Path) -> None:
    """All dtypes, text, ragged and sparse tensors, no rows."""
    loops = ["bfloat16", "text", "ragged", "sparse", "no rows are kept"]
    names = ["bool", "text", "ragged without values", "sparse", "constants"]
    names += ["moved rows", "no rows are kept", "of means and sums"]
    found, expected = (predictions(each, names) for each in (strategy, one))
    for name in names:
        assert_same(found[name], expected[name], name)
    rows = tf.constant(X[: 2 * strategy.num_replicas_in_sync])
    assert own_loop(strategy, loops) == {name: listed(OUTPUTS[name](rows)) for name in loops}
    with strategy.scope():
        mixed = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, dtype="mixed_bfloat16")])
        mixed.compile("sgd", "mse")
    last_layer = mixed.predict(X, batch_size=4, verbose=0)
    assert (last_layer.dtype.name, last_layer.shape) == ("bfloat16", (11, 3))


def initial_values_of_the_chief(strategy: Any, one: Any, folder: Path) -> None:
    """Of every dtype, whatever the others' own were; and what a quantized model with LoRA trains."""
    own = 1 - strategy._peers.rank  # the chief has 1
    for dtype in DTYPES:
        with strategy.scope():
            variable = tf.Variable(tf.cast([[own, 1]], dtype))
        assert variable.dtype == dtype
        assert np.asarray(tf.cast(variable, "complex128")).real.tolist() == [[1.0, 1.0]], dtype
    keras.utils.set_random_seed(1 + own)
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(1)])
        model.quantize("int8")
        model.layers[0].enable_lora(2)
        model.compile("sgd", "mse")
    rows = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
    losses = model.fit(rows, rows[:, :1], batch_size=8, epochs=2, verbose=0).history["loss"]
    assert losses[1] < losses[0]
    weights = [np.asarray(w, "float64").tolist() for w in model.get_weights()]
    first, second = strategy._peers.gather("weights", weights, "tell its weights")
    assert first == second


def terminate_on_nan(strategy: Any, one: Any, folder: Path) -> None:
    """What one process sees stops all of them."""
    x, y = np.ones((48, 2), "float32"), np.ones((48, 1), "float32")
    for epochs in (3, 1):
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        callbacks = [keras.callbacks.TerminateOnNaN()]
        history = model.fit(x, y, batch_size=12, epochs=3, shuffle=False, callbacks=callbacks, verbose=0)
        assert len(history.epoch) == epochs
        y[46] = np.nan  # of the last batch, in the half that rank 1 has


def shards_of_files(strategy: Any, one: Any, folder: Path) -> None:
    """Every worker reads its own files, and every row is trained on equally often."""
    files = [str(folder / f"{i}.txt") for i in range(2)]
    for i, path in enumerate(files if strategy.is_chief else []):
        Path(path).write_text("\n".join(map(str, range(i * ROWS // 2, (i + 1) * ROWS // 2))) + "\n")
    strategy._peers.gather("files", None, "write")
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE

    def parse(line: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.one_hot(tf.strings.to_number(line, tf.int32), ROWS), tf.zeros([1])

    dataset = tf.data.TextLineDataset(files).map(parse).batch(SIZE).with_options(options)
    assert times_seen(strategy, dataset) == pytest.approx([EPOCHS] * ROWS)


def other_rows_on_each_worker(strategy: Any, one: Any, folder: Path) -> None:
    """Workers take 8 and 4 rows of each 12: each row counts the same, whoever knows his number while tracing."""
    x = np.random.default_rng(0).normal(size=(36, 5)).astype("float32")
    y = x[:, :1] * 2 + 1
    takes = [(0, 8), (8, 12)]

    def of_worker(fixed: list[bool], context: tf.distribute.InputContext) -> tf.data.Dataset:
        first, last = takes[context.input_pipeline_id]
        rows = [each.reshape(3, 12, -1)[:, first:last].reshape(-1, each.shape[1]) for each in (x, y)]
        pieces = tf.data.Dataset.from_tensor_slices(tuple(rows)).repeat()
        return pieces.batch(last - first, drop_remainder=fixed[context.input_pipeline_id])

    def trained(strategy: Any, data: Callable[[], Any], eagerly: bool = False) -> list[np.ndarray]:
        with strategy.scope():
            keras.utils.set_random_seed(1)
            model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=eagerly)
        history = model.fit(data(), steps_per_epoch=3, epochs=2, verbose=0).history["loss"]
        return [*model.get_weights(), np.array(history)]

    expected = trained(one, lambda: tf.data.Dataset.from_tensor_slices((x, y)).batch(12).repeat())
    for fixed, eagerly in [([True, True], False), ([True, False], False), ([True, True], True)]:
        read = functools.partial(of_worker, fixed)
        found = trained(strategy, lambda read=read: strategy.distribute_datasets_from_function(read), eagerly)
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-6, err_msg=f"{fixed} {eagerly}")


def workers_without_rows(strategy: Any, one: Any, folder: Path) -> None:
    """The second worker's data end first: kernels and layers that fail without rows never see that it has none."""
    layers, random = keras.layers, np.random.default_rng(0)

    def convolutions() -> Any:
        hidden = [layers.Conv2D(16, 3, activation="relu"), layers.BatchNormalization(), layers.MaxPooling2D()]
        hidden += [layers.Conv2D(32, 3, activation="relu"), layers.Flatten()]
        return keras.Sequential([keras.Input((16, 16, 1)), *hidden, layers.Dense(2)])

    def sequences() -> Any:
        hidden = [layers.Embedding(9, 4, mask_zero=True), layers.LSTM(3), layers.LayerNormalization()]
        return keras.Sequential([keras.Input((None,), dtype="int32"), *hidden, layers.Dense(2)])

    class RowSums(keras.Model):
        def build(self, shape: tuple) -> None:
            self.out = layers.Dense(2)
            self.out.build((None, 1))

        def call(self, x: Any) -> Any:
            return self.out(tf.cast(tf.reduce_sum(x, axis=1)[:, None], "float32") / 20)

    def sparse() -> Any:
        return keras.Sequential([keras.Input((5,), sparse=True), layers.Dense(2)])

    tokens = random.integers(1, 9, (32, 5)).astype("int32")
    cases = {
        "images": (convolutions, random.normal(size=(32, 16, 16, 1)).astype("float32")),
        "images, eagerly": (convolutions, random.normal(size=(32, 16, 16, 1)).astype("float32")),
        "sequences": (sequences, tokens),
        "ragged": (RowSums, tf.RaggedTensor.from_tensor(tokens, lengths=random.integers(1, 6, 32))),
        "sparse": (sparse, tf.sparse.from_dense(np.where(tokens > 5, tokens, 0).astype("float32") / 9)),
    }
    y = random.normal(size=(32, 2)).astype("float32")

    def model_of(strategy: Any, build: Callable[[], Any], eagerly: bool = False) -> Any:
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = build()
            model.compile(keras.optimizers.SGD(0.002), "mse", jit_compile=False, run_eagerly=eagerly)
        return model

    def taken(x: Any, chosen: list[int]) -> Any:
        if isinstance(x, tf.SparseTensor):
            return tf.sparse.from_dense(tf.gather(tf.sparse.to_dense(x), chosen))
        return tf.gather(x, chosen)

    for name, (build, x) in cases.items():
        # Batches of 4 rows: five of the first worker, three of the second one.
        def of_worker(context: tf.distribute.InputContext, x: Any = x) -> tf.data.Dataset:
            whole = tf.data.Dataset.from_tensor_slices((x, y))
            own = whole.take(20) if context.input_pipeline_id == 0 else whole.skip(20)
            return own.filter(lambda *_: True).batch(4)

        expected = model_of(one, build)
        batches = [[*range(4 * i, 4 * i + 4), *range(20 + 4 * i, min(32, 24 + 4 * i))] for i in range(5)]
        losses = [expected.train_on_batch(taken(x, batch), y[batch], return_dict=True)["loss"] for batch in batches]
        found = model_of(strategy, build, eagerly=name == "images, eagerly")
        (loss,) = found.fit(strategy.distribute_datasets_from_function(of_worker), verbose=0).history["loss"]
        assert loss == pytest.approx(np.average(losses, weights=list(map(len, batches))), abs=1e-5), name
        for ours, theirs in zip(found.get_weights(), expected.get_weights(), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5, err_msg=name)
        losses = [expected.test_on_batch(taken(x, batch), y[batch]) for batch in batches]
        loss = found.evaluate(strategy.distribute_datasets_from_function(of_worker), verbose=0)
        assert loss == pytest.approx(np.average(losses, weights=list(map(len, batches))), abs=1e-5), name


def bytes_from_the_chief(strategy: Any, one: Any, folder: Path) -> None:
    """In chunks of 1000."""
    for size in (0, 1, 2, 1999, 2000, 2001, 7003):
        content = np.random.RandomState(size).bytes(size)
        with mock.patch.object(reduce, "_CHUNK", 1000):
            given = content if strategy.is_chief else None
            received = reduce.broadcast_bytes(strategy, strategy._peers, given)
        assert hashlib.sha256(received).digest() == hashlib.sha256(content).digest(), size


def mirrored_strategies_beside(strategy: Any, one: Any, folder: Path) -> None:
    """They take the devices of their own process: TensorFlow knows those of all of them."""
    x = np.random.default_rng(0).normal(size=(18, 4)).astype("float32")
    alone, found = tfdist.MirroredStrategy(), []
    assert len(alone.extended.worker_devices) == len(tf.config.list_logical_devices("CPU")) // 2
    for each in (one, alone, strategy):
        with each.scope():
            keras.utils.set_random_seed(1)
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(x, x[:, :1], batch_size=4, epochs=2, shuffle=False, verbose=0)
        found.append(np.concatenate([np.ravel(w) for w in model.get_weights()]))
    for received in found[1:]:
        np.testing.assert_allclose(received, found[0], atol=1e-6)


def files_of_a_fit(strategy: Any, one: Any, folder: Path) -> None:
    """A reader has to know that many files to follow a batch: make them fewer, not more.

    The first fit of a process goes through one that later ones do not.
    """
    files = files_of_fit(strategy)
    assert {"strategies/data_parallel/replica_step.py", "runtime/exchange.py"} <= set(files)
    assert len(files) <= 34, files


SECTIONS: dict[str, Callable[[Any, Any, Path], None]] = {
    section.__name__: section
    for section in (
        reading_inside_and_outside,
        loops_of_ones_own,
        optimizers_in_branches,
        layers_that_python_leaves_out,
        more_layers_that_python_leaves_out,
        layers_by_the_size_of_rows,
        loops_that_one_rank_traces_again,
        sums_that_are_assigned,
        finished_outside_of_the_scope,
        folds_that_clear_the_session,
        steps_that_mix_rows,
        values_that_are_predicted,
        initial_values_of_the_chief,
        terminate_on_nan,
        shards_of_files,
        other_rows_on_each_worker,
        workers_without_rows,
        bytes_from_the_chief,
        mirrored_strategies_beside,
        files_of_a_fit,
    )
}
# What takes long is for `make nightly`.
LONG = (
    *("optimizers_in_branches", "more_layers_that_python_leaves_out", "finished_outside_of_the_scope"),
    *("steps_that_mix_rows", "workers_without_rows"),
    *("loops_of_ones_own", "reading_inside_and_outside", "values_that_are_predicted"),
)
DAILY = tuple(name for name in SECTIONS if name not in LONG)
OVER_HOROVOD = (
    *("reading_inside_and_outside", "loops_of_ones_own", "initial_values_of_the_chief"),
    *("more_layers_that_python_leaves_out", "sums_that_are_assigned"),
    *("shards_of_files", "other_rows_on_each_worker", "bytes_from_the_chief"),
)


def run(names: tuple[str, ...], folder: str, kind: str) -> dict[str, Any]:
    """On each process; every section asserts what it is about."""
    one = tf.distribute.get_strategy()
    strategy = getattr(tfdist, kind)(start_timeout=60, peer_timeout=300)
    return {name: attempt(name, SECTIONS[name], strategy, one, Path(folder)) for name in names}


@functools.cache
def results(names: tuple[str, ...], kind: str = "MultiWorkerMirroredStrategy") -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="tfdist-as-one-") as folder:
        return run_local(run, 2, timeout=_DEADLINE, args=(names, folder, kind))


def assert_found(name: str, results: list[dict[str, Any]]) -> None:
    for rank in (0, 1):
        found_on(results, rank, name)


@pytest.mark.parametrize("name", daily(SECTIONS, *DAILY))
def test_section(name):
    assert_found(name, results(DAILY if name in DAILY else LONG))


@pytest.mark.nightly
@pytest.mark.parametrize("name", OVER_HOROVOD)
def test_over_horovod(name):
    pytest.importorskip("horovod.tensorflow")
    assert_found(name, results(OVER_HOROVOD, kind="HorovodStrategy"))
