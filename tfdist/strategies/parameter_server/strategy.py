"""`tfdist.ParameterServerStrategy`: variables on parameter servers, steps on workers, asynchronous or synchronous."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.arguments import check_seconds
from tfdist.cluster.config import ClusterConfig
from tfdist.memory.policy import MemoryPolicy, policy_of
from tfdist.runtime import servers
from tfdist.steps.common_hooks import install
from tfdist.steps.keras_step import KerasStep
from tfdist.steps.validation import expect_use
from tfdist.strategies.parameter_server import connection, validation
from tfdist.strategies.parameter_server.batches import BatchIterator, CoordinatorDataset
from tfdist.strategies.parameter_server.dispatcher import Dispatcher
from tfdist.strategies.parameter_server.keras_hooks import ParameterServerHooks
from tfdist.strategies.parameter_server.variables import ParameterServerExtended
from tfdist.strategies.parameter_server.worker_input import shards_of_dataset, shards_of_function
from tfdist.strategies.validation import check_cluster

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
    are. Of a `keras.layers.Embedding` only the rows that a batch uses travel; `tfdist.layers.ShardedEmbedding`
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
        backup_workers: of the workers, how many compute in synchronous training what others are still at.
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
        backup_workers: int = 0,
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
        self._keras_step: KerasStep | None = None
        # Weak: data must not live longer for it.
        self._latest_batches: Callable[[], BatchIterator | None] = lambda: None
        self._start_timeout = start_timeout
        check_cluster(cluster, cluster_resolver)
        if cluster_resolver is not None:
            self._config, resolver = None, cluster_resolver
            workers = len(resolver.cluster_spec().as_dict().get("worker", ()))
        else:
            self._config = connection.find(cluster, start_timeout)
            resolver, workers = connection.resolver(self._config), len(self._config.jobs["worker"])
        validation.check_arguments(mode, max_inflight, worker_input, backup_workers, workers)
        if self._config is not None and not self._config.is_chief:
            servers.serve(self._config, start_timeout)
        super().__init__(resolver, variable_partitioner)
        self._extended.__class__ = ParameterServerExtended
        self._extended.configure(self._num_ps)
        self._mode, self._worker_input, self._backup_workers = mode, worker_input, backup_workers
        self._max_inflight = max_inflight or _PER_WORKER * self._num_workers
        self._keras_hooks = ParameterServerHooks(self)
        expect_use(self)

    _alone = "The chief does all the work alone"

    @property
    def _is_used(self) -> bool:
        return "_dispatcher" in vars(self)

    def _connect_to_cluster(self, coordinator_name: str) -> None:
        if self._config is not None:
            connection.await_servers(self._config, self._start_timeout)
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

    @property
    def _num_shards(self) -> int:
        """Into how many parts a batch is cut in synchronous training."""
        return self._num_workers - self._backup_workers

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

    @contextlib.contextmanager
    def _traced(self, step: KerasStep) -> Iterator[None]:
        """While a step is traced for a shard of a batch: Keras' losses and metrics use the shard's weight."""
        self._keras_step = step
        try:
            yield
        finally:
            self._keras_step = None

    @property
    def _is_in_shard(self) -> bool:
        """Whether a step is traced for a shard of a batch."""
        return self._keras_step is not None

    def _run_replica(self, function: Callable, *arguments: Any) -> Any:
        """Traces a function in a replica's context, for a worker."""
        return super().run(tf.autograph.experimental.do_not_convert(function), arguments)
