"""`tfdist.MultiWorkerMirroredStrategy`: several processes, each with one or more devices."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import tfdist
from tfdist.arguments import check_seconds
from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.discovery import discover
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.variables import AUTO, DIRECT, HOROVOD, TENSORFLOW, chosen_transport
from tfdist.compat.upstream import collective_strategy
from tfdist.compression import PowerSGD, TopK
from tfdist.memory.policy import MemoryPolicy
from tfdist.runtime.exchange import Exchange, ExchangeError
from tfdist.runtime.job import Job, join
from tfdist.runtime.peers import Peers
from tfdist.steps.keras_step import local_replica
from tfdist.steps.reduce import DirectReduction, broadcast, exchanged_rows, scattered_together
from tfdist.strategies.data_parallel.strategy import DataParallel, DataParallelExtended, DataParallelHooks
from tfdist.strategies.hooks import install
from tfdist.strategies.parts import KeepsParts, PartsExtended, PartsHooks
from tfdist.strategies.validation import check_cluster

# Collectives of different strategies need different keys; other kinds of strategies, of which the processes may have
# different numbers, have keys in another range.
_GROUP_KEYS = itertools.count(1_000_000, 1_000)
# Small enough for a network to begin early, large enough for latencies of a tenth of a second in all. It is never
# measured: the order of additions depends on it, and a job that goes on has to have the same.
_BETWEEN_HOSTS = 4 << 20
_SHARED = (
    "Processes share a GPU, or have slices of one: they exchange gradients through the host's memory, as NCCL does not "
    "connect them. Without slices, one process for each GPU is faster; `tfdist run` starts as many if -n is left out."
)
# What TensorFlow says of the values that the chief sends.
_OTHER_SHAPE = re.compile(r"expected shape (\[[^]]*\]) but another member in the group expected shape (\[[^]]*\])")
_log = logging.getLogger("tfdist")


class MultiWorkerExtended(PartsExtended, DataParallelExtended, collective_strategy.CollectiveAllReduceExtended):
    """The part of `MultiWorkerMirroredStrategy` that `tf.distribute` calls."""

    # Read by upstream's initializer; true for the second strategy of a process and all further ones.
    _std_server_started = False

    def _initialize_local_devices(self, cluster_resolver: Any, worker_device: str) -> tuple[tuple[str, ...], str]:
        devices, kind = super()._initialize_local_devices(cluster_resolver, worker_device)
        if kind in ("CPU", "GPU"):
            # Upstream assumes one CPU device, and as many GPUs as the resolver counts: neither knows logical devices.
            own = tf.DeviceSpec.from_string(worker_device)
            specs = [tf.DeviceSpec.from_string(d.name) for d in tf.config.list_logical_devices(kind)]
            count = sum(not worker_device or (s.job, s.task) == (own.job, own.task) for s in specs)
            devices = tuple(f"{worker_device}/device:{kind}:{i}" for i in range(count))
        return devices, kind

    def _get_variable_creator_initial_value(self, replica_id: int, device: str, primary_var: Any, **kwargs: Any) -> Any:
        make = functools.partial(super()._get_variable_creator_initial_value, replica_id, device, primary_var)
        if replica_id:
            return make(**kwargs)
        create, strategy = broadcast(make, device, **kwargs), self._container_strategy()
        name = getattr(strategy._created, "path", kwargs.get("name"))
        return functools.partial(_created_by_all, strategy._peers, create, name) if strategy._peers else create

    def _input_position(self) -> tuple[int, int]:
        return self._num_workers, self._id_in_cluster

    def _get_cross_device_ops(self, value: Any) -> Any:
        # Upstream takes the tensor of one of several replicas for one of the host.
        if tf.distribute.in_cross_replica_context():
            return super()._get_cross_device_ops(value)
        return self._cross_device_ops

    def _by_direct(self, name: str) -> Any:
        """What `DirectReduction` has by this name; of several replicas in a process, one would wait for the other."""
        is_direct = isinstance(self._cross_device_ops, DirectReduction) and len(self.worker_devices) == 1
        return getattr(self._cross_device_ops, name) if is_direct else None

    def _gather_of_rows(self) -> Callable[[Sequence[tf.Tensor]], list[tf.Tensor]] | None:
        return self._by_direct("gather_rows")

    def _sum_of_each(self) -> Callable[[Sequence[tf.Tensor]], list[tf.Tensor]] | None:
        return self._by_direct("sum_of_each")

    @property
    def _seconds_waited(self) -> Callable[[], float] | None:
        operations = self._cross_device_ops
        return operations.seconds_waited if isinstance(operations, DirectReduction) else None

    def _scatter_of_rows(self) -> Callable[[Sequence[tf.Tensor]], list[tf.Tensor]] | None:
        """A function that gives each replica its rows of the sums of their matrices; `None` for an all-reduce."""
        if isinstance(self._cross_device_ops, DirectReduction):
            return self._by_direct("scatter_rows")
        if self._num_workers == 1 or tf.executing_eagerly() or "CPU" not in self.worker_devices[0]:
            return None
        rows_of_one = functools.partial(exchanged_rows, self._cross_device_ops._launchers[local_replica()])
        return functools.partial(scattered_together, rows_of_one)

    def _carry_directly(self, exchange: Exchange) -> None:
        """Lets tfdist carry the sums over the processes, in place of TensorFlow's servers."""
        self._cross_device_ops = DirectReduction(exchange, self._cross_device_ops)
        self._host_cross_device_ops = DirectReduction(exchange, self._host_cross_device_ops)


