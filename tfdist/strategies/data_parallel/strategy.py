"""What the data-parallel strategies have in common: Keras' steps see global batches and global gradients.

DataParallelHooks     what Keras asks them (strategies/hooks.py); in a job of several processes the chief writes files,
                      and all processes stop together
DataParallel          mixin for subclasses of tf.distribute's strategies: `run` takes a step of Keras
DataParallelExtended  mixin for their extended parts: what replicas exchange, variables, datasets
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import logging
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist.arguments import AUTO, check_bucket_bytes, checked_shares, is_new
from tfdist.compat.deferred_captures import step_lock
from tfdist.compat.upstream import (
    DistributedValues,
    SyncOnReadVariable,
    TFDatasetAdapter,
    context,
    distribute_lib,
    distribute_utils,
    input_lib,
    mirrored_run,
)
from tfdist.compression import PowerSGD, TopK
from tfdist.compression.compressor import Compressor
from tfdist.inspection.model_state import make_global_seeds
from tfdist.inspection.program import program_of
from tfdist.memory.policy import MemoryPolicy, policy_of
from tfdist.optimizers.sharded_optimizer import collect_slots
from tfdist.runtime.agreement import Agreement, CommonStop, RowsSeen, restore_sigterm_handler
from tfdist.runtime.chief import ChiefIO, SyncCallback, let_chief_write
from tfdist.runtime.job import Job
from tfdist.runtime.peers import Peers
from tfdist.runtime.progress import InputMeter
from tfdist.steps import reduce
from tfdist.steps.derived_logs import metric_of
from tfdist.steps.gradients import BUCKET_BYTES, NARROW_DTYPES, GradientOptions
from tfdist.steps.keras_step import KerasStep, marked_for_xla, recognise_step, shadowed, step_of, traced, xla_compiles
from tfdist.steps.reduce import each, gathered, in_order_of_rows, of_any_size, values_of
from tfdist.strategies import validation
from tfdist.strategies.data_parallel import common_gradients, row_trial
from tfdist.strategies.data_parallel.dataset import (
    Pieces,
    ReplicaBatch,
    ReplicaBatchDataset,
    WholeBatch,
    count_rows,
    distribute_in_common_order,
    split_over_replicas,
    static_rows,
)
from tfdist.strategies.data_parallel.replica_step import (
    MetricTotals,
    make_replica_function,
    results_of_parts,
    shadowed_for_step,
)
from tfdist.strategies.data_parallel.shares import AutomaticShares, ShareBySpeed, ends_of_pieces
from tfdist.strategies.hooks import StrategyHooks, jit_compiles_by_itself, not_compiled_as_a_whole

_log = logging.getLogger("tfdist")
_SHARES_ARE_FOR_GLOBAL_BATCHES = (
    "Received: batch_shares=%s, and data that each process has sharded for itself (AutoShardPolicy.OFF or FILE, "
    "distribute_datasets_from_function): it trains on the rows that it has. Expected: a dataset of global batches, the "
    "same on every process, or batches as unequal as the shares."
)
# A large odd number, so that workers' seeds do not meet in those that users give.
_WORKER_SEED_STRIDE = 0x3C6EF373


class DataParallelHooks(StrategyHooks):
    """Models on several replicas, in one process or in a job of several."""

    is_data_parallel = True

    def __init__(self, strategy: Any):
        super().__init__(strategy, strategy._memory)
        self.compressor = strategy._gradient_options.compressor
        self.peers, self.agreement, self.input_meter = strategy._peers, strategy._agreement, strategy._input_meter
        self.rows_seen = RowsSeen() if strategy._peers else None

    @property
    def shares(self) -> list[float] | None:
        automatic = self._strategy._automatic_shares
        return automatic and automatic.shares

    @property
    def largest_piece(self) -> float | None:
        if self._strategy._automatic_shares is not None:
            return 1.0
        ends = self._strategy._ends_of_pieces
        return max(end - begin for begin, end in itertools.pairwise((0.0, *ends))) if ends else None

    def take_shares(self, shares: list[float]) -> None:
        automatic = self._strategy._automatic_shares
        if automatic is not None and len(shares) == len(automatic.shares):
            automatic.set(shares)

    @property
    def seed_is_given(self) -> bool:
        job = self._strategy._job
        return job is None or job.seed_is_given or context.global_seed() != job.seed

    def make_epoch_iterator(self, make: Callable, iterator: Any, **arguments: Any) -> None:
        with self._strategy._keras_input(iterator):
            make(iterator, **arguments)
        dataset = iterator._distributed_dataset
        is_cut = isinstance(dataset, ReplicaBatchDataset)
        if self._strategy._automatic_shares:
            self._strategy._automatic_shares.cuts = is_cut and dataset.is_whole
        if not is_cut or dataset.manual:
            self._strategy._say_that_shares_are_not_for_shards()
        if is_cut and isinstance(iterator.data_adapter, TFDatasetAdapter):
            # Keras counts the steps of an epoch here; a worker's own shards have more of them than the user's dataset.
            iterator.data_adapter._dataset = dataset.source
            iterator._num_batches = iterator.data_adapter.num_batches
        elif self.peers and not is_cut and isinstance(dataset, input_lib.DistributedDatasetsFromFunction):
            self.peers.check_same_dataset(dataset._datasets[0], manual=True)

    def check(self, model: Any) -> None:
        validation.check(self._strategy, model)

    def begin(self, model: Any) -> None:
        self._strategy._metric_totals.forget()
        make_global_seeds(self._strategy)

    def decide_jit_compile(self, decide: Callable, model: Any) -> bool:
        return jit_compiles_by_itself(model)

    def make_function(self, make: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
        if args[:1] == (model.train_step,):
            common_gradients.forget(model)
        with not_compiled_as_a_whole(model) if self._strategy.num_replicas_in_sync > 1 else contextlib.nullcontext():
            return make(model, *args, **kwargs)

    def make_predict_function(self, make: Callable, model: Any, force: bool = False) -> Any:
        make_global_seeds(self._strategy)
        return self.make_function(make, model, force)

    def read_metrics(self, read: Callable, model: Any, logs: Any) -> Any:
        self._strategy._metric_totals.settle(model)
        return read(model, logs)

    def call(self, method: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
        job = self._strategy._job
        if job is None:
            return super().call(method, model, *args, **kwargs)
        with job.alone(f"{method.__name__} of model '{model.name}'"):
            self._strategy._program = program_of(method, model, args, kwargs, self.keeps_own)
            return super().call(method, model, *args, **kwargs)

    def save(self, write: Callable, model: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        files = self._strategy._chief_io
        if files is None:
            return write(model, path, *args, **kwargs)
        asked = inspect.signature(write).bind(model, path, *args, **kwargs).arguments
        save = functools.partial(files.save, path, functools.partial(write, model, path, *args, **kwargs))
        is_export = write.__name__ in ("export", "write_out")  # which never have the optimizer
        if is_export or not asked.get("include_optimizer", True):
            return save()
        with self.collected(model):
            return save()

    def save_or_ask(
        self, save: Callable, model: Any, filepath: Any, overwrite: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        files = self._strategy._chief_io
        if files is None or overwrite:
            save(model, filepath, overwrite, *args, **kwargs)
        else:
            files.save_or_ask(filepath, lambda overwrite: save(model, filepath, overwrite, *args, **kwargs))

    @contextlib.contextmanager
    def collected(self, model: Any) -> Iterator[None]:
        """While the block runs, the chief can write a model. All processes come here together."""
        collect_slots(model)
        yield

    def concatenate(self, concatenate: Callable, value: Any, strategy: Any) -> Any:
        """The rows that the replicas of all processes predict, in the order of the batch."""
        return self._strategy._concatenated(value)

    def _arrange(self, callback_list: Any, callbacks: list, model: Any) -> list:
        """Leaves out what only the chief needs, and adds what makes the processes begin and stop together."""
        if self._strategy._chief_io is None:
            return callbacks
        callbacks, sync = let_chief_write(callbacks, self._strategy.is_chief, self.collected)
        if automatic := self._strategy._automatic_shares:
            waited = self._strategy.extended._seconds_waited
            callbacks = [*callbacks, ShareBySpeed(automatic, self.peers, waited, callback_list)]
        return [*callbacks, CommonStop(callback_list, callbacks), sync]

    def arrange_callbacks(self, callback_list: Any, model: Any) -> None:
        # Keras may give one list its model twice.
        if not any(isinstance(callback, SyncCallback) for callback in callback_list.callbacks):
            super().arrange_callbacks(callback_list, model)


class DataParallel:
    """Mixin for subclasses of `tf.distribute.Strategy`, in one process or in a job of several.

    These attributes are for the files of this package; others read those of `DataParallelHooks`.
    """

    _keras_hooks: DataParallelHooks  # set at the end of `__init__`
    _job: Job | None = None  # that of several processes, set before `_begin`; `None` for one process
    _memory: MemoryPolicy | None  # the memory policy of its models
    _gradient_options: GradientOptions  # how gradients travel
    _global_batch_norm: bool  # whether BatchNormalization uses the statistics of the global batch
    _batch_shares: list[float] | str | None  # as given
    _arguments: dict[str, str]  # those that have to be the same on all processes
    _ends_of_pieces: tuple[float, ...] | None = None  # where each piece of a batch ends; `None`: they are equal, or
    _automatic_shares: AutomaticShares | None = None  # change by speed
    _metric_totals: MetricTotals  # what metrics add up to at the end of an epoch
    _agreement: Agreement | None  # requests that all processes obey after the same step; `None` for one process
    _input_meter: InputMeter  # counts what compiled steps take from the data
    _variable_numbers: Iterator[int]  # all processes create variables in the same order, under names that may differ
    _global_seeds: keras.random.SeedGenerator | None = None  # of `make_global_seeds`
    _keras_step: KerasStep | None = None  # that is traced, see `step_of`
    _program: dict[str, Any] | None = None  # of a call of Keras that has not asked for its data yet
    _keras_asks_for_data = False  # whether Keras makes its input now, of which this is the iterator:
    _epoch_iterator: Any = None

    def _configure_data_parallel(
        self,
        compression: Any,
        bucket_bytes: Any,
        batch_norm: str,
        batch_shares: Any,
        memory: Any,
        dtypes: Any = NARROW_DTYPES,
    ) -> None:
        self._batch_shares = checked_shares(batch_shares)
        self._arguments = {
            "compression": repr(compression),
            "bucket_bytes": repr(bucket_bytes),
            "batch_norm": repr(batch_norm),
            "batch_shares": repr(self._batch_shares),
        }
        self._gradient_options = make_gradient_options(compression, bucket_bytes, dtypes)
        if batch_norm not in ("global", "local"):
            raise ValueError(
                f"Unknown batch_norm. Received: batch_norm={batch_norm!r}. Expected 'global' (statistics of the global "
                "batch, as one process computes them) or 'local' (of each replica's rows; no collectives)."
            )
        self._global_batch_norm = batch_norm == "global"
        self._memory = policy_of(memory)
        self._metric_totals = MetricTotals()
        self._variable_numbers = itertools.count()

    def _begin(self) -> None:
        """Takes over the job's seed, and the handling of signals; called when TensorFlow's strategy was made."""
        self._agreement = Agreement() if self._job else None
        self._input_meter = InputMeter()
        if self._job:
            if context.global_seed() != self._job.seed:
                tf.random.set_seed(self._job.seed)
            restore_sigterm_handler()
            self._job.peers.check_same_strategy(self._arguments)
            # What scripts draw from generators that they have not seeded, such as the order of files.
            self._job.peers.share_random_state("create the strategy")
        self._take_shares()

    def _take_shares(self) -> None:
        """Takes over `batch_shares`.

        Raises:
            ValueError: for another number of them, or where nobody can measure the speed of each worker.
        """
        workers, devices = self.extended._input_position()[0], len(self.extended.worker_devices)
        if self._batch_shares != AUTO:
            self._ends_of_pieces = ends_of_pieces(self._batch_shares, workers, devices)
        elif workers > 1 and self.extended._seconds_waited is None:
            raise ValueError(
                "Received: batch_shares='auto' with a transport that does not say how long it waits for others. "
                "Expected: transport='direct', or a number for each process, such as [2, 1]."
            )
        elif workers == 1 and devices > 1:
            raise ValueError(
                "Received: batch_shares='auto' with several devices in one process, which does not time each. "
                "Expected: a number for each device, such as [2, 1]."
            )
        elif workers > 1:
            self._automatic_shares = AutomaticShares(workers, devices)
            # Where some are sent while others are computed, nobody knows how long a process waits.
            self._gradient_options = dataclasses.replace(self._gradient_options, bucket_bytes=None)

    @property
    def _pieces(self) -> Pieces:
        """How a global batch is cut into what the replicas get; in a step, where its pieces end by then."""
        if self._automatic_shares is not None:
            return self._automatic_shares.ends()
        return self._ends_of_pieces or self.num_replicas_in_sync

    @property
    def _peers(self) -> Peers | None:
        """The other processes of the job; `None` without a cluster."""
        return self._job.peers if self._job else None

    @property
    def _chief_io(self) -> ChiefIO | None:
        """Who writes which file; `None` without a cluster."""
        return self._job.chief_io if self._job else None

    @property
    def is_chief(self) -> bool:
        """Whether this process prints, uploads and writes files for all: rank 0, and always without a cluster."""
        return self._peers is None or self._peers.rank == 0

    @contextlib.contextmanager
    def _keras_input(self, epoch_iterator: Any = None) -> Iterator[None]:
        """While Keras builds its input, makes distributed datasets carry the number of rows of each global batch."""
        if self._peers:
            restore_sigterm_handler()
            program, self._program = self._program, None
            self._peers.share_random_state(program=program)
        with step_lock(), shadowed(self, _keras_asks_for_data=True, _epoch_iterator=epoch_iterator):
            yield

    def _say_that_shares_are_not_for_shards(self) -> None:
        has_shares = self._ends_of_pieces or self._automatic_shares
        if has_shares and self.is_chief and is_new(self, "shares"):
            _log.warning(_SHARES_ARE_FOR_GLOBAL_BATCHES, self._batch_shares)

    def run(self, fn: Callable, args: tuple = (), kwargs: dict | None = None, options: Any = None) -> Any:
        # What is noted of a step, and replaced on its model, while it is traced, is for this thread and its replicas.
        with step_lock():
            return self._run(fn, args, kwargs, options)

    def _run(self, fn: Callable, args: tuple, kwargs: dict | None, options: Any) -> Any:
        """Recognises Keras' step, cuts its batch, runs it on each replica, tries it once, and returns results."""
        step = recognise_step(fn, args, kwargs)
        args = tuple(self._cut_whole(step, a) if isinstance(a, WholeBatch) else a for a in args)
        if step is None:
            self._metric_totals.forget()
        if step is None or self.num_replicas_in_sync == 1:
            with other_random_numbers(self.extended._input_position()[1]):
                # It is not Keras', and knows nothing of numbers of rows.
                plain = tuple(a.data if isinstance(a, ReplicaBatch) else a for a in args)
                return super().run(fn, plain, kwargs, options)
        batch = self._cut(step, *args)
        operations = _count_operations()
        with self._traced(step, batch):
            # On each replica, in a thread that waits for the others wherever they exchange values:
            #   its rows -> forward -> loss -> backward -> gradients, state -> sums -> optimizer.apply -> logs
            try:
                results = super().run(make_replica_function(step), batch, None, options)
            except (AssertionError, RuntimeError) as error:
                common_gradients.check_meetings(step, error)
                raise
        row_trial.try_once(step, (_count_operations() - operations) // len(self.extended.worker_devices))
        return self._outputs_for_keras(step, results) if step.kind == "predict" else self._logs_for_keras(results)

    def _cut_whole(self, step: KerasStep | None, batch: WholeBatch) -> Any:
        """The rows of each replica, by the shares of this step."""
        if step is not None and step.kind == "train":
            with tf.device("CPU:0"):
                self._automatic_shares.note_rows(count_rows(batch.data))
        return split_over_replicas(self.extended, *batch)

    def _cut(self, step: KerasStep, batch: Any) -> Any:
        """The rows of each replica: the strategy's datasets are cut already, `*_on_batch` gives a whole batch."""
        if isinstance(batch, ReplicaBatch):
            return batch
        if any(isinstance(leaf, DistributedValues) for leaf in tf.nest.flatten(batch)):  # the user's own
            rows = [static_rows(part) for part in self.experimental_local_results(batch)]
            # Other processes may have other numbers of rows, and trace at other times.
            return ReplicaBatch(batch, None, None if self._peers or None in rows else sum(rows))
        step.on_batch = True
        return split_over_replicas(self.extended, batch)

    @contextlib.contextmanager
    def _traced(self, step: KerasStep, batch: Any) -> Iterator[None]:
        """While the block runs, the replicas trace this step: methods of its model are shadowed, operations marked."""
        with contextlib.ExitStack() as stack:
            if step.kind != "predict":
                shadows = shadowed_for_step(
                    step, options=self._gradient_options, global_batch_norm=self._global_batch_norm
                )
                stack.enter_context(shadows)
            step.graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
            stack.enter_context(traced(self, step))
            stack.enter_context(other_random_numbers(self.extended._input_position()[1]))
            step.purpose = self._identify(step)
            step.is_compiled = xla_compiles(step.model, batch)
            stack.enter_context(marked_for_xla(step.is_compiled))
            yield

    def _identify(self, step: KerasStep) -> tuple[int, str]:
        """A number and a text that tell a step from those of other models, the same on all processes."""
        numbers = [getattr(variable.value, "_tfdist_number", -1) for variable in step.model.weights]
        least, most = min(numbers, default=0), max(numbers, default=0)
        number = zlib.crc32(f"{self._collective_key_base} {step.kind} {numbers}".encode())
        return number, f"{step.kind} step of '{step.model.name}', variables {least} to {most}"

    def _logs_for_keras(self, logs: Any) -> Any:
        """One value of each log: what Keras reduces once more is the same then.

        A metric's result is that of this process, until Keras reads it at the end of the epoch: more would take a
        collective.
        """
        results: dict[int, list[Any]] = {}

        def of_process(value: Any) -> tf.Tensor:
            values = self.experimental_local_results(value)
            origin = metric_of(values[0])
            if len(values) == 1 or origin is None:
                return _local_mean(self, value)
            metric, number = origin
            if id(metric) not in results:
                results[id(metric)] = results_of_parts(self, metric)
            return results[id(metric)][number]

        return tf.nest.map_structure(lambda value: _mark_reduced(of_process(value)), logs)

    def _outputs_for_keras(self, step: KerasStep, outputs: Any) -> Any:
        """The outputs of a predict step, marked for `concatenate`; whole where Keras cannot put them together."""
        flat = tf.nest.flatten(outputs)
        for i in step.same_outputs:
            flat[i] = _mark_reduced(values_of(flat[i])[0])
        for i in step.sizeless_outputs:
            flat[i]._tfdist_sizeless = True
        if self.num_replicas_in_sync == len(self.extended.worker_devices):
            # Keras cannot put together those of the replicas of one process.
            flat = [
                self._gathered_rows(x) if _is_sizeless(x) or isinstance(values_of(x)[0], tf.SparseTensor) else x
                for x in flat
            ]
        return tf.nest.pack_sequence_as(outputs, flat)

    def reduce(self, reduce_op: Any, value: Any, axis: int | None) -> Any:
        # Keras passes every log on to `reduce` with axis=0, scalars included (keras issue 20585).
        return value if _is_reduced(value) else super().reduce(reduce_op, value, axis)

    def gather(self, value: Any, axis: int) -> Any:
        # In a loop of the user's own there may be no row on any replica; `predict` knows which outputs have any number.
        gather = super().gather
        return gathered(value, axis, functools.partial(of_any_size, gather)) if self._peers else gather(value, axis)

    def _concatenated(self, value: Any) -> Any:
        """An output of `predict`, of the rows of all replicas, in the order of the batch."""
        if _is_reduced(value):
            return value
        whole = self._gathered_rows(value)
        if len(self.extended.worker_devices) == 1:
            return whole
        sizes = super().gather(each(lambda one: count_rows(one)[tf.newaxis], value), 0)
        return in_order_of_rows(value, whole, sizes, self.extended._input_position()[0])

    def _gathered_rows(self, value: Any) -> Any:
        return of_any_size(super().gather, value) if _is_sizeless(value) else super().gather(value, 0)


def make_gradient_options(
    compression: Any, bucket_bytes: int | str | None, dtypes: Mapping[str | None, tf.DType | None]
) -> GradientOptions:
    """How gradients travel, from the arguments of a strategy.

    Args:
        compression: one of `dtypes`, or a method of `tfdist.compression`.
        bucket_bytes: as in `GradientOptions`, or "auto".
        dtypes: what can be added up, by the name of the compression.

    Raises:
        ValueError: for another `compression` or `bucket_bytes`.
    """
    check_bucket_bytes(bucket_bytes)
    if bucket_bytes == AUTO:
        bucket_bytes = BUCKET_BYTES
    if isinstance(compression, (PowerSGD, TopK)):
        return GradientOptions(None, bucket_bytes, Compressor(compression))
    if not (compression is None or isinstance(compression, str)) or compression not in dtypes:
        raise ValueError(
            f"Received: compression={compression!r}. Expected one of {list(dtypes)}, of which None sends gradients as "
            "they are and the others cast them, or a method such as tfdist.compression.PowerSGD(rank=4)."
        )
    return GradientOptions(dtypes[compression], bucket_bytes)


class DataParallelExtended:
    """Mixin for subclasses of `tf.distribute.StrategyExtended`."""

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        with step_lock():
            result = super()._reduce_to(reduce_op, value, destinations, options)
        return self._exchanged(value, result)

    def _batch_reduce_to(self, reduce_op: Any, pairs: Any, options: Any) -> Any:
        pairs = [(value, self._place(destinations)) for value, destinations in pairs]
        with step_lock():
            results = super()._batch_reduce_to(reduce_op, pairs, options)
        return self._exchanged([value for value, _ in pairs], results)

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int, options: Any) -> Any:
        def gather(part: Any, axis: int) -> Any:
            to = part if destinations is value else self._place(destinations)
            return self._gather_dense(part, to, axis, options)

        return self._exchanged(value, gathered(value, axis, gather))

    def _gather_dense(self, value: Any, destinations: Any, axis: int, options: Any) -> Any:
        with step_lock():
            return super()._gather_to_implementation(value, destinations, axis, options)

    def _exchanged(self, parts: Any, results: Any) -> Any:
        """Lets TensorFlow see what a collective does not tell: a result needs the parts of all replicas.

        Otherwise XLA may put what one replica's part is made of, and what another replica's result flows into, into one
        cluster: that would wait for the result, and the result for the cluster. The same goes for the exchange before:
        each device has them in order.
        """
        step = step_of(self._container_strategy())
        if step is not None and step.is_compiled and len(self.worker_devices) > 1:
            # Those of a branch are not seen outside of it; constants may be in no graph.
            graph = tf.compat.v1.get_default_graph()
            needed = [x for x in (*_tensors(parts), *step.exchanged) if getattr(x, "graph", None) is graph]
            results = tf.nest.map_structure(lambda result: _waiting_for(needed, result), results)
            step.exchanged = _tensors(results)
        reduce.agreed(_tensors(results))
        return results

    def _place(self, destinations: Any) -> Any:
        # What a replica exchanges goes where it is. TensorFlow asks the tensor, and those of a batch know no device.
        return self.worker_devices[0] if isinstance(destinations, str) and not destinations else destinations

    def _call_for_each_replica(self, fn: Callable, args: tuple, kwargs: dict) -> Any:
        if self._container_strategy().num_replicas_in_sync > 1:
            return super()._call_for_each_replica(fn, args, kwargs)
        # What only merges this replica's value runs in any graph then, that of a branch, too.
        return self._call_here(0, fn, args, kwargs)

    def _call_here(self, replica: int, fn: Callable, args: tuple, kwargs: dict) -> Any:
        """Calls a function on this process' only replica, in the thread of the caller."""
        args, kwargs = distribute_utils.select_replica(0, (args, kwargs))
        context = distribute_lib.ReplicaContext(self._container_strategy(), replica_id_in_sync_group=replica)
        with context, tf.device(self.worker_devices[0]):
            result = fn(*args, **kwargs)
        return distribute_utils.regroup((result,))

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
        variable._tfdist_number = next(self._container_strategy()._variable_numbers)
        if isinstance(variable, SyncOnReadVariable):
            self._container_strategy()._metric_totals.watch(variable)
        return variable

    def _experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: Any) -> Any:
        return distribute_in_common_order(self, dataset, options, super()._experimental_distribute_dataset)

    def _gather_of_rows(self) -> Callable[[tf.Tensor], tf.Tensor] | None:
        """A function that stacks the matrices of all replicas, of one shape, by rank; `None` where TensorFlow does it.

        It is called in a replica's context.
        """
        return None

    @property
    def _seconds_waited(self) -> Callable[[], float] | None:
        """A function: for how long this process has waited for others, in all; `None` where nobody knows."""
        return None

    def _input_position(self) -> tuple[int, int]:
        """Returns `(number of workers, index of this worker)`."""
        return 1, 0


