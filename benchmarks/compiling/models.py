"""Models that are traced and compiled, and their data."""

from __future__ import annotations

from typing import Any


def residual() -> Any:
    """ResNet50 with 53 BatchNormalization layers, for small pictures."""
    import keras

    return keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=10)


def convolutional() -> Any:
    """A small convolutional network."""
    import keras
    from keras import layers

    hidden = [part for width in (32, 64) for part in _convolution(layers, width)]
    top = [layers.GlobalAveragePooling2D(), layers.Dense(10, activation="softmax")]
    return keras.Sequential([keras.Input((32, 32, 3)), *hidden, *top])


def _convolution(layers: Any, width: int) -> list:
    return [
        layers.Conv2D(width, 3, padding="same", use_bias=False),
        layers.BatchNormalization(),
        layers.Activation("relu"),
        layers.MaxPooling2D(),
    ]


def transformer() -> Any:
    """One block: attention and a feed-forward network, each with a residual connection."""
    import keras
    from keras import layers

    inputs = keras.Input((64, 128))
    x = inputs + layers.MultiHeadAttention(4, 32)(layers.LayerNormalization()(inputs), inputs)
    hidden = layers.Dense(512, activation="gelu")(layers.LayerNormalization()(x))
    x = x + layers.Dense(128)(hidden)
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(layers.GlobalAveragePooling1D()(x)))


MODELS = {"ResNet50": residual, "CNN": convolutional, "Transformer block": transformer}


def compiled(name: str, jit_compile: bool = False) -> Any:
    """A model of `MODELS`."""
    model = MODELS[name]()
    model.compile("adam", "sparse_categorical_crossentropy", jit_compile=jit_compile)
    return model


def repeated_batch(model: Any, rows: int) -> Any:
    """A dataset without an end, of one batch of zeros."""
    import tensorflow as tf

    batch = tf.zeros([rows, *model.input_shape[1:]]), tf.zeros([rows], tf.int32)
    return tf.data.Dataset.from_tensors(batch).repeat()
