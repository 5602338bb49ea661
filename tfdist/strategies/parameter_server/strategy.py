"""`tfdist.ParameterServerStrategy`: variables on parameter servers, steps on workers, asynchronous or synchronous."""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.arguments import check_seconds
from tfdist.cluster.config import ClusterConfig
from tfdist.compat import install
from tfdist.memory.policy import MemoryPolicy, policy_of
from tfdist.strategies import servers
from tfdist.strategies.keras_step import KerasStep
from tfdist.strategies.parameter_server import checks, connection, installation
from tfdist.strategies.parameter_server.batches import CoordinatorDataset
from tfdist.strategies.parameter_server.dispatcher import Dispatcher
from tfdist.strategies.parameter_server.extended import ParameterServerExtended
from tfdist.strategies.parameter_server.worker_input import shards_of_dataset, shards_of_function

_PER_WORKER = 2
_strategies: weakref.WeakSet[ParameterServerStrategy] = weakref.WeakSet()


def warn_without_scope() -> None:
    """Warns, once, that Keras works without a strategy although there is one, which nobody has used yet."""
    for strategy in _strategies:
        if "dispatcher" not in vars(strategy) and not strategy._warned:
            strategy._warned = True
            warnings.warn(
                "Received: a call of fit, evaluate or predict for a model that was created outside of "
                "strategy.scope(). The chief does all the work alone, and no model has used the "
                "ParameterServerStrategy yet. Expected: `with strategy.scope(): model = ...; model.compile(...)`, "
                "around load_model, too, unless this is meant.",
                stacklevel=4,
            )


