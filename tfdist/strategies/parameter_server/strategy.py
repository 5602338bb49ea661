"""`tfdist.ParameterServerStrategy`: variables on parameter servers, steps on workers, asynchronous or synchronous.

    coordinator (chief)     the variables of metrics; runs the program, hands out steps
    parameter servers       all other variables, each on the server that has the fewest bytes so far
    workers                 none: they read variables from the servers and change them there

Several workers change a variable at the same time, so each addition has to be a single operation on the server. And
workers read and update only the rows of a table that they need.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.arguments import check_count, check_seconds, is_new
from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.discovery import discover
from tfdist.cluster.errors import ClusterError
from tfdist.compat.upstream import TFDatasetAdapter, get_stateless_scope, in_stateless_scope
from tfdist.compat.upstream import parameter_server_strategy as upstream
from tfdist.inspection.model_state import all_optimizers_of
from tfdist.memory.policy import MemoryPolicy, policy_of
from tfdist.runtime import servers
from tfdist.runtime.job import say
from tfdist.steps.keras_step import shadowed, step_of
from tfdist.strategies import validation
from tfdist.strategies.hooks import StrategyHooks, install
from tfdist.strategies.parameter_server.data import (
    COORDINATOR,
    BatchIterator,
    CoordinatorDataset,
    shards_of_dataset,
    shards_of_function,
)
from tfdist.strategies.parameter_server.dispatcher import Dispatcher
from tfdist.strategies.parameter_server.runner import PredictRunner, Runner
from tfdist.strategies.parameter_server.synchronous import SynchronousRunner
from tfdist.strategies.validation import check_cluster, expect_use

_PER_WORKER = 2


class ParameterServerStrategy(tf.distribute.ParameterServerStrategy):
    """Trains with variables on parameter servers and steps on workers, under plain `fit`, `evaluate` and `predict`.

    One process, the chief, runs the program and hands out the steps; in workers and parameter servers the constructor
    serves until the chief has ended, and then ends the process. Training does not wait for a worker that dies: another
    one does its step. Source of the design: "Large Scale Distributed Deep Networks" (Dean et al., 2012).

    Asynchronous training ("async") applies each gradient when it comes; it was computed with weights that other workers
    may have changed since. Counters (`optimizer.iterations`, and with it schedules) and metrics are exact all the same.
    What is done again after a worker died may have changed weights and counters twice. Synchronous training ("sync")
    cuts each batch into shards for the workers and applies their gradients together, once: weights, metrics and history
    are those of one process. BatchNormalization sees one shard at a time.

    A metric's variables are on the coordinator, all others on the parameter servers: each one where the fewest bytes
    are. Only the rows of a `keras.layers.Embedding` that a batch uses travel; `tfdist.layers.ShardedEmbedding`
    spreads one over several servers.

    Args:
        cluster_resolver: as for TensorFlow's strategy: of servers that run already. `cluster` is the shorter way.
        variable_partitioner: as for TensorFlow's strategy, for `tf.Variable`s; Keras' variables are never split.
        cluster: the cluster and this process' place in it; by default what `tfdist.discover()` finds.
        mode: "async" or "sync".
        max_inflight: how many executions (of `steps_per_execution` steps) are handed out and not done at a time in
            asynchronous training; by default 2 a worker. With 1, results are those of one process, bit for bit.
        worker_input: whether a `tf.data.Dataset` given to fit or evaluate is read by the workers, each its part of the
            batches, instead of by the coordinator, which sends batches to them. Functions that return a dataset
            (`strategy.distribute_datasets_from_function`, or passed to fit as they are) always are.
        memory: what models keep for their backward pass, see `tfdist.memory.MemoryPolicy`; by default everything.
        start_timeout: how long to wait at the start until all processes are there, in seconds.

    Raises:
        ValueError: for arguments that make no sense.
        tfdist.ClusterError: if there is no chief, worker or ps, or a process of the cluster does not come; the message
            names it.

    Example (`tfdist run -n 2 --ps 1 train.py`):
        >>> import keras, numpy as np, tfdist
        >>> strategy = tfdist.ParameterServerStrategy()  # doctest: +SKIP
        >>> with strategy.scope():  # doctest: +SKIP
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> history = model.fit(np.ones((64, 4)), np.ones((64, 1)), batch_size=8)  # doctest: +SKIP
    """

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        variable_partitioner: Any = None,
        *,
        cluster: ClusterConfig | None = None,
        mode: str = "async",
        max_inflight: int | None = None,
        worker_input: bool = False,
        memory: MemoryPolicy | str | None = None,
        start_timeout: float = 300.0,
    ):
        install()
        self._memory = policy_of(memory)
        if self._memory is not None and self._memory.is_automatic:
            raise ValueError(
                f"Received: memory={memory!r}. A choice estimates steps of one process, and those of "
                "ParameterServerStrategy run on workers. Expected: a policy with modes of your choice."
            )
        check_seconds(start_timeout=start_timeout)
        # Weak: data must not live longer for it.
        self._latest_batches: Callable[[], BatchIterator | None] = lambda: None
        self._start_timeout = start_timeout
        check_cluster(cluster, cluster_resolver)
        if cluster_resolver is not None:
            self._config, resolver = None, cluster_resolver
        else:
            self._config = find_cluster(cluster, start_timeout)
            resolver = _resolver(self._config)
        check_arguments(mode, max_inflight, worker_input)
        if self._config is not None and not self._config.is_chief:
            servers.serve(self._config, start_timeout)
        super().__init__(resolver, variable_partitioner)
        self._extended.__class__ = ParameterServerExtended
        self._extended.configure(self._num_ps)
        self._mode, self._worker_input = mode, worker_input
        self._max_inflight = max_inflight or _PER_WORKER * self._num_workers
        self._keras_hooks = ParameterServerHooks(self)
        expect_use(self)

    _alone = "The chief does all the work alone"

    @property
    def _is_used(self) -> bool:
        return "_dispatcher" in vars(self)

    def _connect_to_cluster(self, coordinator_name: str) -> None:
        if self._config is not None:
            _await_servers(self._config, self._start_timeout)
        super()._connect_to_cluster(coordinator_name)

    # Workers and parameter servers go no further than the constructor.
    is_chief = True

    @property
    def num_ps(self) -> int:
        """The number of parameter servers."""
        return self._num_ps

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return self._num_workers

    @functools.cached_property
    def coordinator(self) -> tf.distribute.coordinator.ClusterCoordinator:
        """TensorFlow's coordinator, for custom training loops."""
        return tf.distribute.coordinator.ClusterCoordinator(self)

    @property
    def executions_done(self) -> list[int]:
        """How many executions, or shards of synchronous steps, each worker has done; predictions included."""
        return [worker.done for worker in self._dispatcher.workers]

    @functools.cached_property
    def _dispatcher(self) -> Dispatcher:
        """Hands tasks to the workers."""
        kind = "GPU" if self._extended._num_gpus_per_worker else "CPU"
        devices = [f"/job:worker/replica:0/task:{i}/device:{kind}:0" for i in range(self._num_workers)]
        return Dispatcher(self.coordinator, devices)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        if not tf.executing_eagerly() or not isinstance(dataset, tf.data.Dataset):
            return super().experimental_distribute_dataset(dataset, options)
        return CoordinatorDataset(dataset, self._keep_latest)

    def _keep_latest(self, iterator: BatchIterator) -> None:
        self._latest_batches = weakref.ref(iterator)

    def _on_workers(self, dataset: CoordinatorDataset) -> Any:
        """The dataset, read by the workers if `worker_input` is set: each reads its part of the batches."""
        return shards_of_dataset(dataset, self._num_workers) if self._worker_input else dataset

    def distribute_datasets_from_function(self, dataset_fn: Callable, options: Any = None) -> Any:
        if not tf.executing_eagerly():
            return super().distribute_datasets_from_function(dataset_fn, options)
        if self._mode == "sync":
            raise ValueError(
                "Received: a dataset function and mode='sync'. In synchronous training the coordinator cuts each batch "
                "into the workers' shards. Expected: arrays or a tf.data.Dataset; or mode='async'."
            )
        return shards_of_function(dataset_fn, self._num_workers)

    def _run_replica(self, function: Callable, *arguments: Any) -> Any:
        """Traces a function in a replica's context, for a worker."""
        with self._extended.scheduled():
            return super().run(tf.autograph.experimental.do_not_convert(function), arguments)