class MultiWorkerMirroredStrategy(KeepsParts, DataParallel, tf.distribute.MultiWorkerMirroredStrategy):
    """Data parallelism over the processes of a cluster, equal to one process on the same global batches.

    Every process runs the same script. Build and compile a Keras model in `strategy.scope()` and call `fit`,
    `evaluate` and `predict` as in one process: `batch_size` is the global batch size, every process passes the same
    data and keeps its own rows, and only the chief writes files. Without a cluster it trains on the local devices.
    Under `tfdist run --transport horovod` it is a `tfdist.HorovodStrategy`.

    Args:
        cluster_resolver: as in `tf.distribute.MultiWorkerMirroredStrategy`; `cluster` is the shorter way.
        communication_options: as in `tf.distribute.MultiWorkerMirroredStrategy`; by default NCCL for GPUs.
        cluster: the cluster and this process' place in it; by default what `tfdist.discover()` finds.
        compression: `None`, or `"bf16"` to cast gradients to bfloat16 for the all-reduce: half the bytes, and a
            relative error of up to 2**-8 in each partial sum. `"fp16"`: float16, 2**-11, and infinity above 65504.
            For slow networks, a method of `tfdist.compression`: `PowerSGD(rank=4)` or `TopK(0.01)`.
        bucket_bytes: how many bytes of gradients are sent together, at most; those of the last layers are on their way
            while the others are still computed. `None` sends all at once. `"auto"`: 25 MB, or 4 MB between
            hosts by `transport="direct"`.
        batch_norm: `"global"` (BatchNormalization uses the statistics of the global batch, as one process does; two
            small collectives a layer and step) or `"local"` (of each replica's rows; the moving statistics are
            averaged at every step).
        batch_shares: how many rows of each batch each process gets, by rank and in proportion: `[2, 1]` gives rank 0
            two thirds. `"auto"`: as many as it computes in the time of the others, which is measured in each epoch;
            it needs `transport="direct"`. The result stays that of one process. By default all get equally many;
            without a cluster, it is a number for each device.
        memory: what models keep for their backward pass, see `tfdist.memory.MemoryPolicy`; by default everything.
        transport: what carries the sums over the processes. `"tensorflow"`: TensorFlow's collectives. `"direct"`, for
            CPUs and GPUs that processes share: shared memory on a host and sockets between hosts, several times faster
            on CPUs; each process listens at another port, which the system chooses. `"auto"`: direct where it can be,
            if all can connect, and there are no `communication_options`. By default what `tfdist run --transport` says,
            or TFDIST_TRANSPORT; else `"auto"`.
        start_timeout: how long to wait at the start until all processes are there, in seconds.
        peer_timeout: how long to wait for another process that has not yet come to the same call, in seconds.

    Raises:
        tfdist.ClusterError: if the cluster description is wrong, the processes' descriptions differ, or a process does
            not come; the message names it.
        ValueError: for an unknown `compression`, `batch_norm` or `transport`, `"direct"` with GPUs that no other
            process has, `batch_shares` that are not a positive number for each process, `"auto"` where nobody can
            measure, or arguments that are not the same on all processes.

    Example (started by `tfdist run -n 2 train.py`):
        >>> import keras, numpy as np, tfdist
        >>> strategy = tfdist.MultiWorkerMirroredStrategy()
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
    """

    _extended_class: type[MultiWorkerExtended] = MultiWorkerExtended
    _hooks_class: type[DataParallelHooks] = PartsHooks
    # Whether the host adds up what GPUs send, too: a strategy that rarely exchanges sets it.
    _goes_through_host = False

    def __new__(cls, *args: Any, **kwargs: Any) -> MultiWorkerMirroredStrategy:
        chooses_none = cls is MultiWorkerMirroredStrategy and kwargs.get("transport") is None
        if chooses_none and chosen_transport(os.environ) == HOROVOD:
            # A subclass: Python goes on with its initializer. Imported only where it is asked for.
            cls = tfdist.HorovodStrategy
        return super().__new__(cls)

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        communication_options: tf.distribute.experimental.CommunicationOptions | None = None,
        *,
        cluster: ClusterConfig | None = None,
        compression: str | PowerSGD | TopK | None = None,
        bucket_bytes: int | str | None = "auto",
        batch_norm: str = "global",
        batch_shares: Sequence[float] | str | None = None,
        memory: MemoryPolicy | str | None = None,
        transport: str | None = None,
        start_timeout: float = 300.0,
        peer_timeout: float = 1800.0,
    ):
        install()
        check_seconds(start_timeout=start_timeout, peer_timeout=peer_timeout)
        transport = _own_transport(transport, communication_options)
        self._configure_data_parallel(compression, bucket_bytes, batch_norm, batch_shares, memory)
        try:
            config = cluster_of(cluster, cluster_resolver, start_timeout)
            self._job = join(config, start_timeout, peer_timeout) if config.num_workers > 1 else None
        except ClusterError as error:
            # Its text is for who has started the job; where in tfdist it was found out only hides it.
            raise error.with_traceback(None) from None
        self._collective_key_base = next(_GROUP_KEYS)
        shares_gpus = self._job.shares_gpus if self._job else _cuts_a_gpu()
        if self._job and shares_gpus and config.is_chief and communication_options is None:
            _log.warning(_SHARED)
        # The upstream initializer names its extended class; this does the rest of what it does.
        extended = self._extended_class(
            self,
            cluster_resolver=cluster_resolver or resolver_of(config),
            communication_options=communication_options or _options_for_devices(shares_gpus),
        )
        tf.distribute.Strategy.__init__(self, extended)
        if self._job:
            MultiWorkerExtended._std_server_started = True
        devices = () if self._goes_through_host else extended.worker_devices
        if self._job and (exchange := _exchange_of(self._job, devices, transport, start_timeout)):
            extended._carry_directly(exchange)
            if bucket_bytes == "auto" and exchange.number_of_hosts > 1 and self._gradient_options.compressor is None:
                # What a method compresses is never much: its buckets need not be smaller.
                self._gradient_options = dataclasses.replace(self._gradient_options, bucket_bytes=_BETWEEN_HOSTS)
        self._begin()
        self._keras_hooks = self._hooks_class(self)


