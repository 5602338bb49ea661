"""Which devices the stages of a pipeline are on."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.discovery import discover
from tfdist.strategies.servers import connect, serve


def stage_devices(devices: Sequence[str] | None, cluster: ClusterConfig | None, start_timeout: float) -> list[str]:
    """The device of each stage. In a cluster's workers other than the chief this serves, and does not return.

    Args:
        devices: what the user wants; by default one device of each worker of a cluster of several, else all GPUs of
            this process, else all its logical CPU devices.
        cluster: the cluster; by default what `tfdist.discover()` finds.
        start_timeout: how long to wait for the cluster's processes, in seconds.

    Raises:
        ValueError: for a device that does not exist.
        tfdist.ClusterError: if a process of the cluster does not come.
    """
    config = cluster or discover()
    found = None
    if config.num_workers > 1 and config.task_type in ("chief", "worker"):
        if config.rank > 0:
            serve(config, start_timeout)
        found = connect(config, start_timeout)
    if devices is None:
        local = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
        return found or [device.name for device in local]
    return [_checked(device) for device in devices]


def _checked(device: str) -> str:
    known = [d.name for d in tf.config.list_logical_devices() if d.device_type in ("CPU", "GPU", "TPU")]
    try:
        wanted = tf.DeviceSpec.from_string(device)
    except ValueError:
        wanted = None
    here = tf.DeviceSpec.from_string(known[0])
    for name in known:
        spec = tf.DeviceSpec.from_string(name)
        if wanted is not None and spec == here.replace(device_type=None, device_index=None).make_merged_spec(wanted):
            return name
    raise ValueError(
        f"Received: device {device!r}. Expected: one of {', '.join(known)}. For more CPU devices in one process call "
        "tf.config.set_logical_device_configuration before anything else; for workers' devices start the program with "
        "`tfdist run --stages N`."
    )
