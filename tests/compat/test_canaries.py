"""What tfdist changes in TensorFlow and Keras is still needed: a test here fails once upstream does without a patch.

Everything runs in fresh processes that have not installed any patch.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import pytest

from tests.cluster.attempt import attempt, error_of
from tfdist.compat import patches
from tfdist.compat.patch import inherited
from tfdist.testing import run_local

pytestmark = pytest.mark.cluster

_LOSSES = "keras.src.losses.loss"
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

    found["scale"] = of_replicas(losses.scale_loss_for_distribution, 1.0, 3.0)
    found["unscale"] = of_replicas(losses.unscale_loss_for_distribution, 1.0, 3.0)

    # Four values of which the first replica has one that is valid, the second three.
    masks = [[True, False, False, False], [True, True, True, False]]
    weights = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]]
    values = tf.constant([1.0, 2.0, 3.0, 4.0])

    def masked_mean(mask: tf.Tensor) -> tf.Tensor:
        keep = losses.apply_mask(None, mask, "float32", "sum_over_batch_size")
        return losses.reduce_weighted_values(values, keep, None, "sum_over_batch_size")

    def weighted_mean(weight: tf.Tensor) -> tf.Tensor:
        return losses.reduce_weighted_values(values, weight, None, "mean_with_sample_weight")

    found["masked"] = sum(of_replicas(masked_mean, *masks))
    found["weighted"] = sum(of_replicas(weighted_mean, *weights))

    with strategy.scope():
        mean, total = keras.metrics.Mean(), keras.metrics.Sum()

    def update(value: tf.Tensor) -> tf.Tensor:
        mean.update_state(value)
        total.update_state(value)
        return value

    of_replicas(update, 1.0, 3.0)
    found["values counted by Mean"] = float(np.asarray(mean.count.value.read_value()))
    found["Sum"] = float(np.asarray(total.result()))

    with strategy.scope():
        clipped = keras.Variable([0.0])
        optimizer = keras.optimizers.SGD(1.0, clipvalue=1.0)
        optimizer.build([clipped])

    @tf.function
    def apply(gradients: Any) -> None:
        strategy.run(lambda gradient: optimizer.apply([tf.reshape(gradient, [1])], [clipped]) or gradient, (gradients,))

    apply(strategy.experimental_distribute_values_from_function(lambda context: tf.constant(3.0)))
    found["clipped gradient of 3 + 3"] = -float(np.asarray(clipped.value)[0])

    calls: list[tuple] = []
    distribute = strategy.experimental_distribute_dataset

    def note_call(*arguments: Any, **more: Any) -> Any:
        calls.append((len(arguments), tuple(more)))
        return distribute(*arguments, **more)

    strategy.experimental_distribute_dataset = note_call
    x, y = rows(96)

    def six_batches() -> Any:
        for i in range(0, 96, 16):
            yield x[i : i + 16], y[i : i + 16]

    with strategy.scope():
        model = mlp()()
    model.fit(six_batches(), verbose=0)
    found["steps of six batches"] = int(np.asarray(model.optimizer.iterations.value))
    found["hook"] = calls

    ran: list[Any] = []
    run = strategy.run

    def note_run(function: Callable, *arguments: Any, **more: Any) -> Any:
        ran.append(function)
        return run(function, *arguments, **more)

    strategy.run = note_run
    model.predict(x[:16], batch_size=16, verbose=0)
    found["predicts by a model's method"] = [isinstance(getattr(f, "__self__", None), keras.Model) for f in ran]
    strategy.run = run
    with strategy.scope():
        model = mlp(steps_per_execution=2)()
    found["steps_per_execution"] = error_of(model.fit, batches(x, y), verbose=0)
    with strategy.scope():
        model = mlp(jit_compile=True)()
    found["jit_compile"] = error_of(model.fit, batches(x, y), verbose=0)
    with strategy.scope():
        generator = keras.random.SeedGenerator(1)
    drawn = strategy.experimental_local_results(strategy.run(generator.next))
    found["seeds"] = [seed.numpy().tolist() for seed in drawn]
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    with mock.patch.object(tf.config, "list_physical_devices", lambda *_: [gpu]), strategy.scope():
        found["jit_compile='auto'"] = mlp(jit_compile="auto")().jit_compile

    def lose_a_process(batch: int, logs: Any = None) -> None:
        raise ConnectionError("a process is gone")

    with strategy.scope():
        model = mlp()()
    losing = [keras.callbacks.LambdaCallback(on_train_batch_end=lose_a_process)]
    found["a lost process"] = error_of(model.fit, batches(x, y), verbose=0, callbacks=losing)

    with strategy.scope():
        mirrored = keras.Variable(3.0)
        counts = keras.metrics.Mean()
    found["numbers"] = [error_of(kind, mirrored.value)[0] for kind in (int, float, complex)]
    with strategy.scope():
        found["an array"] = error_of(np.asarray, mirrored.value)[0]
    with mock.patch.object(strategy, "reduce", wraps=strategy.reduce) as reduce:
        found["collectives of two reads"] = [float(counts.result()) for _ in range(2)] and reduce.call_count

    found["saving to s3"] = error_of(mlp()().save, "s3://bucket/model.keras")[0]

    counter = keras.Variable(0.0)
    add = tf.function(lambda: counter.assign_add(1.0)).get_concrete_function()
    found["operations of assign_add"] = {operation.type for operation in add.graph.get_operations()}
    found["sparse_read"] = hasattr(counter, "sparse_read")
    found["slots saved"] = []
    for variables in ([[[0.0], [1.0]]], [[[0.0]], [[1.0]]]):
        optimizer = keras.optimizers.SGD(momentum=0.5)
        optimizer.build([keras.Variable(value) for value in variables])
        store: dict[str, Any] = {}
        optimizer.save_own_variables(store)
        found["slots saved"].append(len(store))
    found["installed"] = hasattr(keras.Model.export, "_tfdist_original")
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
    found["installed"] = hasattr(keras.Model.export, "_tfdist_original")
    return found


@functools.cache
def local() -> dict[str, Any]:
    return run_local(two_devices, 1, devices_per_worker=2, timeout=90)[0]


@functools.cache
def cluster() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="tfdist-canaries-") as folder:
        return run_local(two_processes, args=(folder,), timeout=90)


def losses_are_scaled_by_the_number_of_replicas() -> None:
    assert local()["scale"] == [0.5, 1.5]


def losses_are_unscaled_by_the_number_of_replicas() -> None:
    assert local()["unscale"] == [2.0, 6.0]


def masked_means_have_local_denominators() -> None:
    right = (1 + (1 + 2 + 3)) / 4
    assert local()["masked"] == pytest.approx((1 / 1 + (1 + 2 + 3) / 3) / 2)
    assert local()["masked"] != pytest.approx(right)


def weighted_means_have_local_denominators() -> None:
    right = (1 + (1 + 2 + 3)) / 4
    assert local()["weighted"] == pytest.approx((1 / 1 + (1 + 2 + 3) / 3) / 2)
    assert local()["weighted"] != pytest.approx(right)


def scalars_are_counted_once_a_replica() -> None:
    assert local()["values counted by Mean"] == 2.0


def scalars_are_summed_over_replicas() -> None:
    assert local()["Sum"] == 4.0


def gradients_are_clipped_before_they_are_reduced() -> None:
    assert local()["clipped gradient of 3 + 3"] == 2.0


def strategies_are_not_told_who_asks_for_a_dataset() -> None:
    assert set(local()["hook"]) == {(1, ())}


def a_generator_loses_its_first_batches() -> None:
    assert local()["steps of six batches"] < 6


def steps_per_execution_cannot_reduce() -> None:
    kind, message = local()["steps_per_execution"]
    assert kind == "InvalidArgumentError"
    assert "You must feed a value for placeholder" in message


def steps_are_compiled_with_their_collectives() -> None:
    assert local()["jit_compile"] is not None


def replicas_draw_the_same() -> None:
    first, second = local()["seeds"]
    assert first == second


def strategies_turn_xla_off() -> None:
    assert local()["jit_compile='auto'"] is False


def predictions_do_not_tell_their_model() -> None:
    assert set(local()["predicts by a model's method"]) == {False}


def fit_ends_with_the_first_process() -> None:
    assert local()["a lost process"] == ("ConnectionError", "a process is gone")


def additions_are_a_read_and_a_write() -> None:
    assert {"ReadVariableOp", "AssignVariableOp"} <= local()["operations of assign_add"]
    assert "AssignAddVariableOp" not in local()["operations of assign_add"]
    assert not local()["sparse_read"]


def slots_are_saved_shard_by_shard() -> None:
    whole, in_two_parts = local()["slots saved"]
    assert in_two_parts == whole + 1


def mirrored_variables_are_no_numbers() -> None:
    assert local()["numbers"] == ["TypeError"] * 3


def mirrored_variables_are_no_arrays() -> None:
    assert local()["an array"] == "ValueError"


def every_read_of_a_metric_is_a_collective() -> None:
    # A mean has two variables.
    assert local()["collectives of two reads"] == 4


def keras_opens_what_tensorflow_opens() -> None:
    assert local()["saving to s3"] == "UnimplementedError"


def every_process_writes(target: str) -> None:
    assert [found[target] for found in cluster()] == [True, True]


CANARIES: dict[str, Callable[[], None]] = {
    "tensorflow.python.framework.func_graph:FuncGraph.capture_call_time_value": steps_per_execution_cannot_reduce,
    f"{_LOSSES}:scale_loss_for_distribution": losses_are_scaled_by_the_number_of_replicas,
    f"{_LOSSES}:unscale_loss_for_distribution": losses_are_unscaled_by_the_number_of_replicas,
    f"{_LOSSES}:apply_mask": masked_means_have_local_denominators,
    f"{_LOSSES}:reduce_values": weighted_means_have_local_denominators,
    "keras.src.metrics.reduction_metrics:Mean.update_state": scalars_are_counted_once_a_replica,
    "keras.src.metrics.reduction_metrics:Sum.update_state": scalars_are_summed_over_replicas,
    "keras.src.backend.tensorflow.optimizer:TFOptimizer._all_reduce_sum_gradients": (
        gradients_are_clipped_before_they_are_reduced
    ),
    "keras.src.optimizers.base_optimizer:BaseOptimizer.apply": gradients_are_clipped_before_they_are_reduced,
    "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer.apply": gradients_are_clipped_before_they_are_reduced,
    "keras.src.random.seed_generator:SeedGenerator.next": replicas_draw_the_same,
    "keras.src.backend.tensorflow.trainer:TFEpochIterator.__init__": strategies_are_not_told_who_asks_for_a_dataset,
    inherited(keras.Model, "_maybe_symbolic_build"): a_generator_loses_its_first_batches,
    inherited(keras.Model, "fit"): fit_ends_with_the_first_process,
    inherited(keras.Model, "_make_function"): steps_are_compiled_with_their_collectives,
    inherited(keras.Model, "_resolve_auto_jit_compile"): strategies_turn_xla_off,
    inherited(keras.Model, "make_predict_function"): predictions_do_not_tell_their_model,
    inherited(keras.Variable, "_initialize"): additions_are_a_read_and_a_write,
    inherited(keras.Model, "_get_metrics_result_or_logs"): every_read_of_a_metric_is_a_collective,
    **{f"{_VALUES}.{name}": mirrored_variables_are_no_numbers for name in ("__int__", "__float__", "__complex__")},
    f"{_VALUES}.__array__": mirrored_variables_are_no_arrays,
    "keras.src.utils.file_utils:gfile": keras_opens_what_tensorflow_opens,
    "keras.src.optimizers.base_optimizer:BaseOptimizer.save_own_variables": slots_are_saved_shard_by_shard,
    "keras.src.optimizers.base_optimizer:BaseOptimizer.load_own_variables": slots_are_saved_shard_by_shard,
    **{
        target: functools.partial(every_process_writes, target)
        for target in (
            "keras.src.callbacks.callback_list:CallbackList.set_model",
            "keras.src.saving.saving_lib:save_model",
            "keras.src.saving.saving_lib:save_weights_only",
            "keras.src.legacy.saving.legacy_h5_format:save_model_to_hdf5",
            "keras.src.models.model:Model.export",
        )
    },
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("patch", patches(), ids=lambda patch: patch.target.rpartition(".")[2])
def test_upstream_still_needs(patch):
    assert patch.target in CANARIES, f"{patch.target} has no canary; write one that fails once upstream needs no patch"
    CANARIES[patch.target]()


def test_every_canary_has_a_patch():
    assert set(CANARIES) == {patch.target for patch in patches()}


def test_canaries_ran_without_patches():
    assert not any(found["installed"] for found in [local(), *cluster()])
