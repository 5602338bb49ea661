"""`tfdist.HorovodStrategy`: several processes, one device each, connected by Horovod."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.errors import ClusterError
from tfdist.compression import PowerSGD, TopK
from tfdist.inspection import random_state, replica_values
from tfdist.memory.policy import MemoryPolicy
from tfdist.runtime.elastic import Members, is_elastic
from tfdist.steps.common_hooks import install
from tfdist.strategies.horovod.extended import HorovodExtended
from tfdist.strategies.horovod.job import is_connected_by_launcher, join, own_device, rejoin
from tfdist.strategies.horovod.keras_hooks import HorovodHooks
from tfdist.strategies.horovod.memory_folders import memory_folder
from tfdist.strategies.horovod.validation import NARROW, check_arguments
from tfdist.strategies.multi_worker import MultiWorkerMirroredStrategy, cluster_of, resolver_of


class HorovodStrategy(MultiWorkerMirroredStrategy):
    """Data parallelism over processes that Horovod connects (Gloo, MPI or NCCL), equal to one process.

    Horovod carries the messages; all else is as with `tfdist.MultiWorkerMirroredStrategy`: plain Keras code in
    `strategy.scope()`, global batches, and only rank 0 writes files. Each process uses one device. It
    is started by `tfdist run`, `horovodrun`, `mpirun` or any other system that tfdist knows. A single process needs no
    Horovod.

    Args:
        cluster_resolver: as in `MultiWorkerMirroredStrategy`.
        communication_options: as in `MultiWorkerMirroredStrategy`; Horovod needs none.
        compression: `None`, or `"fp16"` to cast gradients to float16 for the all-reduce: half the bytes, a relative
            error of up to 2**-11 in each addend and partial sum, and infinity above 65504; or a method of
            `tfdist.compression`.
        bucket_bytes: as in `MultiWorkerMirroredStrategy`.
        process_set: ranks that train together, this one among them; every process names the group it belongs to.
            `None` for all, or for those of this process' first `HorovodStrategy`.
        cluster: as in `MultiWorkerMirroredStrategy`.
        batch_norm: as in `MultiWorkerMirroredStrategy`.
        memory: as in `MultiWorkerMirroredStrategy`.
        start_timeout: how long to wait at the start until all processes are there, in seconds; horovodrun and mpirun
            have limits of their own.
        peer_timeout: how long to wait for a process that has not yet come to the same call, in seconds.

    Raises:
        ImportError: if Horovod is not installed, or was built for another TensorFlow.
        tfdist.ClusterError: if a process does not come, the processes do not fit together, or `process_set` names a
            rank that does not exist.
        ValueError: for an unknown `compression` or `batch_norm`, a `bucket_bytes` or a limit of time
            that is no positive number, or a `process_set` that is no list of distinct ranks.

    References:
        Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow" (arXiv 1802.05799).

    Example (started by `tfdist run -n 2 train.py`, or `horovodrun -np 2 python train.py`):
        >>> import keras, numpy as np, tfdist
        >>> strategy = tfdist.HorovodStrategy()
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
    """

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        communication_options: tf.distribute.experimental.CommunicationOptions | None = None,
        *,
        compression: str | PowerSGD | TopK | None = None,
        bucket_bytes: int | str | None = "auto",
        process_set: Sequence[int] | None = None,
        cluster: ClusterConfig | None = None,
        batch_norm: str = "global",
        memory: MemoryPolicy | str | None = None,
        start_timeout: float = 300.0,
        peer_timeout: float = 1800.0,
    ):
        install()
        limits = {"start_timeout": start_timeout, "peer_timeout": peer_timeout}
        check_arguments(compression, process_set, **limits)
        if process_set is not None and is_elastic(os.environ):
            raise ValueError(
                f"Received: process_set={list(process_set)} in an elastic job. Expected: None; ranks change there."
            )
        self._configure_data_parallel(compression, bucket_bytes, batch_norm, memory, NARROW)
        try:
            # Horovod draws the port of its server from the program's own generator, and on rank 0 only.
            with random_state.kept():
                if cluster is None and cluster_resolver is None and is_connected_by_launcher(os.environ):
                    cluster = ClusterConfig.single_process()
                config = cluster_of(cluster, cluster_resolver, start_timeout)
                self._job = join(config, process_set, start_timeout, peer_timeout)
        except (ClusterError, ImportError) as error:
            # Its text is for who has started the job; where in tfdist it was found out only hides it.
            raise error.with_traceback(None) from None
        collectives = self._job.collectives if self._job else None
        device = self._job.device if self._job else own_device(0)
        elastic = self._job is not None and is_elastic(os.environ)
        # Whoever comes later makes variables when the others do not: they get their values when fit begins.
        extended = HorovodExtended(self, device, collectives, from_first=not elastic)
        extended._cluster_resolver = cluster_resolver or resolver_of(config)
        tf.distribute.Strategy.__init__(self, extended)
        self._begin_as_member()
        self._keras_hooks = HorovodHooks(self)
        with random_state.kept():
            self._members = Members(self.horovod) if elastic else None
        self._memory_folder = memory_folder(self) if elastic else None

    @property
    def horovod(self) -> Any:
        """The module `horovod.tensorflow`, initialized; `None` in a single process."""
        return self._job.horovod if self._job else None

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """Notes whether a fit fails: then this process does not wait for the others at the end of the program."""
        if self._job is not None:
            self._job.failed = True
        yield
        if self._job is not None:
            self._job.failed = False

    def _regroup(self) -> None:
        """Connects the processes of an elastic job anew; functions that were compiled before must be dropped."""
        with random_state.kept():
            rejoin(self._job)
        self.extended.connect(self._job.collectives)
        replica_values.forget_functions()
