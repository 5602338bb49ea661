"""The models: those of three examples, and two whose steps are as different as can be."""

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


# By name: what makes it, and the rows of its batch.
MODELS: dict[str, tuple[Callable[[], keras.Model], int]] = {
    "train_digits.py": (lambda: _example("train_digits", (8, 8, 1), 10), 60),
    "train_language_model.py": (lambda: _example("train_language_model", 64, 96, 4), 32),
    "train_within_limit.py": (lambda: _example("train_within_limit"), 750),
    "perceptron 784-1024-1024-10": (_perceptron, 128),
    "8 dense layers of 768": (_deep, 1024),
}