class ParameterServerStrategy(tf.distribute.ParameterServerStrategy):
    """Trains with variables on parameter servers and steps on workers, under plain `fit`, `evaluate` and `predict`.

    One process, the chief, runs the program and hands out the steps; in workers and parameter servers the constructor
    serves until the chief has ended, and then ends the process. A worker that dies is waited for by nobody: another one
    does what it was doing. Source of the design: "Large Scale Distributed Deep Networks" (Dean et al., 2012).

    Asynchronous training ("async") applies each gradient when it comes; it was computed with weights that other workers
    may have changed since. Counters (`optimizer.iterations`, and with it schedules) and metrics are exact all the same.
    What is done again after a worker died may have changed weights and counters twice. Synchronous training ("sync")
    cuts each batch into shards for the workers and applies their gradients together, once: weights, metrics and history
    are those of one process. BatchNormalization sees one shard at a time.

    A metric's variables are on the coordinator, all others on the parameter servers: each one where the fewest bytes
    are. Of a `keras.layers.Embedding` only the rows that a batch uses travel; `tfdist.layers.ShardedEmbedding`
    spreads one over several servers.

    Args:
        cluster: the cluster and this process' place in it; by default what `tfdist.discover()` finds. Or a
            `tf.distribute.cluster_resolver.ClusterResolver` of servers that run already, as for TensorFlow's strategy.
        variable_partitioner: as for TensorFlow's strategy, for `tf.Variable`s; Keras' variables are never split.
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
        >>> strategy = tfdist.ParameterServerStrategy()
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> history = model.fit(np.ones((64, 4)), np.ones((64, 1)), batch_size=8)
    """

    def __init__(
        self,
        cluster: ClusterConfig | tf.distribute.cluster_resolver.ClusterResolver | None = None,
        variable_partitioner: Any = None,
        *,
        mode: str = "async",
        max_inflight: int | None = None,
        worker_input: bool = False,
        backup_workers: int = 0,
        memory: MemoryPolicy | str | None = None,
        start_timeout: float = 300.0,
    ):
        install()
        self.memory = policy_of(memory)
        if self.memory is not None and self.memory.is_automatic:
            raise ValueError(
                f"Received: memory={memory!r}. A choice estimates steps of one process, and those of "
                "ParameterServerStrategy run on workers. Expected: a policy with modes of your choice."
            )
        check_seconds(start_timeout=start_timeout)
        self._keras_step: KerasStep | None = None
        self._start_timeout = start_timeout
        if isinstance(cluster, tf.distribute.cluster_resolver.ClusterResolver):
            self._config, resolver = None, cluster
            workers = len(resolver.cluster_spec().as_dict().get("worker", ()))
        else:
            self._config = connection.find(cluster, start_timeout)
            resolver, workers = connection.resolver(self._config), len(self._config.jobs["worker"])
        checks.check_arguments(mode, max_inflight, worker_input, backup_workers, workers)
        if self._config is not None and not self._config.is_chief:
            servers.serve(self._config, start_timeout)
        super().__init__(resolver, variable_partitioner)
        self._extended.__class__ = ParameterServerExtended
        self._extended.configure(self._num_ps)
        self.mode, self.worker_input, self.backup_workers = mode, worker_input, backup_workers
        self.max_inflight = max_inflight or _PER_WORKER * self._num_workers
        self._warned = False
        _strategies.add(self)

    def _connect_to_cluster(self, coordinator_name: str) -> None:
        if self._config is not None:
            connection.await_servers(self._config, self._start_timeout)
        super()._connect_to_cluster(coordinator_name)

    @property
    def num_ps(self) -> int:
        """The number of parameter servers."""
        return self._num_ps

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return self._num_workers

    @property
    def num_shards(self) -> int:
        """Into how many parts a batch is cut in synchronous training."""
        return self._num_workers - self.backup_workers

    @functools.cached_property
    def coordinator(self) -> tf.distribute.coordinator.ClusterCoordinator:
        """TensorFlow's coordinator, for training loops of one's own."""
        return tf.distribute.coordinator.ClusterCoordinator(self)

    @functools.cached_property
    def dispatcher(self) -> Dispatcher:
        """Hands tasks to the workers."""
        kind = "GPU" if self._extended._num_gpus_per_worker else "CPU"
        devices = [f"/job:worker/replica:0/task:{i}/device:{kind}:0" for i in range(self._num_workers)]
        return Dispatcher(self.coordinator, devices)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        if not tf.executing_eagerly() or not isinstance(dataset, tf.data.Dataset):
            return super().experimental_distribute_dataset(dataset, options)
        return CoordinatorDataset(dataset)

    def on_workers(self, dataset: CoordinatorDataset) -> Any:
        """The same dataset, read by the workers, each its part of the batches, if that is asked for."""
        return shards_of_dataset(dataset.source, self._num_workers) if self.worker_input else dataset

    def distribute_datasets_from_function(self, dataset_fn: Callable, options: Any = None) -> Any:
        if not tf.executing_eagerly():
            return super().distribute_datasets_from_function(dataset_fn, options)
        if self.mode == "sync":
            raise ValueError(
                "Received: a dataset function and mode='sync'. In synchronous training the coordinator cuts each batch "
                "into the workers' shards. Expected: arrays or a tf.data.Dataset; or mode='async'."
            )
        return shards_of_function(dataset_fn, self._num_workers)

    def check_model(self, model: keras.Model) -> None:
        """Refuses what cannot be trained with parameter servers, before Keras builds or runs it.

        Args:
            model: a model, compiled in this strategy's scope.

        Raises:
            ValueError: with the reason and the remedy.
        """
        checks.check(self, model)

    def prepare(self, model: keras.Model) -> None:
        """Makes a model's steps run on the workers; called before Keras trains or evaluates it.

        Args:
            model: a compiled and built model, created in this strategy's scope.

        Raises:
            Exception: what a step of an interrupted fit has raised since.
        """
        # What an interrupted fit has handed out must not change what callbacks restore at the begin of this one.
        self.dispatcher.join()
        installation.install(self, model)

    def prepare_predict(self, model: keras.Model) -> None:
        """Makes a model's predictions run on the workers; called before Keras predicts.

        Args:
            model: a model, created in this strategy's scope.
        """
        installation.install_predict(self, model)

    def settle(self, model: keras.Model) -> None:
        """Waits until all steps that were handed out are done: what is saved then belongs together.

        Args:
            model: a model, created in this strategy's scope.

        Raises:
            Exception: what a step has raised.
        """
        if "dispatcher" in vars(self):
            self.dispatcher.join()  # also of another model, of which this one is a part
            installation.finish(model)

    @contextlib.contextmanager
    def keras_step(self, step: KerasStep) -> Iterator[None]:
        """While a step is traced for the shards of batches: Keras' losses and metrics ask for a shard's weight."""
        self._keras_step = step
        try:
            yield
        finally:
            self._keras_step = None

    @property
    def is_in_shard(self) -> bool:
        """Whether a step is being traced that sees a shard of a batch only."""
        return self._keras_step is not None

    def run_replica(self, function: Callable, *arguments: Any) -> Any:
        """Traces a function in a replica's context, for a worker."""
        return super().run(tf.autograph.experimental.do_not_convert(function), arguments)
