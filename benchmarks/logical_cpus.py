"""Several devices on a machine without accelerators."""

from __future__ import annotations


def logical_cpus(count: int) -> list[str]:
    """Cuts the CPU into so many logical devices, before TensorFlow has begun, and returns their names."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    return [f"CPU:{i}" for i in range(count)]
