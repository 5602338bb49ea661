"""One of the workers that train a model to its end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.data_parallel.processes import ROOT
from benchmarks.network.shape import Shape

_LANGUAGE = Shape(256, 64, 64, 4, 2)


def main(text: str, path: str) -> None:
    """Trains, and lets the chief write loss and accuracy of what was held out."""
    import keras
    import tensorflow as tf

    import tfdist

    settings = json.loads(text)
    local = settings["sync_every"]
    strategy = tfdist.LocalStepsStrategy(local) if local else tfdist.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(settings["seed"])
    train, test, build = {"digits": _digits, "language": _language}[settings["task"]]()
    with strategy.scope():
        model = build()
        schedule = keras.optimizers.schedules.CosineDecay(1e-3, settings["steps"])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(schedule), loss, metrics=["accuracy"])
    dataset = tf.data.Dataset.from_tensor_slices(train).shuffle(len(train[0]), seed=settings["seed"]).repeat()
    model.fit(dataset.batch(64).prefetch(2), steps_per_epoch=settings["steps"], verbose=0)
    found = model.evaluate(*test, batch_size=256, verbose=0)
    if strategy.is_chief:
        Path(path).write_text(json.dumps({"loss": found[0], "accuracy": found[1]}))


def _digits() -> tuple[Any, Any, Any]:
    import keras
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    images = (pixels.reshape(-1, 8, 8, 1) / 16).astype("float32")
    images, others, labels, labels_of_others = train_test_split(
        images, labels, test_size=297, stratify=labels, random_state=1
    )

    def build() -> Any:
        layers = keras.layers
        convolutions = [layers.Conv2D(n, 3, padding="same", activation="relu") for n in (16, 32)]
        rest = [
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(64, "relu"),
            layers.Dense(10),
        ]
        return keras.Sequential([keras.Input((8, 8, 1)), *convolutions, *rest])

    return (images, labels), (others, labels_of_others), build


def _language() -> tuple[Any, Any, Any]:
    import runpy

    from benchmarks.network.keras_worker import build

    example = runpy.run_path(str(ROOT / "examples" / "train_language_model.py"))
    train, test = (example["windows"](part, _LANGUAGE.length) for part in example["load"]())
    return train, test, lambda: build(_LANGUAGE, "adam")


if __name__ == "__main__":
    main(*sys.argv[1:])