def _waiting_for(needed: list[tf.Tensor], result: Any) -> Any:
    def copy(one: Any) -> Any:
        with tf.control_dependencies(needed):
            return tf.nest.map_structure(tf.identity, one, expand_composites=True)

    return each(copy, result)


def _tensors(nested: Any) -> list[tf.Tensor]:
    """All tensors of all replicas."""
    values = [values_of(one) for one in tf.nest.flatten(nested)]
    return [x for x in tf.nest.flatten(values, expand_composites=True) if tf.is_tensor(x)]


def _count_operations() -> int:
    return 0 if tf.executing_eagerly() else len(tf.compat.v1.get_default_graph().get_operations())


@contextlib.contextmanager
def other_random_numbers(worker: int) -> Iterator[None]:
    """Lets `tf.random` operations without a seed draw other numbers on each worker; worker 0 draws as one process."""
    owner, name = (context.context(), "_seed") if tf.executing_eagerly() else (tf.compat.v1.get_default_graph(), "seed")
    before = getattr(owner, name)
    if worker == 0 or before is None:
        yield
        return
    setattr(owner, name, (before + worker * _WORKER_SEED_STRIDE) % 2**31)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _local_mean(strategy: Any, value: Any) -> tf.Tensor:
    values = strategy.experimental_local_results(value)
    return values[0] if len(values) == 1 else tf.reduce_mean(tf.stack(values), 0)


def _is_reduced(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and getattr(value, "_tfdist_reduced", False)


def _is_sizeless(value: Any) -> bool:
    return getattr(value, "_tfdist_sizeless", False)


def _mark_reduced(value: Any) -> tf.Tensor:
    value = tf.convert_to_tensor(value)
    value._tfdist_reduced = True
    return value