def _created_by_all(peers: Peers, create: Callable[[], tf.Tensor], name: str) -> tf.Tensor:
    """The initial value of a variable.

    Raises:
        ValueError: if processes create variables of other shapes, of which TensorFlow tells one of them only.
    """
    try:
        return create()
    except tf.errors.OpError as error:
        if (found := _OTHER_SHAPE.search(error.message)) is None:
            text = peers.glance("other variables")
        else:
            text = (
                f"The processes create different variables. Received: '{name}' of shape {found[1]} on "
                f"{peers.names[peers.rank]}, where another process creates one of shape {found[2]}. Expected: the same "
                "model and optimizer on every process. Look for what depends on the rank, on the host, or on a random "
                "number."
            )
            with contextlib.suppress(ConnectionError):
                peers.tell("other variables", text)
        if text is None:
            raise
        raise ValueError(text) from error


def _cuts_a_gpu() -> bool:
    """Whether this process has several logical devices of a GPU."""
    parts = map(tf.config.get_logical_device_configuration, tf.config.get_visible_devices("GPU"))
    return any(len(part or []) > 1 for part in parts)


def _options_for_devices(shares_gpus: bool) -> tf.distribute.experimental.CommunicationOptions:
    """NCCL for GPUs: asked for nothing, TensorFlow takes gRPC (tensorflow issue 50178). NCCL refuses to share a GPU."""
    kinds = tf.distribute.experimental.CommunicationImplementation
    uses_nccl = bool(tf.config.get_visible_devices("GPU")) and not shares_gpus
    return tf.distribute.experimental.CommunicationOptions(implementation=kinds.NCCL if uses_nccl else kinds.AUTO)


