"""These tests run in pytest's own process, on the four logical CPU devices that tests/conftest.py makes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

# Of the replicas of mirrored strategies, unless a test wants others.
DEVICES = ["CPU:0", "CPU:1"]


@pytest.fixture(scope="session")
def mirrored():
    import tfdist

    strategy = tfdist.MirroredStrategy(DEVICES)
    assert strategy.num_replicas_in_sync == 2
    return strategy


@pytest.fixture(scope="session")
def four_devices() -> list[str]:
    """For the stages of a pipeline: CPU:0 to CPU:3."""
    import tensorflow as tf

    names = [device.name for device in tf.config.list_logical_devices("CPU")]
    assert len(names) == 4
    return names


@pytest.fixture
def in_float64() -> Iterator[None]:
    import keras

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
