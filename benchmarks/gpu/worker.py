"""A process that trains one model in one way, and writes how fast it was."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

# Rows of a batch, and what a row counts.
_BATCH = {"resnet": 128, "transformer": 32}
_LENGTH, _WORDS = 512, 32_000
_WINDOWS = 4


def main(text: str, path: str) -> None:
    """Measures windows of steps."""
    import keras
    import tensorflow as tf

    from benchmarks.windows import FitWindows

    settings = json.loads(text)
    quick = settings["quick"]
    devices = _devices(settings.get("halves", False), quick)
    # CPUs, on which a little of it is tried, are slow with float16.
    keras.config.set_dtype_policy("float32" if quick else "mixed_float16")
    keras.utils.set_random_seed(1)
    strategy = _strategy(settings, devices)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = {"resnet": _resnet, "transformer": _transformer}[settings["model"]](quick)
        model.compile(
            "sgd",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=settings.get("jit_compile", False),
        )
    batch = 8 if quick else _BATCH[settings["model"]]
    data = _data(model, batch).repeat().prefetch(2)
    windows = FitWindows(model, data, [os.getpid()], steps=2 if quick else None, settle=_settle)
    # The first one is not counted: libraries choose their kernels.
    for _ in range(2 if quick else 1 + _WINDOWS):
        windows.run()
    milliseconds = windows.record["samples_ms"][1:]
    tokens = settings["model"] == "transformer"
    counted = batch * (model.input_shape[1] if tokens else 1)
    gpus = tf.config.list_physical_devices("GPU")
    peaks = [tf.config.experimental.get_memory_info(device)["peak"] for device in devices if device.startswith("GPU")]
    found = {
        "rates": [1e3 * counted / one for one in milliseconds],
        "unit": "tokens" if tokens else "images",
        "device": tf.config.experimental.get_device_details(gpus[0])["device_name"] if gpus else "the CPU",
        "peak": sum(peaks) if peaks else None,
    }
    Path(path).write_text(json.dumps(found))


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
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
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
    main(*sys.argv[1:])
