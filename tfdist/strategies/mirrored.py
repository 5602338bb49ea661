"""`tfdist.MirroredStrategy`: one process, several local devices."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.discovery import find
from tfdist.cluster.errors import ClusterError
from tfdist.compat.upstream import mirrored_strategy
from tfdist.compression import PowerSGD, TopK
from tfdist.memory.policy import MemoryPolicy
from tfdist.strategies.data_parallel.strategy import DataParallel, DataParallelExtended, DataParallelHooks
from tfdist.strategies.hooks import install
from tfdist.strategies.validation import existing_device, own_devices

# Collectives of different strategies need different keys; stock strategies begin at 0.
_GROUP_KEYS = itertools.count(1_000, 1_000)
_log = logging.getLogger("tfdist")
_MORE_DEVICES = (
    "For more CPU devices in one process call tf.config.set_logical_device_configuration before anything else; for "
    "more processes use tfdist.MultiWorkerMirroredStrategy and `tfdist run -n N`."
)


class _MirroredExtended(DataParallelExtended, mirrored_strategy.MirroredExtended):
    """The part of `MirroredStrategy` that `tf.distribute` calls."""


class MirroredStrategy(DataParallel, tf.distribute.MirroredStrategy):
    """Data parallelism over the devices of this machine, equal to one process on the same global batches.

    Build and compile a Keras model in `strategy.scope()`; `fit`, `evaluate`, `predict` and the `*_on_batch` methods
    then split every batch over the devices. `batch_size` is the global batch size.

    Args:
        devices: device strings such as `["GPU:0", "GPU:1"]`; by default all GPUs, or all logical CPUs without GPUs.
        cross_device_ops: as in `tf.distribute.MirroredStrategy`.
        compression: `None`, or `"bf16"` to cast gradients to bfloat16 for the all-reduce: half the bytes, and a
            relative error of up to 2**-8 in each partial sum. `"fp16"`: float16, 2**-11, and infinity above 65504.
            For slow networks, a method of `tfdist.compression`: `PowerSGD(rank=4)` or `TopK(0.01)`.
        bucket_bytes: how many bytes of gradients are sent together, at most; those of the last layers are on their way
            while the others are still computed. `"auto"`: 25 MB. `None` sends all at once.
        batch_norm: `"global"` (BatchNormalization uses the statistics of the global batch, as one process does; two
            small collectives a layer and step) or `"local"` (of each replica's rows; the moving statistics are
            averaged at every step).
        batch_shares: how many rows of each batch each device gets, in proportion: `[2, 1]` gives the first one two
            thirds. The result stays that of one process. By default all get equally many.
        memory: what models keep for their backward pass, see `tfdist.memory.MemoryPolicy`; by default everything.

    Raises:
        ValueError: for a device that does not exist, an unknown `compression` or `batch_norm`, or `batch_shares` that
            are not a positive number for each device.

    Example:
        >>> import keras, numpy as np, tfdist
        >>> strategy = tfdist.MirroredStrategy()
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: Any = None,
        *,
        compression: str | PowerSGD | TopK | None = None,
        bucket_bytes: int | str | None = "auto",
        batch_norm: str = "global",
        batch_shares: Sequence[float] | None = None,
        memory: MemoryPolicy | str | None = None,
    ):
        install()
        _warn_in_cluster()
        self._configure_data_parallel(compression, bucket_bytes, batch_norm, batch_shares, memory)
        self._collective_key_base = next(_GROUP_KEYS)
        # By itself TensorFlow takes those of all tasks of a cluster that is connected.
        devices = own_devices() if devices is None else _existing_devices(devices)
        # tf.distribute.MirroredStrategy.__init__ names its extended class; this does the rest of what it does.
        extended = _MirroredExtended(self, devices=devices, cross_device_ops=cross_device_ops)
        tf.distribute.Strategy.__init__(self, extended)
        self._begin()
        self._keras_hooks = DataParallelHooks(self)


def _existing_devices(devices: Any) -> list[str]:
    is_list = isinstance(devices, Iterable) and not isinstance(devices, str)
    found = [existing_device(device, _MORE_DEVICES) for device in devices] if is_list else []
    if not found or len(set(found)) < len(found):
        raise ValueError(
            f"Received: devices={devices!r}. Expected: a list of devices, each once, such as ['GPU:0', 'GPU:1'], or "
            "None for all."
        )
    return found


def _warn_in_cluster() -> None:
    try:
        found = find()
    except ClusterError as error:
        # It has to be mended for a strategy that needs the cluster; this one does not.
        _log.warning("MirroredStrategy trains on the devices of this process, whatever the cluster is. %s", error)
        return
    workers = found.num_workers if isinstance(found, ClusterConfig) else found.size
    if workers > 1:
        _log.warning(
            "MirroredStrategy trains on the devices of one process, and this is one of %d processes of a cluster: each "
            "trains a model of its own. Use tfdist.MultiWorkerMirroredStrategy to train one model together.",
            workers,
        )
