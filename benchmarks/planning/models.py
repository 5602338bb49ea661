"""The models: those of three examples, and five whose steps are as different as can be."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import keras

_EXAMPLES = Path(__file__).parents[2] / "examples"


def _example(module: str, *arguments: object) -> keras.Model:
    sys.path.insert(0, str(_EXAMPLES))
    return importlib.import_module(module).build_model(*arguments)


def _perceptron() -> keras.Model:
    layers = [keras.layers.Dense(1024, "relu"), keras.layers.Dense(1024, "relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((784,)), *layers])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _deep() -> keras.Model:
    model = keras.Sequential([keras.Input((768,)), *(keras.layers.Dense(768, "gelu") for _ in range(8))])
    model.compile("sgd", "mse")
    return model


def _recurrent() -> keras.Model:
    layers = [keras.layers.LSTM(128, return_sequences=True), keras.layers.LSTM(128), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((64, 32)), *layers])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _convolutions() -> keras.Model:
    blocks = [
        layer
        for width in (32, 64, 128)
        for layer in (
            keras.layers.Conv2D(width, 3, padding="same", use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.Activation("relu"),
            keras.layers.MaxPooling2D(),
        )
    ]
    model = keras.Sequential([keras.Input((32, 32, 3)), *blocks, keras.layers.Flatten(), keras.layers.Dense(10)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _upsampling() -> keras.Model:
    # TensorFlow's gradient of bilinear upsampling runs on one core.
    image = x = keras.Input((64, 64, 3))
    for width in (16, 32):
        x = keras.layers.Conv2D(width, 3, 2, "same", activation="relu")(x)
    for width in (32, 16):
        x = keras.layers.UpSampling2D(interpolation="bilinear")(x)
        x = keras.layers.Conv2D(width, 1, activation="relu")(x)
    model = keras.Model(image, keras.layers.Conv2D(3, 1)(x))
    model.compile("adam", "mse")
    return model


# By name: what makes it, and the rows of its batch.
MODELS: dict[str, tuple[Callable[[], keras.Model], int]] = {
    "train_digits.py": (lambda: _example("train_digits", (8, 8, 1), 10), 60),
    "train_language_model.py": (lambda: _example("train_language_model", 64, 96, 4), 32),
    "train_within_limit.py": (lambda: _example("train_within_limit"), 750),
    "perceptron 784-1024-1024-10": (_perceptron, 128),
    "8 dense layers of 768": (_deep, 1024),
    "2 LSTMs of 128, 64 steps": (_recurrent, 256),
    "3 layers of convolution": (_convolutions, 256),
    "autoencoder with upsampling": (_upsampling, 64),
}
