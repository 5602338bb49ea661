"""`keras.distribution` on TensorFlow: after `enable()`, Keras' own API for distributed training runs on strategies.

Tried with the versions of Keras in `tfdist.compat.patch.TESTED`; others are warned of.

    initialize                   meets the other processes, as MultiWorkerMirroredStrategy does
    list_devices, DeviceMesh     the devices of all processes, numbered from those of the first one on
    DataParallel                 MirroredStrategy on the devices of the mesh; MultiWorkerMirroredStrategy over processes
    ModelParallel, LayoutMap     FullyShardedStrategy, which splits the weights that the map shards, over all devices
    set_distribution, scope      the strategy's scope, see `tf.distribute.experimental_set_strategy`
    layouts of activations       refused: every device computes whole layers, of its rows

The classes stay Keras'. They ask Keras' backend for devices and processes, and Keras' global state for the
distribution: `PATCHES` answers both. Keras is about to move its backends into packages of their own (keras issue
23523); then `_BACKEND` is what has to be changed.
"""

from __future__ import annotations

import functools
import os
import warnings
from types import SimpleNamespace
from typing import Any

import keras
import tensorflow as tf

from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.discovery import discover, find
from tfdist.compat.patch import Patch
from tfdist.compat.scopes import outside_of_scope
from tfdist.compat.upstream import context, current_path
from tfdist.runtime.job import joined
from tfdist.strategies import FullyShardedStrategy, MirroredStrategy, MultiWorkerMirroredStrategy
from tfdist.strategies.hooks import install
from tfdist.strategies.validation import own_devices

_BACKEND = "keras.src.backend.tensorflow.distribution_lib"
_UPSTREAM = "keras issue 18983: TensorFlow has no keras.distribution"


def enable() -> None:
    """Lets `keras.distribution` distribute what Keras trains on TensorFlow; called before anything else of it.

    Then scripts for JAX run: `initialize()` on every process, `set_distribution` or `with distribution.scope()` before
    the model is made, and plain `fit`. Give every process the same data; `batch_size` is the global batch size.
    `initialize()` without arguments finds the cluster as `tfdist.discover()` does.

    Raises:
        RuntimeError: if Keras does not compute with TensorFlow, or is another version, without what is replaced.

    Example:
        >>> import keras, numpy as np, tfdist
        >>> tfdist.keras_distribution.enable()
        >>> mesh = keras.distribution.DeviceMesh((1, len(keras.distribution.list_devices())), ("batch", "model"))
        >>> layout_map = keras.distribution.LayoutMap(mesh)
        >>> layout_map[".*kernel"] = (None, "model")
        >>> with keras.distribution.ModelParallel(layout_map=layout_map).scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
    """
    install()
    before = keras.distribution.distribution()
    for patch in PATCHES:
        patch.install()
    if before is not None:
        _set_distribution(before)


def _list_devices(device_type: str | None = None) -> list[str]:
    own = [tf.DeviceSpec.from_string(name) for name in own_devices(device_type)]
    return [f"{own[0].device_type.lower()}:{i}" for i in range(len(own) * _num_processes())]


def _get_device_count(device_type: str | None = None) -> int:
    return len(_list_devices(device_type))


def _num_processes() -> int:
    job = joined()
    return 1 if job is None else len(job.peers.names)


def _process_id() -> int:
    job = joined()
    return 0 if job is None else job.peers.rank


