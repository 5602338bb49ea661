"""A process of Keras and tfdist."""

from __future__ import annotations

from typing import Any

from benchmarks.network.shape import BATCH, LEARNING_RATE, MOMENTUM, SHAPE, Shape
from benchmarks.network.windows import Windows


def main(settings: dict) -> dict | None:
    """Trains, and lets the chief return what it took."""
    import keras

    import tfdist
    from tfdist.compression import PowerSGD, TopK

    methods = {"default": None, "bf16": "bf16", "PowerSGD": PowerSGD(rank=4), "TopK": TopK(0.01)}
    strategy = tfdist.MultiWorkerMirroredStrategy(compression=methods[settings["method"]])
    keras.utils.set_random_seed(1)
    dataset = repeated_batch(SHAPE, BATCH * settings["processes"])
    with strategy.scope():
        model = build(SHAPE, keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM))
    found = Windows(settings, settings["processes"] == 1).of_fit(model, dataset)
    return found if strategy.is_chief else None


def repeated_batch(shape: Shape, rows: int) -> Any:
    """Always the same tokens, with the next ones to predict."""
    import numpy as np
    import tensorflow as tf

    batch = np.random.default_rng(1).integers(0, shape.vocabulary, (rows, shape.length + 1)).astype("int32")
    return tf.data.Dataset.from_tensors((batch[:, :-1], batch[:, 1:])).repeat()


def build(shape: Shape, optimizer: Any) -> Any:
    """The model, compiled."""
    import keras

    layers = keras.layers
    tokens = keras.Input((shape.length,), dtype="int32")
    x = layers.Embedding(shape.vocabulary, shape.width)(tokens)
    for _ in range(shape.blocks):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(shape.heads, shape.width // shape.heads)(y, y, use_causal_mask=True)
        y = layers.LayerNormalization()(x)
        x = x + layers.Dense(shape.width)(layers.Dense(4 * shape.width, activation="gelu")(y))
    model = keras.Model(tokens, layers.Dense(shape.vocabulary)(layers.LayerNormalization()(x)))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    return model