def _own_transport(transport: str | None, communication_options: Any) -> str:
    expected = (AUTO, TENSORFLOW, DIRECT)
    if transport is not None and transport not in expected:
        raise ValueError(
            f"Received: transport={transport!r}. Expected one of {', '.join(map(repr, expected))}, or None for that of "
            "`tfdist run --transport`; for Horovod, use tfdist.HorovodStrategy."
        )
    chosen = transport or chosen_transport(os.environ)
    # Options are TensorFlow's: who gives some wants it.
    return TENSORFLOW if chosen == AUTO and communication_options is not None else chosen


def _exchange_of(job: Job, devices: Sequence[str], transport: str, start_timeout: float) -> Exchange | None:
    """What carries sums directly; `None` if TensorFlow is to do it. The same on all processes, whose devices are."""
    are_cpus = all(tf.DeviceSpec.from_string(device).device_type == "CPU" for device in devices)
    # Where NCCL refuses, sums go through the host's memory in any case.
    is_possible = are_cpus or job.shares_gpus
    if transport == DIRECT and not is_possible:
        raise ValueError(
            f"Received: transport={DIRECT!r} with {', '.join(devices)}. Expected: CPUs, or GPUs that processes "
            f"share; others exchange by NCCL, with transport={TENSORFLOW!r}."
        )
    if transport == TENSORFLOW or not is_possible:
        return None
    try:
        return job.exchange(start_timeout)
    except ExchangeError as error:
        if transport == DIRECT:
            raise ClusterError(str(error)) from None
        _log.warning("%s. Going on with TensorFlow's collectives, which are slower.", error)
        return None


def cluster_of(cluster: ClusterConfig | None, resolver: Any, start_timeout: float) -> ClusterConfig:
    check_cluster(cluster, resolver)
    if resolver is None:
        return _of_training_task(cluster or discover(timeout=start_timeout))
    jobs = resolver.cluster_spec().as_dict()
    if not jobs:
        return ClusterConfig.single_process()
    return _of_training_task(ClusterConfig(jobs, resolver.task_type, resolver.task_id))


def _of_training_task(config: ClusterConfig) -> ClusterConfig:
    if config.task_type == "ps":
        raise ClusterError(
            f"Received: task ps {config.task_index}. Expected: chief or worker, which MultiWorkerMirroredStrategy "
            "trains on. It has no parameter servers: start the job without them."
        )
    # An evaluator works by itself, beside the cluster.
    return ClusterConfig.single_process() if config.task_type == "evaluator" else config


def resolver_of(config: ClusterConfig) -> tf.distribute.cluster_resolver.ClusterResolver:
    if config.is_single_process:
        return tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
    jobs = {job: addresses for job, addresses in config.jobs.items() if job in ("chief", "worker")}
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(jobs),
        task_type=config.task_type,
        task_id=config.task_index,
        num_accelerators={"GPU": len(tf.config.get_visible_devices("GPU"))},
        rpc_layer="grpc",
    )
