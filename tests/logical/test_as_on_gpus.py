"""What happens on GPUs only, on CPU devices: Keras compiles by itself, and libraries refuse to compute without rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.distribute import mirrored_run, mirrored_strategy

import tfdist
from tests.features.table import FEATURES, batches, rows
from tests.models import in_scope, ready

# For ever: a cluster of one replica needed a sum, which needed that cluster.
WAITED = "a train_step without call, layers built in it (as in Keras' VAE and DCGAN examples)"
# Where compiling, or what TensorFlow does without where it compiles for GPUs, could make a difference; and replicas.
ROWS = [
    ("gradient_accumulation_steps", 1),
    (WAITED, 1),
    ("BatchNormalization", 2),
    ("ragged input", 2),
]


@contextlib.contextmanager
def with_gpus() -> Iterator[None]:
    """Lets `jit_compile="auto"` find a GPU, and tf.distribute take CPU devices for GPUs where it compiles."""
    original = tf.config.list_physical_devices

    def devices(kind: str | None = None) -> list:
        gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
        return [*([] if kind == "GPU" else original(kind)), *([] if kind == "CPU" else [gpu])]

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(tf.config, "list_physical_devices", devices))
        for module in (mirrored_run, mirrored_strategy):
            stack.enter_context(mock.patch.object(module, "_is_gpu_device", lambda device: True))
        yield


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "replicas"), ROWS)
def test_replicas_that_keras_compiles(name: str, replicas: int) -> None:
    with with_gpus():
        assert FEATURES[name](tfdist.MirroredStrategy(["CPU:0", "CPU:1"][:replicas])), "nothing was compared"


@keras.saving.register_keras_serializable(package="tfdist_tests")
class WithRows(keras.layers.Layer):
    """Fails without rows, as cuDNN's recurrent layers do."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([tf.debugging.assert_positive(tf.shape(x)[0], "a batch without rows")]):
            return tf.identity(x)


@pytest.mark.nightly
@pytest.mark.parametrize("as_dataset", [False, True])
def test_a_layer_that_fails_without_rows(mirrored, as_dataset: bool) -> None:
    x, y = rows(33)
    model = in_scope(
        mirrored, lambda: ready(keras.Sequential([keras.Input((8,)), WithRows(), keras.layers.Dense(1)]), "sgd", "mse")
    )
    data = (batches(x, y),) if as_dataset else (x, y)
    model.fit(*data, batch_size=None if as_dataset else 16, verbose=0)
    model.evaluate(*data, batch_size=None if as_dataset else 16, verbose=0)
    found = model.predict(data[0], batch_size=None if as_dataset else 16, verbose=0)
    np.testing.assert_allclose(found, model(x).numpy(), atol=1e-6)
