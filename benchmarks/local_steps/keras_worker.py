"""A worker of Keras and tfdist, alone or one of two."""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.network.windows import Windows


def main(text: str, path: str) -> None:
    """Trains, and lets the chief write how long the steps of each window took."""
    import keras
    import tensorflow as tf

    import tfdist
    from benchmarks.data_parallel.data import make_batch
    from benchmarks.data_parallel.keras_training import keras_layer
    from benchmarks.data_parallel.models import LEARNING_RATE, MODELS, MOMENTUM

    settings = json.loads(text)
    shape, is_alone = MODELS[settings["model"]], settings["processes"] == 1
    local = settings["sync_every"]
    if local:
        strategy = tfdist.LocalStepsStrategy(local, fragments=settings["fragments"])
    else:
        strategy = tfdist.MultiWorkerMirroredStrategy()
    batch = make_batch(shape, settings["batch"] * settings["processes"])
    dataset = tf.data.Dataset.from_tensors(batch).repeat()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras_layer(keras, layer) for layer in shape.layers]
        model = keras.Sequential([keras.Input(shape.input_shape), *layers])
        optimizer = keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    windows = Windows({**settings, "warmup": settings["steps"]}, is_alone)

    class Timer(keras.callbacks.Callback):
        def on_train_batch_end(self, number: int, logs: Any = None) -> None:
            windows.ended(number + 1)

    history = model.fit(dataset, steps_per_epoch=windows.total, verbose=0, callbacks=[Timer()], shuffle=False).history
    if strategy.is_chief:
        windows.write(path, float(history["loss"][0]))


if __name__ == "__main__":
    main(*sys.argv[1:])
