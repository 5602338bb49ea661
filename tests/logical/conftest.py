"""These tests run in pytest's own process, on two logical CPU devices."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def mirrored():
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    import tfdist

    strategy = tfdist.MirroredStrategy()
    assert strategy.num_replicas_in_sync == 2
    return strategy
