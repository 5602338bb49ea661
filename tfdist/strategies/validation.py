"""Checks of what several strategies are given: devices, by the names that users give, and clusters."""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.errors import ClusterError

# Where the devices of a process are that is in no cluster; TensorFlow leaves it out of their names, strategies do not.
_ALONE = "/job:localhost/replica:0/task:0"


def known_devices() -> list[str]:
    """Names of all logical devices that can compute; in a cluster that is connected, also those of its other tasks."""
    return [device.name for device in tf.config.list_logical_devices() if device.device_type in ("CPU", "GPU", "TPU")]


def own_devices() -> list[str]:
    """Names of the GPUs of this task; without any, of its CPU devices.

    Example:
        >>> own_devices()[0]
        '/device:CPU:0'
    """
    # TensorFlow lists those of this task first.
    known = [tf.DeviceSpec.from_string(name) for name in known_devices()]
    own = [spec for spec in known if (spec.job, spec.task) == (known[0].job, known[0].task)]
    gpus, cpus = ([spec.to_string() for spec in own if spec.device_type == kind] for kind in ("GPU", "CPU"))
    return gpus or cpus


def find_device(device: Any) -> str | None:
    """The name of a device as TensorFlow lists it; `None` if there is none.

    Args:
        device: a string such as `"GPU:1"`, or a `tf.config.LogicalDevice`. What it leaves out is that of this task.

    Example:
        >>> find_device("cpu:0"), find_device("CPU:99")
        ('/device:CPU:0', None)
        >>> find_device("/job:localhost/replica:0/task:0/device:CPU:0")
        '/device:CPU:0'
    """
    known = known_devices()
    first = tf.DeviceSpec.from_string(_ALONE).make_merged_spec(tf.DeviceSpec.from_string(known[0]))
    here = first.replace(device_type=None, device_index=None)
    try:
        wanted = tf.DeviceSpec.from_string(device.name if isinstance(device, tf.config.LogicalDevice) else device)
    except (AttributeError, TypeError, ValueError):
        return None
    full = [(name, here.make_merged_spec(tf.DeviceSpec.from_string(name))) for name in known]
    return next((name for name, spec in full if spec == here.make_merged_spec(wanted)), None)


def existing_device(device: Any, remedy: str) -> str:
    """The name of a device as TensorFlow lists it.

    Args:
        device: as there.
        remedy: what to do to have more devices; a sentence.

    Raises:
        ValueError: if there is no such device.
    """
    found = find_device(device)
    if found is None:
        raise ValueError(f"Received: device {device!r}. Expected: one of {', '.join(known_devices())}. {remedy}")
    return found


def check_cluster(cluster: Any, resolver: Any = None) -> None:
    """Checks the two arguments that say which cluster is meant.

    Raises:
        ValueError: for something else than a cluster, or both.
    """
    if resolver is not None and not isinstance(resolver, tf.distribute.cluster_resolver.ClusterResolver):
        raise ValueError(
            f"Received: cluster_resolver={resolver!r}. Expected: a tf.distribute.cluster_resolver.ClusterResolver, or "
            "None to find the cluster. A tfdist.ClusterConfig goes to `cluster=`; devices cannot be chosen here."
        )
    if cluster is not None and not isinstance(cluster, ClusterConfig):
        raise ValueError(
            f"Received: cluster={cluster!r}. Expected: a tfdist.ClusterConfig, such as "
            "tfdist.ClusterConfig.from_tf_config({...}), or None to find the cluster."
        )
    if cluster is not None and resolver is not None:
        raise ValueError("Received both cluster and cluster_resolver. Expected at most one; leave one out.")


def check_not_tuned(strategy: str, config: ClusterConfig) -> None:
    """Checks that a strategy that one process drives is not to train the trials of a search in several processes.

    Args:
        strategy: its name.
        config: the cluster.

    Raises:
        tfdist.ClusterError: it is; the other processes would serve, and not take part in the search.
    """
    if os.environ.get("TFDIST_TUNE") and not config.is_single_process:
        raise ClusterError(
            f"Received: {strategy} in `tfdist tune` with several processes for each trial. Expected: a strategy whose "
            "processes all run the script. Use tfdist.MultiWorkerMirroredStrategy, or leave --workers-per-trial out"
        )