def check_arguments(mode: str, max_inflight: int | None, worker_input: bool) -> None:
    if mode not in ("async", "sync"):
        raise ValueError(
            f"Received: mode={mode!r}. Expected: 'async', in which each worker's gradient is applied when it comes, or "
            "'sync', in which the workers' gradients of a batch are applied together."
        )
    if max_inflight is not None:
        check_count("max_inflight", max_inflight)
    if mode == "sync" and worker_input:
        raise ValueError(
            "Received: mode='sync' and worker_input=True. In synchronous training the coordinator cuts each batch into "
            "the workers' shards. Expected: worker_input=False, or mode='async'."
        )


_START = "`tfdist run -n 2 --ps 1 train.py` starts a chief, two workers and a parameter server on this machine"


def find_cluster(cluster: ClusterConfig | None, start_timeout: float) -> ClusterConfig:
    """The cluster that was given, or is discovered.

    Raises:
        ClusterError: if it has no chief, worker or parameter server.
    """
    config = discover(timeout=start_timeout) if cluster is None else cluster
    if config.is_single_process:
        raise ClusterError(
            f"Received: no cluster ({config.source}). Expected: a chief, workers and parameter servers (jobs chief, "
            f"worker and ps in TF_CONFIG). {_START}."
        )
    if missing := [job for job in ("chief", "worker", "ps") if job not in config.jobs]:
        raise ClusterError(
            f"Received: a cluster without {' and '.join(missing)}: {config}. Expected: a chief, which runs the "
            f"program, at least one worker, which computes, and at least one ps, which holds variables. {_START}."
        )
    if config.task_type == "evaluator":
        raise ClusterError(
            f"Received: task evaluator {config.task_index}. Expected: chief, worker or ps; an evaluator works by "
            "itself: let it build and evaluate the model without a strategy."
        )
    return config


