"""A process of Keras and tfdist."""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.network.shape import BATCH, BLOCKS, HEADS, LEARNING_RATE, LENGTH, MOMENTUM, VOCABULARY, WIDTH
from benchmarks.network.windows import Windows


def main(text: str, path: str) -> None:
    """Trains, and lets the chief write what it took."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist
    from tfdist.compression import PowerSGD, TopK

    settings = json.loads(text)
    methods = {"default": None, "bf16": "bf16", "PowerSGD": PowerSGD(rank=4), "TopK": TopK(0.01)}
    is_alone = settings["processes"] == 1
    strategy = tfdist.MultiWorkerMirroredStrategy(compression=methods[settings["method"]])
    keras.utils.set_random_seed(1)
    rows = BATCH * settings["processes"]
    batch = np.random.default_rng(1).integers(0, VOCABULARY, (rows, LENGTH + 1)).astype("int32")
    dataset = tf.data.Dataset.from_tensors((batch[:, :-1], batch[:, 1:])).repeat()
    with strategy.scope():
        model = build(keras)
    windows = Windows(settings, is_alone)

    class Timer(keras.callbacks.Callback):
        def on_train_batch_end(self, number: int, logs: Any = None) -> None:
            windows.ended(number + 1)

    history = model.fit(dataset, steps_per_epoch=windows.total, verbose=0, callbacks=[Timer()], shuffle=False).history
    if strategy.is_chief:
        windows.write(path, float(history["loss"][0]))


def build(keras: Any) -> Any:
    """The model, compiled."""
    layers = keras.layers
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH)(tokens)
    for _ in range(BLOCKS):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(y, y, use_causal_mask=True)
        y = layers.LayerNormalization()(x)
        x = x + layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, activation="gelu")(y))
    model = keras.Model(tokens, layers.Dense(VOCABULARY)(layers.LayerNormalization()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM), loss, jit_compile=False)
    return model


if __name__ == "__main__":
    main(*sys.argv[1:])
