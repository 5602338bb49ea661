"""What tfdist changes in TensorFlow and Keras is still needed: a test here fails once upstream does without a patch.

Everything runs in fresh processes that have not installed any patch.
"""

from __future__ import annotations

import functools
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import pytest

from tests.cluster.attempt import attempt, error_of
from tfdist import keras_distribution
from tfdist.compat import patches
from tfdist.compat.patch import inherited
from tfdist.testing import run_local

pytestmark = pytest.mark.cluster

_LOSSES = "keras.src.losses.loss"
_ARCHIVE = inherited(type(keras.export.ExportArchive()), "write_out")
_VALUES = "tensorflow.python.distribute.values:DistributedVariable"


def two_devices() -> dict[str, Any]:
    """Runs in one process with two devices, under `tf.distribute.MirroredStrategy`."""
    import keras
    import numpy as np
    import tensorflow as tf
    from keras.src.losses import loss as losses

    from tests.features.table import batches, mlp, rows

    found: dict[str, Any] = {}
    strategy = tf.distribute.MirroredStrategy()

    def of_replicas(function: Callable, *values: Any) -> list[float]:
        """`function` of one value on each replica."""
        distributed = strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(values[context.replica_id_in_sync_group])
        )
        return [float(x) for x in strategy.experimental_local_results(strategy.run(function, (distributed,)))]

    found["a file in memory"] = keras.src.saving.saving_lib.is_memory_sufficient(mlp()())
    found["scaled losses"] = of_replicas(losses.scale_loss_for_distribution, 1.0, 3.0)
    found["unscaled losses"] = of_replicas(losses.unscale_loss_for_distribution, 1.0, 3.0)

    # Four values of which the first replica has one that is valid, the second three.
    masks = [[True, False, False, False], [True, True, True, False]]
    weights = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]]
    values = tf.constant([1.0, 2.0, 3.0, 4.0])

    def masked_mean(mask: tf.Tensor) -> tf.Tensor:
        keep = losses.apply_mask(None, mask, "float32", "sum_over_batch_size")
        return losses.reduce_weighted_values(values, keep, None, "sum_over_batch_size")

    def weighted_mean(weight: tf.Tensor) -> tf.Tensor:
        return losses.reduce_weighted_values(values, weight, None, "mean_with_sample_weight")

    found["a masked mean"] = sum(of_replicas(masked_mean, *masks))
    found["a weighted mean"] = sum(of_replicas(weighted_mean, *weights))

    with strategy.scope():
        mean, total = keras.metrics.Mean(), keras.metrics.Sum()

    def update(value: tf.Tensor) -> tf.Tensor:
        mean.update_state(value)
        total.update_state(value)
        return value

    of_replicas(update, 1.0, 3.0)
    found["values counted by Mean"] = float(np.asarray(mean.count.value.read_value()))
    found["a sum of 1 and 3"] = float(np.asarray(total.result()))

    def width_of_rows(length: tf.Tensor) -> tf.Tensor:
        return tf.shape(tf.RaggedTensor.from_row_lengths(tf.range(int(length)), [int(length)]).to_tensor())[1]

    found["widths of rows"] = [int(width) for width in of_replicas(width_of_rows, 1, 3)]

    with strategy.scope():
        clipped = keras.Variable([0.0])
        optimizer = keras.optimizers.SGD(1.0, clipvalue=1.0)
        optimizer.build([clipped])

    @tf.function
    def apply(gradients: Any) -> None:
        strategy.run(lambda gradient: optimizer.apply([tf.reshape(gradient, [1])], [clipped]) or gradient, (gradients,))

    apply(strategy.experimental_distribute_values_from_function(lambda context: tf.constant(3.0)))
    found["clipped gradient of 3 + 3"] = -float(np.asarray(clipped.value)[0])

    calls: set[tuple] = set()
    distribute = strategy.experimental_distribute_dataset

    def note_call(*arguments: Any, **more: Any) -> Any:
        calls.add((len(arguments), tuple(more)))
        return distribute(*arguments, **more)

    strategy.experimental_distribute_dataset = note_call
    x, y = rows(96)

    def six_batches() -> Any:
        for i in range(0, 96, 16):
            yield x[i : i + 16], y[i : i + 16]

    with strategy.scope():
        model = mlp()()
    model.fit(six_batches(), verbose=0)
    found["trains on all of six batches"] = int(np.asarray(model.optimizer.iterations.value)) == 6
    found["arguments of experimental_distribute_dataset"] = calls

    ran: list[Any] = []
    run = strategy.run

    def note_run(function: Callable, *arguments: Any, **more: Any) -> Any:
        ran.append(function)
        return run(function, *arguments, **more)

    strategy.run = note_run
    model.predict(x[:16], batch_size=16, verbose=0)
    found["predicts by a model's method"] = {isinstance(getattr(f, "__self__", None), keras.Model) for f in ran}
    strategy.run = run
    with strategy.scope():
        model = mlp(steps_per_execution=2)()
    kind, message = error_of(model.fit, batches(x, y), verbose=0)
    found["steps_per_execution"] = kind, "You must feed a value for placeholder" in message
    with strategy.scope():
        model = mlp(jit_compile=True)()
    found["compiles its collectives"] = error_of(model.fit, batches(x, y), verbose=0)[0] != "no error"
    with strategy.scope():
        generator = keras.random.SeedGenerator(1)
    drawn = strategy.experimental_local_results(strategy.run(generator.next))

    def meet_in_a_branch() -> Any:
        context = tf.distribute.get_replica_context()
        meet = functools.partial(context.merge_call, lambda strategy: tf.constant(1))
        return tf.cond(tf.constant(True), meet, lambda: tf.constant(0))

    found["meeting in a branch"] = error_of(tf.function(lambda: strategy.run(meet_in_a_branch)))[0]
    found["different seeds"] = len({str(seed.numpy()) for seed in drawn})
    drawn = strategy.experimental_local_results(strategy.run(lambda: keras.random.normal((2,), seed=1)))
    found["different numbers of a fixed seed"] = len({str(numbers.numpy()) for numbers in drawn})
    keras.config.set_dtype_policy("mixed_bfloat16")
    named = strategy.run(lambda: tf.constant(keras.config.dtype_policy().name))
    found["dtype policies of replicas"] = {str(name.numpy()) for name in strategy.experimental_local_results(named)}
    keras.config.set_dtype_policy("float32")
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    with mock.patch.object(tf.config, "list_physical_devices", lambda *_: [gpu]), strategy.scope():
        found["jit_compile='auto'"] = mlp(jit_compile="auto")().jit_compile

    def lose_a_process(batch: int, logs: Any = None) -> None:
        raise ConnectionError("a process is gone")

    with strategy.scope():
        model = mlp()()
    losing = [keras.callbacks.LambdaCallback(on_train_batch_end=lose_a_process)]
    found["a lost process"] = error_of(model.fit, batches(x, y), verbose=0, callbacks=losing)

    def use_in_a_thread(logs: Any = None) -> None:
        for name, arguments in [("evaluate", (x, y)), ("predict", (x,))] + [
            (f"{kind}_on_batch", (x, y)[: 1 if kind == "predict" else 2]) for kind in ("train", "test", "predict")
        ]:
            with ThreadPoolExecutor(1) as other:
                use = other.submit(error_of, getattr(model, name), *arguments)
            found[f"{name} in another thread"] = use.result()[0]

    model.fit(batches(x, y), verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_train_begin=use_in_a_thread)])
    both = threading.Barrier(2)

    def drawn_at_once() -> int:
        both.wait(10)
        return 1

    @tf.function
    def draw() -> tf.Tensor:
        graph = tf.compat.v1.get_default_graph()
        return graph.capture_call_time_value(drawn_at_once, tf.TensorSpec([], tf.int32))

    function = draw.get_concrete_function()
    with ThreadPoolExecutor(2) as threads:
        found["keys drawn at once"] = [int(one) for one in threads.map(lambda _: function(), range(2))]

    with strategy.scope():
        mirrored = keras.Variable(3.0)
        counts = keras.metrics.Mean()
    found["numbers"] = [error_of(kind, mirrored.value)[0] for kind in (int, float, complex)]
    with strategy.scope():
        found["an array"] = error_of(np.asarray, mirrored.value)[0]
    with mock.patch.object(strategy, "reduce", wraps=strategy.reduce) as reduce:
        found["collectives of two reads"] = [float(counts.result()) for _ in range(2)] and reduce.call_count

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "cache_0.lockfile").touch()
        cached = tf.data.Dataset.range(2).cache(f"{folder}/cache")
        found["a cache with a lock"] = error_of(list, cached)[0]

    found["saving to s3"] = error_of(mlp()().save, "s3://bucket/model.keras")[0]

    counter = keras.Variable(0.0)
    add = tf.function(lambda: counter.assign_add(1.0)).get_concrete_function()
    operations = {operation.type for operation in add.graph.get_operations()}
    kinds = operations & {"ReadVariableOp", "AssignVariableOp", "AssignAddVariableOp"}
    found["an addition"] = kinds, hasattr(counter, "sparse_read")
    saved = []
    for variables in ([[[0.0], [1.0]]], [[[0.0]], [[1.0]]]):
        optimizer = keras.optimizers.SGD(momentum=0.5)
        optimizer.build([keras.Variable(value) for value in variables])
        store: dict[str, Any] = {}
        optimizer.save_own_variables(store)
        saved.append(len(store))
    found["more slots of two shards"] = saved[1] - saved[0]
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        adapted = keras.layers.Normalization()
    adapted.adapt(np.ones((3, 4)))
    model.compile("adam", "mse")
    model.layers[0].enable_lora(2)
    config = model.get_compile_config()
    owners = [
        model.optimizer._distribution_strategy,
        getattr(model.layers[0].lora_kernel_a.value, "distribute_strategy", None),
        getattr(adapted.adapt_mean.value, "distribute_strategy", None),
    ]
    model.compile_from_config(config)
    model.add(keras.layers.Dense(1))
    owners += [
        model.optimizer._distribution_strategy,
        getattr(model.layers[1].kernel.value, "distribute_strategy", None),
    ]
    found["made in the model's scope"] = sum(owner is strategy for owner in owners)
    weight, value = keras.Variable(2.0), tf.constant(2.0)
    with tf.GradientTape() as tape, keras.StatelessScope([(weight, value)]):
        tape.watch(value)
        product = keras.remat(lambda x: x * weight)(tf.constant(3.0))
    found["the gradient of a value in place of a weight"] = tape.gradient(product, value)
    found["installed"] = hasattr(keras.Model.export, "_tfdist_original")

    def cleared() -> None:
        with strategy.scope():
            # Not `gc.collect()`: where an iterator of several devices is freed, TensorFlow may wait up to a minute for
            # the thread that tunes it, and holds the interpreter's lock meanwhile.
            keras.utils.clear_session(free_memory=False)

    found["a session cleared in a scope"] = error_of(cleared)
    from keras import distribution as kd
    from keras.src.backend import distribution_lib

    asked = ("get_device_count", "num_processes", "process_id", "initialize", "distribute_tensor")
    found["lacks of keras.distribution"] = {name for name in asked if not hasattr(distribution_lib, name)}
    kd.set_distribution(object())
    found["a distribution has a scope"] = tf.distribute.has_strategy()
    return found


