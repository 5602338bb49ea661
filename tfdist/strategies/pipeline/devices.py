"""Which devices the stages of a pipeline are on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.discovery import discover
from tfdist.cluster.errors import ClusterError
from tfdist.strategies.known_devices import existing_device
from tfdist.strategies.servers import connect, serve


def pipeline_devices(
    devices: Sequence[Any] | None,
    replicas: int | None,
    cluster: ClusterConfig | None,
    start_timeout: float,
) -> list[list[str]]:
    """For each pipeline the device of each stage. In a cluster's workers other than the chief this does not return.

    Args:
        devices: what the user wants, as strings or `tf.config.LogicalDevice`s; by default one device of each worker of
            a cluster of several, else all GPUs of this process, else all its logical CPU devices. A list of lists has
            one pipeline in each.
        replicas: the number of pipelines that a flat list, or what is found, is dealt out to.
        cluster: the cluster; by default what `tfdist.discover()` finds.
        start_timeout: how long to wait for the cluster's processes, in seconds.

    Raises:
        ValueError: for a device that does not exist, or devices that do not make equally long pipelines.
        tfdist.ClusterError: if a process of the cluster does not come.
    """
    config = cluster or discover(timeout=start_timeout)
    if config.num_workers > 1 and config.task_type not in ("chief", "worker"):
        raise ClusterError(
            f"Received: task {config.task_type} {config.task_index}. Expected: chief or worker, which a pipeline has "
            "its stages on. Start the job without other tasks: `tfdist run --stages N`."
        )
    if isinstance(devices, (int, *_DEVICE)):
        raise ValueError(
            f"Received: devices={devices!r}. Expected: a list with a device for each stage, such as ['GPU:0', 'GPU:1']."
        )
    replicas = int(os.environ.get("TFDIST_REPLICAS") or 1) if replicas is None else replicas
    found = None
    if config.num_workers > 1:
        if config.rank > 0:
            serve(config, start_timeout)
        stages = max(1, config.num_workers // max(1, replicas))
        found = connect(config, start_timeout, lambda rank: f"stage {rank % stages}")
    if devices is not None and not all(isinstance(device, _DEVICE) for device in devices):
        rows = [[_checked(device) for device in row] for row in devices]
        if not rows or not rows[0] or len({len(row) for row in rows}) > 1 or replicas not in (1, len(rows)):
            raise ValueError(
                f"Received: devices={devices!r} with replicas={replicas}. Expected: equally many devices, one a stage, "
                "in each of the inner lists, one a pipeline."
            )
        return rows
    if devices is not None:
        flat = [_checked(device) for device in devices]
    elif found:
        flat = found
    else:
        local = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
        flat = [device.name for device in local]
    if replicas < 1 or len(flat) % replicas or not flat:
        raise ValueError(
            f"Received: {len(flat)} devices for replicas={replicas}. Expected: a multiple of the number of "
            "replicas, each of which is a pipeline with one stage a device."
        )
    stages = len(flat) // replicas
    return [flat[i : i + stages] for i in range(0, len(flat), stages)]


_DEVICE = (str, tf.config.LogicalDevice)


def _checked(device: Any) -> str:
    return existing_device(
        device,
        "For more CPU devices in one process call tf.config.set_logical_device_configuration before anything else; for "
        "workers' devices start the program with `tfdist run --stages N`.",
    )
