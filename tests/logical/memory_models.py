"""Models for tests of memory policies, with Dropout and BatchNormalization, and their data."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
from keras import layers

CLASSES = 4


def dense() -> keras.Model:
    """Residual blocks of dense layers."""
    x = inputs = keras.Input((12,))
    for index in range(4):
        y = layers.Dense(24, activation="relu", name=f"wide_{index}")(x)
        y = layers.BatchNormalization()(y)
        y = layers.Dropout(0.3)(y)
        x = layers.Add()([x, layers.Dense(12)(y)])
    return keras.Model(inputs, layers.Dense(CLASSES, activation="softmax")(x))


def resnet() -> keras.Model:
    """Two stages of two residual blocks."""
    x = layers.Conv2D(4, 3, padding="same")(inputs := keras.Input((8, 8, 3)))
    for filters in (4, 4, 8, 8):
        shortcut = x if x.shape[-1] == filters else layers.Conv2D(filters, 1)(x)
        y = x
        for _ in range(2):
            y = layers.Conv2D(filters, 3, padding="same", use_bias=False)(y)
            y = layers.ReLU()(layers.BatchNormalization()(y))
        x = layers.SpatialDropout2D(0.2)(layers.Add()([shortcut, y]))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(CLASSES, activation="softmax")(x))


@keras.saving.register_keras_serializable(package="tfdist_tests")
class Encoder(layers.Layer):
    """A layer of a Transformer, which heeds masks."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.attention = layers.MultiHeadAttention(2, 4, dropout=0.2)
        self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]
        self.wide, self.narrow, self.dropout = layers.Dense(16, "gelu"), layers.Dense(8), layers.Dropout(0.2)

    def build(self, shape):
        self.attention.build(shape, shape)
        for norm in self.norms:
            norm.build(shape)
        self.wide.build(shape)
        self.narrow.build((*shape[:-1], 16))

    def call(self, x, training=None):
        x = self.norms[0](x + self.attention(x, x))
        return self.norms[1](x + self.dropout(self.narrow(self.wide(x))))


def transformer() -> keras.Model:
    """Three layers on sequences with padding."""
    x = layers.Embedding(20, 8, mask_zero=True)(inputs := keras.Input((6,), dtype="int32"))
    for index in range(3):
        x = Encoder(name=f"encoder_{index}")(x)
    x = layers.BatchNormalization()(layers.GlobalAveragePooling1D()(x))
    return keras.Model(inputs, layers.Dense(CLASSES, activation="softmax")(x))


class Written(keras.Model):
    """The Transformer, written as a class."""

    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(20, 8)
        self.encoders = [Encoder(name=f"encoder_{index}") for index in range(3)]
        self.norm, self.pool = layers.BatchNormalization(), layers.GlobalAveragePooling1D()
        self.head = layers.Dense(CLASSES, activation="softmax")

    def call(self, x, training=None):
        x = self.embedding(x)
        for encoder in self.encoders:
            x = encoder(x)
        return self.head(self.norm(self.pool(x), training=training))


def written() -> keras.Model:
    """A model whose layers are known by being called only."""
    model = Written()
    model(np.zeros((1, 6), "int32"))
    return model


@keras.saving.register_keras_serializable(package="tfdist_tests")
class Block(layers.Layer):
    """A residual block of dense layers, with what has a state."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.wide, self.norm = layers.Dense(24, activation="relu"), layers.BatchNormalization()
        self.dropout, self.narrow = layers.Dropout(0.3), layers.Dense(12)

    def build(self, shape):
        self.wide.build(shape)
        self.norm.build((*shape[:-1], 24))
        self.narrow.build((*shape[:-1], 24))

    def call(self, x, training=None):
        y = self.norm(self.wide(x), training=training)
        return x + self.narrow(self.dropout(y, training=training))


class Blocks(keras.Model):
    """Three of them."""

    def __init__(self):
        super().__init__()
        self.blocks = [Block(name=f"block_{index}") for index in range(3)]
        self.head = layers.Dense(CLASSES, activation="softmax")

    def call(self, x, training=None):
        for block in self.blocks:
            x = block(x, training=training)
        return self.head(x)


def blocks() -> keras.Model:
    """The smallest one."""
    model = Blocks()
    model(np.zeros((1, 12)))
    return model


class Nested(keras.Model):
    """Blocks in blocks of the same class."""

    def __init__(self):
        super().__init__()
        self.blocks = []
        for _ in range(2):
            inner = keras.Sequential([keras.Input((12,)), layers.Dense(12, "tanh"), layers.Dense(12)])
            self.blocks.append(keras.Sequential([keras.Input((12,)), layers.Dense(12, "relu"), inner]))
        self.head = layers.Dense(CLASSES, activation="softmax")

    def call(self, x, training=None):
        for block in self.blocks:
            x = x + block(x, training=training)
        return self.head(x)


def nested() -> keras.Model:
    """Sequential models of which each contains one."""
    model = Nested()
    model(np.zeros((1, 12)))
    return model


# The blocks of `tied`: one has no weight of its own, and one some of its own.
TIED = ["first", layers.Dense, "reader"]


def tied() -> keras.Model:
    """Other layers read the weight of one, and do not know it."""
    shared = layers.Dense(12, "tanh")
    shared.build((None, 12))
    narrow = keras.Input((12,))
    reader = keras.Model(narrow, keras.ops.matmul(layers.Dense(12, "relu")(narrow), shared.kernel), name="reader")
    inputs = keras.Input((12,))
    x = layers.Lambda(lambda x: keras.ops.matmul(x, shared.kernel), name="first")(inputs)
    x = reader(shared(layers.Dense(12, "relu")(x)))
    return keras.Model(inputs, layers.Dense(CLASSES, activation="softmax")(x))


def unet() -> keras.Model:
    """Two levels down and up, with skips."""
    x = inputs = keras.Input((8, 8, 2))
    skips = []
    for filters in (4, 8):
        x = layers.BatchNormalization()(layers.Conv2D(filters, 3, padding="same", activation="relu")(x))
        skips.append(x)
        x = layers.MaxPooling2D()(layers.Dropout(0.2)(x))
    x = layers.Conv2D(8, 3, padding="same", activation="relu")(x)
    for filters, skip in zip((8, 4), reversed(skips), strict=True):
        x = layers.Concatenate()([layers.UpSampling2D()(x), skip])
        x = layers.BatchNormalization()(layers.Conv2D(filters, 3, padding="same", activation="relu")(x))
    return keras.Model(inputs, layers.Conv2D(CLASSES, 1, activation="softmax")(x))


MODELS: dict[str, Callable[[], keras.Model]] = {
    "dense": dense,
    "blocks": blocks,
    "resnet": resnet,
    "transformer": transformer,
    "written": written,
    "nested": nested,
    "tied": tied,
    "unet": unet,
}


def data(name: str, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and classes for a model."""
    rng = np.random.default_rng(3)
    x = {
        **dict.fromkeys(("dense", "blocks", "nested", "tied"), lambda: rng.normal(size=(rows, 12)).astype("float32")),
        "resnet": lambda: rng.normal(size=(rows, 8, 8, 3)).astype("float32"),
        "transformer": lambda: rng.integers(0, 20, (rows, 6)).astype("int32"),
        "written": lambda: rng.integers(0, 20, (rows, 6)).astype("int32"),
        "unet": lambda: rng.normal(size=(rows, 8, 8, 2)).astype("float32"),
    }[name]()
    return x, rng.integers(0, CLASSES, (rows, 8, 8) if name == "unet" else rows)
