"""`tfdist.HorovodStrategy`: several processes, one device each, connected by Horovod."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.arguments import check_seconds
from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.errors import ClusterError
from tfdist.compression import PowerSGD, TopK
from tfdist.inspection.model_state import random_state_kept
from tfdist.memory.policy import MemoryPolicy
from tfdist.strategies.data_parallel.strategy import DataParallelHooks
from tfdist.strategies.hooks import install
from tfdist.strategies.horovod.extended import HorovodExtended
from tfdist.strategies.horovod.job import is_connected_by_launcher, join, own_device
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
        cluster: as in `MultiWorkerMirroredStrategy`.
        batch_norm: as in `MultiWorkerMirroredStrategy`.
        batch_shares: as in `MultiWorkerMirroredStrategy`, but for `"auto"`: Horovod does not tell who waits.
        memory: as in `MultiWorkerMirroredStrategy`.
        start_timeout: how long to wait at the start until all processes are there, in seconds; horovodrun and mpirun
            have limits of their own.
        peer_timeout: how long to wait for a process that has not yet come to the same call, in seconds.

    Raises:
        ImportError: if Horovod is not installed, or was built for another TensorFlow.
        tfdist.ClusterError: if a process does not come, or the processes do not fit together.
        ValueError: for an unknown `compression` or `batch_norm`, a `bucket_bytes` or a limit of time that is no
            positive number, or `batch_shares` that are not a positive number for each process.

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
        cluster: ClusterConfig | None = None,
        batch_norm: str = "global",
        batch_shares: Sequence[float] | None = None,
        memory: MemoryPolicy | str | None = None,
        start_timeout: float = 300.0,
        peer_timeout: float = 1800.0,
    ):
        install()
        check_seconds(start_timeout=start_timeout, peer_timeout=peer_timeout)
        # Horovod has no sums of bfloat16.
        narrow = {None: None, "fp16": tf.float16}
        self._configure_data_parallel(compression, bucket_bytes, batch_norm, batch_shares, memory, narrow)
        try:
            # Horovod draws the port of its server from the program's own generator, and on rank 0 only.
            with random_state_kept():
                if cluster is None and cluster_resolver is None and is_connected_by_launcher(os.environ):
                    cluster = ClusterConfig.single_process()
                config = cluster_of(cluster, cluster_resolver, start_timeout)
                self._job = join(config, start_timeout, peer_timeout)
        except (ClusterError, ImportError) as error:
            # Its text is for who has started the job; where in tfdist it was found out only hides it.
            raise error.with_traceback(None) from None
        collectives = self._job.collectives if self._job else None
        device = self._job.device if self._job else own_device(0)
        extended = HorovodExtended(self, device, collectives)
        extended._cluster_resolver = cluster_resolver or resolver_of(config)
        tf.distribute.Strategy.__init__(self, extended)
        self._begin()
        self._keras_hooks = _HorovodHooks(self)

    @property
    def horovod(self) -> Any:
        """The module `horovod.tensorflow`, initialized; `None` in a single process."""
        return self._job.horovod if self._job else None


class _HorovodHooks(DataParallelHooks):
    """Models of a `HorovodStrategy`: a process whose fit fails does not wait for the others at its end."""

    def fit(self, fit: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
        job = self._strategy._job
        if job is None:
            return super().fit(fit, model, *args, **kwargs)
        job.failed = True
        history = super().fit(fit, model, *args, **kwargs)
        job.failed = False
        return history