def _await_servers(config: ClusterConfig, start_timeout: float) -> None:
    """Waits in the coordinator until all others serve; from then on prints a line when one is gone or back.

    Raises:
        ClusterError: if one does not come.
    """

    def report_gone(job: str, index: int) -> None:
        name = _name(config, job, index)
        if job == "ps":
            say(servers.gone(name, "variables", servers.log_of(job, index)))
        else:
            say(f"{name} is gone; another worker does its step, and the training goes on without it until it is back")

    def report_back(job: str, index: int) -> None:
        say(f"{_name(config, job, index)} is back")

    servers.await_servers(config, start_timeout, report_gone, report_back)
    tf.get_logger().addFilter(_keep_message)


def _resolver(config: ClusterConfig) -> tf.distribute.cluster_resolver.ClusterResolver:
    """The cluster in the form that TensorFlow's strategy takes."""
    spec = tf.train.ClusterSpec({job: dict(tasks) for job, tasks in config.jobs.items() if job != "evaluator"})
    return tf.distribute.cluster_resolver.SimpleClusterResolver(spec, task_type="chief", task_id=0, rpc_layer="grpc")


def _keep_message(record: logging.LogRecord) -> bool:
    """Drops TensorFlow's message about a lost worker, several lines long: `report_gone` prints one line."""
    return not str(record.msg).startswith("Worker %s failed with")


def _name(config: ClusterConfig, job: str, index: int) -> str:
    return f"{job} {index} ({config.jobs[job][index]})"


