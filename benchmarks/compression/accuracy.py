"""Accuracy after training with each method, over some seeds."""

from __future__ import annotations

import gzip
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import markdown
from benchmarks.children import Children
from benchmarks.data_parallel.processes import say
from benchmarks.logical_cpus import logical_cpus

# By what is written into a script.
METHODS = (
    "None",
    "'bf16'",
    "PowerSGD(8, start_step=100)",
    "PowerSGD(2, start_step=100)",
    "TopK(0.016, start_step=100)",
    "TopK(0.005, start_step=100)",
    "TopK(0.005, momentum_correction=True, start_step=100)",
)
EXAMPLES = Path(__file__).parents[2] / "examples"
FASHION = Path("/usr/share/datasets/fashion-mnist")
BATCH, LENGTH = {"images": 128, "text": 32}, 64
EPOCHS = {"images": 8, "text": 4}


def of(problem: str) -> Callable[[Children, int, bool], list[dict]]:
    """What measures a problem: one record for each method, with a sample for each seed."""

    def measure(children: Children, samples: int, quick: bool) -> list[dict]:
        records = []
        for method in METHODS:
            if problem == "text" and "momentum_correction" in method:
                continue  # it is for SGD; the language model is trained by AdamW
            found = []
            for seed in range(1, samples + 1):
                settings = {"problem": problem, "method": method, "seed": seed, "quick": quick}
                found.append(children.python(f"{__package__}.accuracy", settings, children.cores))
                say(f"{problem}, {method}, seed {seed}: {found[-1]['accuracy']:.2f} %, {found[-1]['seconds']:.0f} s")
            accuracies = [one["accuracy"] for one in found]
            records.append({"method": method, "sent": found[0]["sent"], "accuracies": accuracies})
        return records

    return measure


def table(records: Sequence[Mapping]) -> str:
    """Each method beside none, whose accuracy differs between seeds, too."""
    plain = records[0]
    # Gradients whose shapes are not known while tracing are not counted.
    is_counted = all(record["sent"] for record in records)
    header = ["compression", "sent a step, kB", "of all", "accuracy, %", "difference, points"]
    rows = []
    for record in records:
        difference = statistics.median(record["accuracies"]) - statistics.median(plain["accuracies"])
        rows.append(
            [
                f"`{record['method']}`",
                f"{record['sent'] / 1e3:,.0f}" if is_counted else "",
                f"1/{plain['sent'] / record['sent']:.0f}" if is_counted else "",
                markdown.spread(record["accuracies"]),
                f"{difference:+.2f}" if record is not plain else "",
            ]
        )
    return markdown.table(header, rows, left=1)


def main(settings: dict) -> dict:
    """Trains with a seed and a method, and returns the accuracy on what was not trained on."""
    import keras

    import tfdist
    from benchmarks.compression.exchanges import noted_exchanges

    devices = logical_cpus(2)
    keras.utils.set_random_seed(settings["seed"])
    names = {"PowerSGD": tfdist.compression.PowerSGD, "TopK": tfdist.compression.TopK}
    method = eval(settings["method"], {"__builtins__": {}, "None": None, "True": True, **names})
    strategy = tfdist.MirroredStrategy(devices, compression=method)
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
    return {"accuracy": 100 * accuracy, "seconds": seconds, "sent": _bytes(sent)}


def _bytes(sent: list) -> int:
    """Bytes that a replica adds up or gives to the others in a step, embeddings' gradients aside.

    It is what each of two processes would send; 0 if the shape of one is not known while it is traced.
    """
    if any(None in shape for shape, _ in sent):
        return 0
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