def two_processes(folder_name: str) -> dict[str, Any]:
    """Runs on every process, under `tf.distribute.MultiWorkerMirroredStrategy`: which files it writes."""
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    folder = Path(folder_name) / str(strategy.cluster_resolver.task_id)
    folder.mkdir()
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    found: dict[str, Any] = {}

    def writes(target: str, name: str, write: Callable[[Path], Any]) -> None:
        problem = attempt(target, write, folder / name)
        found[target] = (folder / name).exists() or problem

    def log(path: Path) -> None:
        keras.callbacks.CallbackList([keras.callbacks.CSVLogger(path)], model=model).on_train_begin()

    writes("keras.src.callbacks.callback_list:CallbackList.set_model", "log.csv", log)
    writes("keras.src.saving.saving_lib:save_model", "model.keras", model.save)
    writes("keras.src.saving.saving_lib:save_weights_only", "model.weights.h5", model.save_weights)
    writes("keras.src.legacy.saving.legacy_h5_format:save_model_to_hdf5", "model.h5", model.save)
    writes("keras.src.models.model:Model.export", "export", lambda path: model.export(path, verbose=False))
    archive = keras.export.ExportArchive()
    archive.track_and_add_endpoint("serve", model, [tf.TensorSpec([None, 4])])
    writes(_ARCHIVE, "archive", lambda path: archive.write_out(path, verbose=False))
    with mock.patch("builtins.input", side_effect=EOFError):
        found["asks before it overwrites"] = [
            error_of(write, folder / name, overwrite=False)[0]
            for write, name in ((model.save, "model.keras"), (model.save_weights, "model.weights.h5"))
        ]
    from keras.src.backend.tensorflow.trainer import _multi_worker_concat

    found["rows of sparse tensors"] = error_of(_multi_worker_concat, tf.sparse.eye(2), strategy)[0]
    found["devices of two processes"] = sorted(keras.distribution.list_devices())
    found["installed"] = hasattr(keras.Model.export, "_tfdist_original")
    return found


