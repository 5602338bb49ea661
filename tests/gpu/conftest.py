"""Tests on one GPU that is cut into two logical ones: `make test-gpu`.

`make test-gpu ARGS=--stand-in` runs them on logical CPU devices: that tries the tests, not GPUs.
"""

from __future__ import annotations

import pytest
import tensorflow as tf

# Of each logical GPU, in MB: the models are small.
_MEMORY = 4096


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stand-in", action="store_true", help="logical CPU devices in place of GPUs")


@pytest.fixture(scope="session")
def gpus(request: pytest.FixtureRequest) -> list[str]:
    """The names of two logical devices, with float32 products of full precision."""
    is_stand_in = request.config.option.stand_in
    physical = tf.config.list_physical_devices("CPU" if is_stand_in else "GPU")
    if not physical:
        pytest.skip("TensorFlow sees no GPU on this machine")
    # The third one stands in for the host.
    sizes = [None] * 3 if is_stand_in else [_MEMORY] * 2
    devices = [tf.config.LogicalDeviceConfiguration(memory_limit=size) for size in sizes]
    tf.config.set_logical_device_configuration(physical[0], devices)
    # TF32 keeps ten bits of a product: another sum order would then differ by more than the tests allow.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    return ["CPU:0", "CPU:1"] if is_stand_in else ["GPU:0", "GPU:1"]


@pytest.fixture
def host(gpus: list[str]) -> str:
    """The device that takes what leaves a GPU."""
    return "CPU:2" if gpus[0] == "CPU:0" else "CPU:0"
