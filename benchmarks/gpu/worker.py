"""A process that trains one model in one way, and tells how fast it is."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

from benchmarks.answering import answer_all
from benchmarks.logical_cpus import logical_cpus

# Rows of a batch, and what a row counts.
_BATCH = {"resnet": 128, "transformer": 16}
_LENGTH, _WORDS = 512, 32_000
# Of a window.
_SECONDS = 0.8


class Trainer:
    """Answers the benchmark's requests.

    Args:
        settings: of the variant.
    """

    def __init__(self, settings: dict[str, Any]):
        self._settings = settings

    def prepare(self) -> dict[str, Any]:
        """Builds the model and trains it a little; returns the unit of its rate, and the device's name."""
        import keras
        import tensorflow as tf

        from benchmarks.windows import FitWindows

        settings, quick = self._settings, self._settings["quick"]
        self._devices = _devices(settings.get("halves", False), quick)
        # CPUs, on which a little of it is tried, are slow with float16.
        keras.config.set_dtype_policy("float32" if quick else "mixed_float16")
        keras.utils.set_random_seed(1)
        strategy = _strategy(settings, self._devices)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = {"resnet": _resnet, "transformer": _transformer}[settings["model"]](quick)
            model.compile(
                "sgd",
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                jit_compile=settings.get("jit_compile", False),
            )
        batch = 8 if quick else _BATCH[settings["model"]]
        data = _data(model, batch).repeat().prefetch(2)
        steps = 2 if quick else None
        self._windows = FitWindows(model, data, [os.getpid()], _SECONDS, steps, settle=_settle)
        has_tokens = settings["model"] == "transformer"
        self._counted = batch * (model.input_shape[1] if has_tokens else 1)
        gpus = tf.config.list_physical_devices("GPU")
        device = tf.config.experimental.get_device_details(gpus[0])["device_name"] if gpus else "the CPU"
        return {"unit": "tokens" if has_tokens else "images", "device": device}

    def rate(self) -> float:
        """Images, or tokens, a second in one window."""
        self._windows.run()
        return 1e3 * self._counted / self._windows.record["samples_ms"][-1]

    def peak(self) -> int | None:
        """Bytes on the GPU at most, if there is one."""
        import tensorflow as tf

        gpus = [device for device in self._devices if device.startswith("GPU")]
        return sum(tf.config.experimental.get_memory_info(gpu)["peak"] for gpu in gpus) if gpus else None


def _devices(halves: bool, quick: bool) -> list[str]:
    """The GPU, or its two halves; to try the benchmark without one, CPU devices."""
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if not gpus and not quick:
        raise RuntimeError("Received: a machine on which TensorFlow sees no GPU. Expected: one; or --quick, on CPUs.")
    if halves and gpus:
        # Half of what is free on most; the models need less.
        half = [tf.config.LogicalDeviceConfiguration(memory_limit=10 << 10)] * 2
        tf.config.set_logical_device_configuration(gpus[0], half)
    elif not gpus:
        logical_cpus(3)
    return [f"{'GPU' if gpus else 'CPU'}:{i}" for i in range(2 if halves else 1)]


def _strategy(settings: dict[str, Any], devices: list[str]) -> Any:
    import tfdist

    memory = {"memory": settings["memory"]} if "memory" in settings else {}
    # The third CPU device stands in for the host.
    host = "CPU:0" if devices[0].startswith("GPU") else "CPU:2"
    makers = {
        "Mirrored": lambda: tfdist.MirroredStrategy(devices, **memory),
        "Pipeline": lambda: tfdist.PipelineStrategy(devices, num_microbatches=4),
        "HostOffload": lambda: tfdist.HostOffloadStrategy(device=devices[0], host=host),
    }
    return makers[settings["strategy"]]() if "strategy" in settings else None


def _settle() -> None:
    """Waits for the GPU, which computes while the program goes on."""
    import tensorflow as tf

    tf.test.experimental.sync_devices()


def _resnet(quick: bool) -> Any:
    import keras

    size = 32 if quick else 224
    body = keras.applications.ResNet50(weights=None, include_top=False, pooling="avg", input_shape=(size, size, 3))
    return keras.Model(body.input, keras.layers.Dense(1000, dtype="float32")(body.output))


def _transformer(quick: bool) -> Any:
    """As GPT-2 small, with learned positions left out: they cost nothing."""
    import keras
    from keras import layers

    length, width, blocks, words = (32, 64, 4, 100) if quick else (_LENGTH, 768, 12, _WORDS)
    x = layers.Embedding(words, width)(inputs := keras.Input((length,), dtype="int32"))
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(width // 64, 64)(y, y, use_causal_mask=True)
        y = layers.LayerNormalization()(x)
        x = x + layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(y))
    return keras.Model(inputs, layers.Dense(words, dtype="float32")(layers.LayerNormalization()(x)))


def _data(model: Any, batch: int) -> Any:
    """One batch, which stays where TensorFlow puts it: reading data is not what is measured."""
    import tensorflow as tf

    shape = [batch, *model.input_shape[1:]]
    if model.inputs[0].dtype == "int32":
        x = tf.random.uniform(shape, 0, model.output_shape[-1], tf.int32)
        return tf.data.Dataset.from_tensors((x, tf.roll(x, -1, 1)))
    return tf.data.Dataset.from_tensors((tf.random.uniform(shape), tf.random.uniform([batch], 0, 1000, tf.int32)))


if __name__ == "__main__":
    answer_all(sys.argv[2], Trainer(json.loads(sys.argv[1])))
