"""Networks of `keras.applications`, cut into two or four stages: one step equals that of one process.

In float64: at random weights and with two rows a micro-batch, BatchNormalization makes gradients so steep that two
orders of the same additions differ visibly in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import applications

from tests.logical.pipelines import after_one_step, micro_batched, pipeline

# Their kinds of layers are in models of tests/logical/test_pipeline_models.py.
pytestmark = [pytest.mark.usefixtures("four_devices"), pytest.mark.slow, pytest.mark.exhaustive]

NETWORKS = {
    "MobileNet": (applications.MobileNet, 32, {"alpha": 0.25}),
    "MobileNetV2": (applications.MobileNetV2, 32, {"alpha": 0.35}),
    "MobileNetV3Small": (applications.MobileNetV3Small, 32, {"alpha": 0.75}),
    "EfficientNetB0": (applications.EfficientNetB0, 32, {}),
    "InceptionV3": (applications.InceptionV3, 75, {}),
    "ResNet50": (applications.ResNet50, 64, {}),
    "ResNet50V2": (applications.ResNet50V2, 64, {}),
    "VGG16": (applications.VGG16, 32, {}),
    "VGG19": (applications.VGG19, 32, {}),
    "Xception": (applications.Xception, 71, {}),
}
# Each number for networks of several kinds; one of them has both.
STAGES = {"VGG16": (2, 4)} | {name: (2 + 2 * (index % 2),) for index, name in enumerate(NETWORKS) if name != "VGG16"}
TOLERANCE = 1e-6


@pytest.fixture(autouse=True)
def float64():
    # Both: a policy that any model before has asked for counts more than the float type.
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


def builder(name: str) -> Callable[[], keras.Model]:
    make, size, arguments = NETWORKS[name]

    def build() -> keras.Model:
        model = make(weights=None, input_shape=(size, size, 3), classes=2, **arguments)
        model.compile(keras.optimizers.SGD(0.01), "categorical_crossentropy")
        return model

    return build


def largest_gap(expected: dict[str, np.ndarray], received: dict[str, np.ndarray]) -> float:
    """Relative to the largest number of each array, or to a thousandth where all are smaller."""
    assert expected.keys() == received.keys()
    gaps = [np.abs(value - received[name]).max() / max(np.abs(value).max(), 1e-3) for name, value in expected.items()]
    return float(max(gaps))


@pytest.mark.parametrize("name", NETWORKS)
def test_one_step(name):
    build, size = builder(name), NETWORKS[name][1]
    random = np.random.RandomState(0)
    data = random.uniform(-1, 1, (4, size, size, 3)), np.eye(2)[[0, 1, 1, 0]]
    process = tf.distribute.get_strategy()
    expected = after_one_step(process, micro_batched(build, 2), data)[1]
    for stages in STAGES[name]:
        model, received = after_one_step(pipeline(stages, 2), build, data)
        assert largest_gap(expected, received) < TOLERANCE
        assert len({v.value.device for v in model.trainable_variables}) == stages
    if name == "MobileNet":
        whole = after_one_step(process, micro_batched(build, 1), data)[1]
        assert largest_gap(expected, whole) > 1000 * TOLERANCE
