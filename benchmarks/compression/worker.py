"""A process that trains one model with two replicas, and writes how accurate it is."""

from __future__ import annotations

import gzip
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"
FASHION = Path("/usr/share/datasets/fashion-mnist")
BATCH, LENGTH = {"images": 128, "text": 32}, 64
EPOCHS = {"images": 8, "text": 4}


def main(text: str, path: str) -> None:
    """Trains with a seed and a method, and writes the accuracy on what was not trained on."""
    import keras
    import tensorflow as tf

    import tfdist
    from benchmarks.compression.exchanges import noted_exchanges

    settings = json.loads(text)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    keras.utils.set_random_seed(settings["seed"])
    names = {"PowerSGD": tfdist.compression.PowerSGD, "TopK": tfdist.compression.TopK}
    method = eval(settings["method"], {"__builtins__": {}, "None": None, "True": True, **names})
    strategy = tfdist.MirroredStrategy(["CPU:0", "CPU:1"], compression=method)
    problem = settings["problem"]
    train, test = {"images": _images, "text": _text}[problem]()
    if settings["quick"]:
        train = [part[:2000] for part in train]
    with strategy.scope():
        model = {"images": _classifier, "text": _language_model}[problem]()
        model.compile(model.optimizer, model.loss, metrics=["accuracy"])
    began = time.monotonic()
    epochs = 1 if settings["quick"] else EPOCHS[problem]
    with noted_exchanges() as sent:
        model.fit(*train, batch_size=BATCH[problem], epochs=epochs, verbose=0)
    seconds = time.monotonic() - began
    _, accuracy = model.evaluate(*test, batch_size=500, verbose=0)
    found = {"accuracy": 100 * accuracy, "seconds": seconds, "sent": _bytes(sent)}
    Path(path).write_text(json.dumps(found))


def _bytes(sent: list) -> int:
    """Bytes that a replica adds up or gives to the others in a step, embeddings' gradients aside.

    It is what each of two processes would send.
    """
    return sum(math.prod(shape) * dtype.size for shape, dtype in sent)


def _images() -> tuple[list, list]:
    """The images of Debian's package dataset-fashion-mnist."""
    import numpy as np

    def read(name: str, head: int) -> Any:
        file = FASHION / name
        if not file.exists():
            raise FileNotFoundError(f"{file} is not there. Install it by `apt install dataset-fashion-mnist`.")
        return np.frombuffer(gzip.decompress(file.read_bytes())[head:], np.uint8)

    parts = []
    for prefix in ("train", "t10k"):
        images = read(f"{prefix}-images-idx3-ubyte.gz", 16).reshape(-1, 784).astype("float32") / 255
        parts.append([images, read(f"{prefix}-labels-idx1-ubyte.gz", 8).astype("int32")])
    return parts[0], parts[1]


def _text() -> tuple[Any, Any]:
    sys.path.insert(0, str(EXAMPLES))
    from train_language_model import load, windows

    return tuple(windows(part, LENGTH) for part in load())


def _classifier() -> Any:
    import keras

    layers = [keras.layers.Dense(512, "relu"), keras.layers.BatchNormalization(), keras.layers.Dense(512, "relu")]
    model = keras.Sequential([keras.Input((784,)), *layers, keras.layers.Dropout(0.2), keras.layers.Dense(10)])
    steps = EPOCHS["images"] * 60_000 // BATCH["images"]
    rate = keras.optimizers.schedules.CosineDecay(0.05, steps)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(rate, momentum=0.9), loss)
    return model


def _language_model() -> Any:
    from train_language_model import build_model

    return build_model(LENGTH, width=96, blocks=2)


if __name__ == "__main__":
    main(*sys.argv[1:])