def _initialize(job_addresses: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Meets the other processes, and starts what they exchange values by."""
    cluster = None if job_addresses is None else _described(job_addresses, num_processes, process_id)
    if not _is_alone(cluster or find()):
        MultiWorkerMirroredStrategy(cluster=cluster)
    found = _num_processes(), _process_id()
    if num_processes not in (None, found[0]) or process_id not in (None, found[1]):
        raise ValueError(
            f"Received: keras.distribution.initialize with num_processes={num_processes} and process_id={process_id}. "
            f"Expected: {found[0]} and {found[1]}, as {'the addresses say' if cluster else 'tfdist.discover() finds'}."
        )


def _described(addresses: str, num_processes: int | None, process_id: int | None) -> ClusterConfig:
    places = [place.strip() for place in addresses.split(",")]
    if process_id is None or (len(places) == 1 and num_processes is None):
        raise ValueError(
            f"Received: keras.distribution.initialize({addresses!r}, {num_processes}, {process_id}). Expected: the "
            "address host:port of every process, or of process 0 and num_processes; and process_id."
        )
    if len(places) == 1 and num_processes > 1:
        meeting = {"TFDIST_RANK": f"{process_id}", "TFDIST_SIZE": f"{num_processes}", "TFDIST_MEETING": addresses}
        return discover({**os.environ, **meeting})
    return ClusterConfig({"worker": places}, "worker", process_id, source="keras.distribution.initialize")


def _is_alone(found: Any) -> bool:
    return isinstance(found, ClusterConfig) and found.num_workers == 1


def _distribution() -> Any:
    """That of the strategy in whose scope the program is, also where a replica traces a step."""
    found = getattr(tf.distribute.get_strategy(), "_keras_distribution", None)
    if found is not None:
        _check_data(found)
    return found


def _set_distribution(value: Any) -> None:
    tf.distribute.experimental_set_strategy(None if value is None else _strategy_of(value))


def _strategy_of(distribution: Any) -> tf.distribute.Strategy:
    """The strategy that does what a distribution says, made once."""
    if not isinstance(distribution, (keras.distribution.DataParallel, keras.distribution.ModelParallel)):
        raise NotImplementedError(
            f"Received: a distribution of class {type(distribution).__name__}. Expected: "
            "keras.distribution.DataParallel or ModelParallel."
        )
    _check_data(distribution)
    if not hasattr(distribution, "_tfdist_strategy"):
        seed = context.global_seed()
        with outside_of_scope():  # that of the distribution before
            strategy = distribution._tfdist_strategy = _make_strategy(distribution)
        if seed is not None and context.global_seed() != seed:
            # A strategy begins with the seed of the job, which is met before a program sets its own.
            tf.random.set_seed(seed)
        strategy._keras_distribution = distribution
        # Strategies deal out the rows; Keras must not.
        distribution._is_multi_process = False
    return distribution._tfdist_strategy


def _check_data(distribution: Any) -> None:
    if _num_processes() > 1 and not distribution.auto_shard_dataset:
        raise NotImplementedError(
            "Received: auto_shard_dataset=False. Expected: True, and on every process the same data, of which each "
            "takes its rows; or for a tf.data.Dataset of a process' own rows also "
            "options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF."
        )


def _make_strategy(distribution: Any) -> tf.distribute.Strategy:
    devices = [str(device) for device in distribution.device_mesh.devices.flat]
    job, is_split = joined(), isinstance(distribution, keras.distribution.ModelParallel)
    if job is None and not _is_alone(found := find()):
        raise RuntimeError(
            f"Received: a distribution in one process of several ({found}). Expected: "
            "keras.distribution.initialize() before, on each of them."
        )
    if job is None and not is_split:
        return MirroredStrategy(devices)
    if sorted(devices) != sorted(_list_devices()):
        raise ValueError(
            f"Received: a mesh of {', '.join(devices)}. Expected: all devices, each once: {', '.join(_list_devices())}."
        )
    if not is_split:
        return MultiWorkerMirroredStrategy(cluster=job.cluster)
    strategy = FullyShardedStrategy(cluster=ClusterConfig.single_process() if job is None else job.cluster)
    strategy.shards = functools.partial(_shards, distribution)
    return strategy


def _shards(distribution: Any, variable: Any) -> bool:
    """Whether a variable, of a Keras layer, has a layout with an axis of several devices."""
    if variable is None:
        return False
    layout = getattr(variable, "_layout", None) or distribution.get_tensor_layout(variable.path)
    if layout is None:
        return False
    mesh = layout.device_mesh or distribution.device_mesh
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    is_sharded = any(axis is not None and sizes[axis] > 1 for axis in layout.axes)
    if is_sharded and not variable.trainable:
        warnings.warn(
            f"Received: layout {layout.axes} for '{variable.path}', which was created with trainable=False: each "
            "device keeps all of it. Expected: a layout map that shards weights created with trainable=True alone.",
            stacklevel=2,
        )
    return is_sharded


def _refuse_layout(tensor: Any, layout: Any) -> Any:
    """In place of what gives tensors a layout."""
    where = f" in '{current_path()}'" if current_path() else ""
    raise NotImplementedError(
        f"Received: a layout for a tensor{where}. Expected: layouts of weights alone, in a LayoutMap whose keys match "
        "no '.../output'. On TensorFlow every device computes whole layers, of its rows of the batch."
    )


def _global_state(original: Any) -> SimpleNamespace:
    """Keras' global state, as keras.distribution sees it: the distribution is that of TensorFlow's scope."""
    return SimpleNamespace(
        get_global_attribute=lambda name: _distribution(),
        set_global_attribute=lambda name, value: _set_distribution(value),
    )


def _always(function: Any) -> Any:
    return lambda original: function


PATCHES = [
    *(
        Patch(f"{_BACKEND}:{name}", _always(function), "keras", _UPSTREAM, is_new=True)
        for name, function in {
            "list_devices": _list_devices,
            "get_device_count": _get_device_count,
            "num_processes": _num_processes,
            "process_id": _process_id,
            "initialize": _initialize,
            "distribute_tensor": _refuse_layout,
        }.items()
    ),
    Patch("keras.src.distribution.distribution_lib:global_state", _global_state, "keras", _UPSTREAM),
]
