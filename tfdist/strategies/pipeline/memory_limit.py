"""How much memory a stage may use, for deciding whether its backward pass recomputes its forward pass."""

from __future__ import annotations

import os
from collections.abc import Sequence

import tensorflow as tf
from tensorflow.python.client import device_lib


def memory_limit(device: str, devices: Sequence[str]) -> int:
    """Bytes that a device has for the pipeline.

    A CPU device has its part of this machine's memory. Remote devices are taken to have as much as local ones of their
    kind: nothing tells how much they have.

    Args:
        device: the device.
        devices: all devices of the pipeline; those on the same CPU share its memory.
    """
    spec = tf.DeviceSpec.from_string(device)
    if spec.device_type == "CPU":
        same = [s for s in map(tf.DeviceSpec.from_string, devices) if s.device_type == "CPU" and s.task == spec.task]
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(same)
    limits = [d.memory_limit for d in device_lib.list_local_devices() if d.device_type == spec.device_type]
    return min(limits, default=2**63)
