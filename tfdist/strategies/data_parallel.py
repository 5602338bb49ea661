"""What the data-parallel strategies have in common: Keras' steps see global batches and global gradients.

Subclasses of tf.distribute's strategies mix in `DataParallel`, their extended parts `DataParallelExtended`.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfdist.arguments import AUTO, check_bucket_bytes
from tfdist.compat.upstream import DistributedValues, SyncOnReadVariable, distribute_utils, mirrored_run
from tfdist.compression import PowerSGD, TopK
from tfdist.compression.compressor import Compressor
from tfdist.inspection import global_seeds
from tfdist.inspection.batch_sharding import GlobalBatch, rows_if, static_rows
from tfdist.inspection.model_parts import metrics_of
from tfdist.memory.policy import policy_of
from tfdist.steps import collectives, local_values, step_logs
from tfdist.steps.gradients import BUCKET_BYTES, WIRE_DTYPES, Wire
from tfdist.steps.keras_step import KerasStep, current_step, local_replica, predicting_model, recognise
from tfdist.steps.layer_state import ReplicaState
from tfdist.steps.step_logs import MetricTotals
from tfdist.steps.step_overrides import shadows
from tfdist.strategies import xla
from tfdist.strategies.global_batches import GlobalBatchDataset, share_of

# A large odd number, so that workers' seeds do not meet in those that users give.
_SEED_STRIDE = 0x3C6EF373

BATCH_NORM_MODES = ("global", "local")


class DataParallel:
    """Mixin for subclasses of `tf.distribute.Strategy`.

    Attributes:
        is_chief: whether this process prints, uploads and writes files for all: always true where there is only one.
    """

    is_chief = True

    def _configure_data_parallel(
        self, compression: Any, bucket_bytes: Any, batch_norm: str, memory: Any, dtypes: Any = WIRE_DTYPES
    ) -> None:
        self._wire = wire_of(compression, bucket_bytes, dtypes)
        if batch_norm not in BATCH_NORM_MODES:
            raise ValueError(
                f"Unknown batch_norm. Received: batch_norm={batch_norm!r}. Expected 'global' (statistics of the global "
                "batch, as one process computes them) or 'local' (of each replica's rows; no collectives)."
            )
        self._global_batch_norm = batch_norm == "global"
        self._memory = policy_of(memory)
        self._keras_step: KerasStep | None = None
        self._metric_totals = MetricTotals()
        # By model: what a training step adds up or gathers. Weak: no model has to live longer for it.
        self._sums_of_step: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._keras_asks_for_data = False
        self._epoch_iterator: Any = None

    @contextlib.contextmanager
    def _keras_input(self, epoch_iterator: Any = None) -> Iterator[None]:
        """While Keras builds its input, makes distributed datasets carry the number of rows of each global batch.

        Args:
            epoch_iterator: Keras' iterator, if it is what distributes the dataset.
        """
        self._keras_asks_for_data, self._epoch_iterator = True, epoch_iterator
        try:
            yield
        finally:
            self._keras_asks_for_data, self._epoch_iterator = False, None

    def run(self, fn: Callable, args: tuple = (), kwargs: dict | None = None, options: Any = None) -> Any:
        step = recognise(fn) if len(args) == 1 and not kwargs else None
        if step is None:
            self._metric_totals.forget()
        if step is None or self.num_replicas_in_sync == 1:
            fn = fn if step is None else global_seeds.shared_with(fn)
            return super().run(fn, _plain(args), kwargs, options)
        (batch,) = args
        if not isinstance(batch, GlobalBatch):
            if _is_distributed(batch):
                batch = GlobalBatch(batch, None, None)
            else:
                step.on_batch = True
                batch = self.extended._split_over_replicas(batch)
        with contextlib.ExitStack() as stack:
            if step.kind == "predict":
                replica_step = _predict_on_replica
            else:
                replica_step = _step_on_replica
                stack.enter_context(shadows(step, wire=self._wire, global_batch_norm=self._global_batch_norm))
            step.global_seeds = global_seeds.current()
            previous, self._keras_step = self._keras_step, step
            stack.callback(setattr, self, "_keras_step", previous)
            stack.enter_context(_other_random_numbers(self.extended._input_position()[1]))
            step.is_compiled = xla.compiles(step.model or predicting_model(fn), batch)
            stack.enter_context(xla.marked(step.is_compiled))
            outputs = super().run(replica_step, batch, None, options)
        if step.kind == "predict":
            return outputs
        collectives.keep(step, self)
        return tf.nest.map_structure(lambda value: _mark_reduced(_local_mean(self, value)), outputs)

    def reduce(self, reduce_op: Any, value: Any, axis: int | None) -> Any:
        # Keras passes every log on to `reduce` with axis=0, scalars included (keras issue 20585).
        if isinstance(value, tf.Tensor) and getattr(value, "_tfdist_reduced", False):
            return value
        return super().reduce(reduce_op, value, axis)


def wire_of(compression: Any, bucket_bytes: int | str | None, dtypes: Mapping[str | None, tf.DType | None]) -> Wire:
    """How gradients travel, from the arguments of a strategy.

    Args:
        compression: one of `dtypes`, or a method of `tfdist.compression`.
        bucket_bytes: as in `Wire`, or "auto".
        dtypes: what can be added up, by the name of the compression.

    Raises:
        ValueError: for another `compression` or `bucket_bytes`.
    """
    check_bucket_bytes(bucket_bytes)
    if bucket_bytes == AUTO:
        bucket_bytes = BUCKET_BYTES
    if isinstance(compression, (PowerSGD, TopK)):
        return Wire(None, bucket_bytes, Compressor(compression))
    if not (compression is None or isinstance(compression, str)) or compression not in dtypes:
        raise ValueError(
            f"Received: compression={compression!r}. Expected one of {list(dtypes)}, of which None sends gradients as "
            "they are and the others cast them, or a method such as tfdist.compression.PowerSGD(rank=4)."
        )
    return Wire(dtypes[compression], bucket_bytes)


class DataParallelExtended:
    """Mixin for subclasses of `tf.distribute.StrategyExtended`."""

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        result = super()._reduce_to(reduce_op, value, destinations, options)
        return self._exchanged(value, result)

    def _batch_reduce_to(self, reduce_op: Any, pairs: Any, options: Any) -> Any:
        pairs = [(value, self._place(destinations)) for value, destinations in pairs]
        results = super()._batch_reduce_to(reduce_op, pairs, options)
        return self._exchanged([value for value, _ in pairs], results)

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int, options: Any) -> Any:
        result = super()._gather_to_implementation(value, self._place(destinations), axis, options)
        return self._exchanged(value, result)

    def _exchanged(self, parts: Any, results: Any) -> Any:
        """Lets TensorFlow see what a collective does not tell: a result needs the parts of all replicas.

        Otherwise XLA may put what one replica's part is made of, and what another replica's result flows into, into one
        cluster: that would wait for the result, and the result for the cluster. The same goes for the exchange before:
        each device has them in order.

        Args:
            parts: of each replica of this process, a (nested) value.
            results: what has become of them.

        Returns:
            The results, marked as global.
        """
        step = self._container_strategy()._keras_step
        if step is not None and step.is_compiled and len(self.worker_devices) > 1:
            # Those of a branch are not seen outside of it; constants may be in no graph.
            graph = tf.compat.v1.get_default_graph()
            needed = [x for x in (*_tensors(parts), *step.exchanged) if getattr(x, "graph", None) is graph]
            results = tf.nest.map_structure(lambda result: _waiting_for(needed, result), results)
            step.exchanged = _tensors(results)
        local_values.agreed(_tensors(results))
        return results

    def _place(self, destinations: Any) -> Any:
        # What a replica exchanges goes where it is. TensorFlow asks the tensor, and those of a batch know no device.
        return self.worker_devices[0] if isinstance(destinations, str) and not destinations else destinations

    def _use_merge_call(self) -> bool:
        # Replicas cannot meet inside a branch of `tf.cond` (the update of accumulated gradients is one). Nothing in
        # there needs them to: gradients are global before the optimizer sees them.
        thread = threading.current_thread()
        in_replica = isinstance(thread, mirrored_run._MirroredReplicaThread) and not tf.executing_eagerly()
        if in_replica and thread.graph is not tf.compat.v1.get_default_graph():
            return False
        # Upstream does without it where XLA compiles for GPUs, and emits collectives: one replica needs neither.
        return self._container_strategy().num_replicas_in_sync == 1 or super()._use_merge_call()

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        # Upstream has a collective of one, which XLA does not compile everywhere.
        if self._container_strategy().num_replicas_in_sync == 1:
            return value
        return super()._replica_ctx_all_reduce(reduce_op, value, options)

    def _create_variable(self, next_creator: Callable, **kwargs: Any) -> Any:
        variable = super()._create_variable(next_creator, **kwargs)
        if isinstance(variable, SyncOnReadVariable):
            self._container_strategy()._metric_totals.watch(variable)
        return variable

    def _experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: Any) -> Any:
        policies = tf.data.experimental.AutoShardPolicy
        policy = dataset.options().experimental_distribute.auto_shard_policy
        for_keras = self._container_strategy()._keras_asks_for_data
        if policy == policies.FILE or (policy == policies.OFF and not for_keras):
            return super()._experimental_distribute_dataset(dataset, options)
        return GlobalBatchDataset(dataset, self, options, count=for_keras, manual=policy == policies.OFF)

    def _input_position(self) -> tuple[int, int]:
        """Returns `(number of workers, index of this worker)`."""
        return 1, 0

    def _split_over_replicas(self, batch: Any) -> Any:
        """Gives each replica its rows of a batch that every process holds whole."""
        workers, worker = self._input_position()
        replicas = len(self.worker_devices)
        # On the host: the first GPU may have no room for the rows of all.
        with tf.device("CPU:0"):
            batch = tf.nest.map_structure(
                lambda x: x if x is None or tf.is_tensor(x) else tf.convert_to_tensor(x), batch
            )
        parts = [share_of(batch, workers * replicas, k * workers + worker) for k in range(replicas)]
        return distribute_utils.regroup(parts, always_wrap=True)


def _waiting_for(needed: list[tf.Tensor], result: Any) -> Any:
    copies = []
    for one in _values(result):
        with tf.device(one.device), tf.control_dependencies(needed):
            copies.append(tf.nest.map_structure(tf.identity, one, expand_composites=True))
    if not isinstance(result, DistributedValues):
        return copies[0]
    return distribute_utils.regroup(tuple(copies), wrap_class=type(result), always_wrap=True)


def _values(value: Any) -> list:
    return list(value.values) if isinstance(value, DistributedValues) else [value]


def _tensors(nested: Any) -> list[tf.Tensor]:
    """All tensors of all replicas."""
    values = [_values(one) for one in tf.nest.flatten(nested)]
    return [x for x in tf.nest.flatten(values, expand_composites=True) if tf.is_tensor(x)]


def _plain(args: tuple) -> tuple:
    return tuple(a.data if isinstance(a, GlobalBatch) else a for a in args)


@tf.autograph.experimental.do_not_convert
def _predict_on_replica(data: Any, rows: Any, global_rows: Any) -> Any:
    step = current_step()
    global_seeds.share(step.global_seeds)
    outputs = step.function(data)
    if rows is not None and (static_rows(data) or 0) <= 1:
        # Not before: layers may fail without rows, as cuDNN's do.
        outputs = rows_if(rows > 0, outputs)
    return outputs


@tf.autograph.experimental.do_not_convert
def _step_on_replica(data: Any, rows: Any, global_rows: Any) -> Any:
    """Runs a train or test step on one replica.

    Returns:
        The step's logs: global, unless Keras replaces them at the end of the epoch.
    """
    step = current_step()
    global_seeds.share(step.global_seeds)
    # Keras' counters do not depend on the data: without this, some ranks would count the step that finds no data.
    with tf.control_dependencies([x for x in tf.nest.flatten(data, expand_composites=True) if tf.is_tensor(x)]):
        step.begin_replica(data, rows, global_rows)
        state = step.states[local_replica()] = ReplicaState(step, data)
        with step_logs.kept_where(step.counts, [v for metric in metrics_of(step.model) for v in metric.variables]):
            logs = step.function(data)
        state.bring_together()
        return logs if step_logs.read_by_keras(step, logs) else step_logs.of_all_replicas(step, logs)


@contextlib.contextmanager
def _other_random_numbers(worker: int) -> Iterator[None]:
    """Lets `tf.random` operations without a seed draw other numbers on each worker; worker 0 draws as one process."""
    graph = tf.compat.v1.get_default_graph()
    if worker == 0 or tf.executing_eagerly() or graph.seed is None:
        yield
        return
    before, graph.seed = graph.seed, (graph.seed + worker * _SEED_STRIDE) % 2**31
    try:
        yield
    finally:
        graph.seed = before


def _is_distributed(data: Any) -> bool:
    return any(isinstance(leaf, DistributedValues) for leaf in tf.nest.flatten(data))


def _local_mean(strategy: Any, value: Any) -> tf.Tensor:
    values = strategy.experimental_local_results(value)
    return values[0] if len(values) == 1 else tf.reduce_mean(tf.stack(values), 0)


def _mark_reduced(value: Any) -> tf.Tensor:
    value = tf.convert_to_tensor(value)
    value._tfdist_reduced = True
    return value