class ParameterServerExtended(upstream.ParameterServerStrategyV2Extended):
    """The part of `ParameterServerStrategy` that `tf.distribute` calls: one replica a worker.

    A replica updates variables where they are, without asking the other replicas. TensorFlow's own part makes replicas
    meet in every update (`merge_call`). That cannot be done inside a branch (`tf.cond`), but the updates of accumulated
    gradients and of moving averages are in one.
    """

    _bytes: list[int]

    def configure(self, number_of_servers: int) -> None:
        """Completes an instance that TensorFlow has made."""
        self._bytes = [0] * number_of_servers
        # This strategy schedules the steps of Keras itself: TensorFlow would refuse `run` without its own coordinator.
        self._allow_run_without_coordinator = True
        self._num_gpus_per_worker = min(self._num_gpus_per_worker, 1)

    def unpartitioned(self) -> contextlib.AbstractContextManager[None]:
        """Creates variables as they are: Keras has no variables in parts."""
        return shadowed(self, _variable_partitioner=None)

    def scheduled(self) -> contextlib.AbstractContextManager[None]:
        """While it is entered, what is traced is for a worker, as in `schedule` of TensorFlow's coordinator."""
        return shadowed(self, _being_scheduled=True)

    def _call_for_each_replica(self, fn: Callable, args: tuple, kwargs: dict) -> Any:
        if not self._being_scheduled and is_new(self, "alone"):
            warnings.warn(
                "Received: strategy.run outside of a function that strategy.coordinator.schedule was given. The chief "
                "does this work alone. Expected: `strategy.coordinator.schedule(step, args=...)` of a tf.function in "
                "which strategy.run is called; or model.fit.",
                stacklevel=2,
            )
        return super()._call_for_each_replica(fn, args, kwargs)

    def _use_merge_call(self) -> bool:
        return False

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        self._check_whole_batch()
        return value

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int, options: Any) -> Any:
        self._check_whole_batch()
        return super()._gather_to_implementation(value, destinations, axis, options)

    def _check_whole_batch(self) -> None:
        if step_of(self._container_strategy()) is not None:
            raise NotImplementedError(
                "Received: something that needs the whole batch in a step under ParameterServerStrategy(mode='sync'), "
                "where each worker has a shard of it: a loss over masked time steps, reduction="
                "'mean_with_sample_weight', BatchNormalization(synchronized=True), tfdist.global_sum, or all_gather. "
                "Expected: other ones; or mode='async'."
            )

    def _replica_ctx_update(self, var: Any, fn: Callable, args: tuple = (), kwargs: Any = None, group: bool = True):
        return self._update(var, fn, args, kwargs or {}, group)

    def _create_variable(self, next_creator: Callable, **kwargs: Any) -> Any:
        if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
            # The state of a metric: workers return what they add to it, the coordinator alone changes it.
            with tf.device(None), tf.device(COORDINATOR):
                return next_creator(**kwargs)
        # TensorFlow puts the next variable on the server with this number; a slot goes beside its variable.
        self._variable_count = self._bytes.index(min(self._bytes))
        variable = super()._create_variable(next_creator, **kwargs)
        for part in getattr(variable, "variables", [variable]):
            server = tf.DeviceSpec.from_string(part.device).task or 0
            self._bytes[server] += part.dtype.size * (part.shape.num_elements() or 0)
        return variable


class ServerVariable(keras.Variable):
    """A Keras variable whose additions are single operations on the server.

    Keras adds by reading, adding and writing (`assign(self + value)`): if two workers do so at the same time, one
    addition is lost. And Keras' embedding reads the whole table, unless the variable has a `sparse_read`.
    """

    def assign_add(self, value: Any) -> Any:
        return self._change("assign_add", value)

    def assign_sub(self, value: Any) -> Any:
        return self._change("assign_sub", value)

    def _change(self, method: str, value: Any) -> Any:
        if self._is_held_by_scope():
            return getattr(keras.Variable, method)(self, value)
        value = self._convert_to_tensor(value, dtype=self._dtype)
        if value.shape != self.shape:
            value = tf.broadcast_to(value, self.shape)  # as in Keras' sum
        # The new value, as Keras returns it. In a graph nothing reads it that nobody takes.
        return tf.convert_to_tensor(getattr(self._value, method)(value))

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """The rows with these indices; `tf.gather` looks for this method."""
        if self._is_held_by_scope():
            return tf.gather(self.value, indices, name=name)
        return self._maybe_autocast(self._value.sparse_read(indices, name=name))

    def _is_held_by_scope(self) -> bool:
        if not in_stateless_scope():
            return False
        holds = getattr(get_stateless_scope(), "holds", None)
        return holds is None or holds(self)