@functools.cache
def local() -> dict[str, Any]:
    return run_local(two_devices, 1, devices_per_worker=2, timeout=300)[0]


@functools.cache
def cluster() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="tfdist-canaries-") as folder:
        return run_local(two_processes, args=(folder,), timeout=300)


PATCHES = [*patches(), *keras_distribution.PATCHES]
# What is found without the patch of a function, by the name that it has above.
CANARIES: dict[str, tuple[str, Any]] = {
    "tensorflow:recompute_grad": ("the gradient of a value in place of a weight", None),
    "tensorflow.python.framework.func_graph:FuncGraph.capture_call_time_value": (
        "steps_per_execution",
        ("InvalidArgumentError", True),
    ),
    "tensorflow.python.eager.polymorphic_function.concrete_function:ConcreteFunction.captured_inputs": (
        "keys drawn at once",
        [1, 1],
    ),
    **{
        inherited(keras.Model, method): (f"{method} in another thread", "no error")
        for method in ("evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
    },
    **{
        inherited(keras.Model, method): ("asks before it overwrites", ["EOFError"] * 2)
        for method in ("save", "save_weights")
    },
    f"{_LOSSES}:scale_loss_for_distribution": ("scaled losses", [0.5, 1.5]),
    f"{_LOSSES}:unscale_loss_for_distribution": ("unscaled losses", [2.0, 6.0]),
    # The right mean is that of all four values, (1 + (1 + 2 + 3)) / 4.
    f"{_LOSSES}:apply_mask": ("a masked mean", pytest.approx((1 / 1 + (1 + 2 + 3) / 3) / 2)),
    f"{_LOSSES}:reduce_values": ("a weighted mean", pytest.approx((1 / 1 + (1 + 2 + 3) / 3) / 2)),
    "keras.src.metrics.reduction_metrics:Mean.update_state": ("values counted by Mean", 2.0),
    "keras.src.metrics.reduction_metrics:Sum.update_state": ("a sum of 1 and 3", 4.0),
    "tensorflow.python.ops.ragged.ragged_tensor:RaggedTensor.to_tensor": ("widths of rows", [1, 3]),
    **dict.fromkeys(
        (
            "keras.src.backend.tensorflow.optimizer:TFOptimizer._all_reduce_sum_gradients",
            "keras.src.optimizers.base_optimizer:BaseOptimizer.apply",
            "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer.apply",
        ),
        ("clipped gradient of 3 + 3", 2.0),
    ),
    "keras.src.saving.saving_lib:is_memory_sufficient": ("a file in memory", True),
    "keras.src.random.seed_generator:SeedGenerator.next": ("different seeds", 1),
    "keras.src.backend.tensorflow.random:draw_seed": ("different numbers of a fixed seed", 1),
    "keras.src.backend.tensorflow.trainer:TFEpochIterator.__init__": (
        "arguments of experimental_distribute_dataset",
        {(1, ())},
    ),
    inherited(keras.Model, "_maybe_symbolic_build"): ("trains on all of six batches", False),
    inherited(keras.Model, "fit"): ("a lost process", ("ConnectionError", "a process is gone")),
    inherited(keras.Model, "_make_function"): ("compiles its collectives", True),
    inherited(keras.Model, "_resolve_auto_jit_compile"): ("jit_compile='auto'", False),
    "keras.src.backend.tensorflow.trainer:_multi_worker_concat": ("rows of sparse tensors", "ValueError"),
    "tensorflow.python.distribute.mirrored_run:_call_for_each_replica": (
        "dtype policies of replicas",
        {str(b"float32")},
    ),
    "tensorflow.python.ops.cond_v2:cond_v2": ("meeting in a branch", "RuntimeError"),
    inherited(keras.Model, "make_predict_function"): ("predicts by a model's method", {False}),
    inherited(keras.Variable, "_initialize"): ("an addition", ({"ReadVariableOp", "AssignVariableOp"}, False)),
    # A mean has two variables.
    inherited(keras.Model, "_get_metrics_result_or_logs"): ("collectives of two reads", 4),
    **{f"{_VALUES}.{name}": ("numbers", ["TypeError"] * 3) for name in ("__int__", "__float__", "__complex__")},
    f"{_VALUES}.__array__": ("an array", "ValueError"),
    **dict.fromkeys(
        (
            inherited(keras.Model, "compile"),
            inherited(keras.Model, "compile_from_config"),
            "keras.src.models.sequential:Sequential.build",
            inherited(keras.Layer, "__init__"),
            inherited(keras.Layer, "add_weight"),
            inherited(keras.Layer, "_maybe_build"),
        ),
        ("made in the model's scope", 0),
    ),
    "tensorflow.compat.v1:reset_default_graph": (
        "a session cleared in a scope",
        ("IndexError", "pop from empty list"),
    ),
    **dict.fromkeys(
        (
            f"{keras_distribution._BACKEND}:{name}"
            for name in ("get_device_count", "num_processes", "process_id", "initialize", "distribute_tensor")
        ),
        (
            "lacks of keras.distribution",
            {"get_device_count", "num_processes", "process_id", "initialize", "distribute_tensor"},
        ),
    ),
    f"{keras_distribution._BACKEND}:list_devices": ("devices of two processes", ["cpu:0", "cpu:0"]),
    "keras.src.distribution.distribution_lib:global_state": ("a distribution has a scope", False),
    "tensorflow.python.data.ops.dataset_ops:DatasetV2.cache": ("a cache with a lock", "AlreadyExistsError"),
    "keras.src.utils.file_utils:gfile": ("saving to s3", "UnimplementedError"),
    "keras.src.optimizers.base_optimizer:BaseOptimizer.save_own_variables": ("more slots of two shards", 1),
    "keras.src.optimizers.base_optimizer:BaseOptimizer.load_own_variables": ("more slots of two shards", 1),
    # Every process writes its file.
    **{
        target: (target, True)
        for target in (
            "keras.src.callbacks.callback_list:CallbackList.set_model",
            "keras.src.saving.saving_lib:save_model",
            "keras.src.saving.saving_lib:save_weights_only",
            "keras.src.legacy.saving.legacy_h5_format:save_model_to_hdf5",
            "keras.src.models.model:Model.export",
            _ARCHIVE,
        )
    },
}


@pytest.mark.nightly
@pytest.mark.timeout(620)
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.target.rpartition(".")[2])
def test_upstream_still_needs(patch):
    assert patch.target in CANARIES, f"{patch.target} has no canary; write one that fails once upstream needs no patch"
    name, expected = CANARIES[patch.target]
    assert [found[name] for found in (local(), *cluster()) if name in found] in ([expected], [expected] * 2)


def test_every_canary_has_a_patch():
    assert set(CANARIES) == {patch.target for patch in PATCHES}


@pytest.mark.nightly
def test_canaries_ran_without_patches():
    assert not any(found["installed"] for found in [local(), *cluster()])