class ParameterServerHooks(StrategyHooks):
    """Models of a `ParameterServerStrategy`."""

    runs_whole_steps = False

    def make_epoch_iterator(self, make: Callable, iterator: Any, x: Any = None, **arguments: Any) -> None:
        if callable(x) and not hasattr(x, "__getitem__"):
            x = self._strategy.distribute_datasets_from_function(x)
        make(iterator, x=x, **arguments)
        dataset = iterator._distributed_dataset
        if isinstance(dataset, CoordinatorDataset):
            dataset.steps = iterator.steps_per_epoch
            if isinstance(iterator.data_adapter, TFDatasetAdapter):
                iterator._distributed_dataset = self._strategy._on_workers(dataset)

    def check(self, model: Any) -> None:
        validation.check_in_a_graph(self._strategy, model)
        validation.check_compiled(self._strategy, model)
        validation.check_stateful(model)
        is_async = self._strategy._mode == "async"
        if not is_async:
            validation.warn_of_statistics(model, "the rows of one worker's part of a batch")
        for optimizer in all_optimizers_of(model):
            steps = getattr(optimizer, "gradient_accumulation_steps", None)
            if steps and is_async and self._strategy._max_inflight > 1:
                raise ValueError(
                    f"Received: gradient_accumulation_steps={steps} in asynchronous training. Several workers would "
                    "add to the sums at a time, and one would update the weights while another one adds. Expected: "
                    "mode='sync', max_inflight=1, or a larger batch."
                )
        validation.check_variables(self._strategy, {f"model variable '{v.path}'": v for v in model.variables})

    def prepare(self, model: Any) -> None:
        # Steps of an interrupted fit must not change what callbacks restore at the beginning of this one.
        self._strategy._dispatcher.join()
        _install_runners(self._strategy, model)

    def fit(self, fit: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
        for runner in _runners(model):
            runner.forget_logs()
        return super().fit(fit, model, *args, **kwargs)

    def make_function(self, make: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
        (step,) = args
        kind = "test" if step == model.test_step else "train"
        if not isinstance(getattr(model, f"{kind}_function"), Runner):
            return make(model, *args, **kwargs)
        # A callback that calls `make_train_function(force=True)`: the workers are to do the rest as well.
        _finish(model)
        return _runner(self._strategy, model, kind)

    def make_predict_function(self, make: Callable, model: Any, force: bool = False) -> Any:
        if force:
            model.predict_function = None
        if not isinstance(model.predict_function, PredictRunner):
            model.predict_function = PredictRunner(self._strategy, model)
        return model.predict_function

    def save(self, write: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
        self.settle(model)
        return write(model, *args, **kwargs)

    def settle(self, model: Any) -> None:
        # What is saved belongs together once all steps that were handed out are done.
        if self._strategy._is_used:
            self._strategy._dispatcher.join()  # also of another model, of which this one is a part
            _finish(model)

    def initialize_variable(self, initialize: Callable, variable: Any, value: Any) -> None:
        """Makes the `tf.Variable` of a Keras variable in this strategy's scope."""
        with self._strategy.extended.unpartitioned():
            initialize(variable, value)
        if type(variable) is keras.Variable:
            variable.__class__ = ServerVariable


# fit ──> model.train_function = Runner             (asynchronous)   ──> Dispatcher ──> a worker: StepFunction
#                             or SynchronousRunner  (synchronous)    ──> Dispatcher ──> all workers: GradientStep
#                                                                        gradients  ──> servers: sum and update
# end of epoch ──> get_metrics_result ──> Runner.finish: all steps are done, and the metrics complete
def _install_runners(strategy: Any, model: keras.Model) -> None:
    """Sets a model's train and test functions to runners, unless it has them; `compile` removes them.

    Args:
        strategy: the strategy.
        model: a model that was created in its scope.
    """
    for kind in ("train", "test"):
        if not isinstance(getattr(model, f"{kind}_function"), Runner):
            setattr(model, f"{kind}_function", _runner(strategy, model, kind))

    def get_metrics_result(model: keras.Model) -> Any:
        # Keras calls this at the end of an epoch, before anything else reads what was trained.
        if tf.executing_eagerly() and not in_stateless_scope():
            _finish(model)
        return type(model).get_metrics_result(model)

    def reset_metrics(model: keras.Model) -> None:
        # Steps that were handed out before belong to the old state, also if a fit was interrupted.
        for runner in _runners(model):
            runner.forget()
        type(model).reset_metrics(model)

    def settled(name: str) -> Callable:
        def method(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
            # Steps that were handed out have read the old weights, and would change the new ones.
            strategy._dispatcher.join()
            return getattr(type(model), name)(model, *args, **kwargs)

        return method

    own = {name: settled(name) for name in ("set_weights", "load_weights")}
    own |= {"get_metrics_result": get_metrics_result, "reset_metrics": reset_metrics}
    for name, method in own.items():
        # Past Keras' attribute tracking.
        object.__setattr__(model, name, types.MethodType(method, model))


def _runner(strategy: Any, model: keras.Model, kind: str) -> Runner:
    is_synchronous = kind == "train" and strategy._mode == "sync"
    return SynchronousRunner(strategy, model) if is_synchronous else Runner(strategy, model, kind)


def _finish(model: keras.Model) -> None:
    """Waits until all steps of a model are done, if it has runners; then its metrics are complete.

    Raises:
        Exception: what a step has raised.
    """
    for runner in _runners(model):
        runner.finish()


def _runners(model: keras.Model) -> list[Runner]:
    # An archive for serving has none.
    functions = (getattr(model, name, None) for name in ("train_function", "test_function"))
    return [function for function in functions if isinstance(function, Runner)]
