"""The two models that are measured, described once for all frameworks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CLASSES = 10
LEARNING_RATE = 0.01
MOMENTUM = 0.9


@dataclass(frozen=True)
class Conv:
    """A convolution without padding, followed by ReLU."""

    filters: int
    size: int


@dataclass(frozen=True)
class Pool:
    """Max-pooling without overlap; rows that do not fill a window are dropped."""

    size: int


@dataclass(frozen=True)
class Flatten:
    """Makes a vector of each image."""


@dataclass(frozen=True)
class Dense:
    """A fully connected layer."""

    units: int
    relu: bool = True


Layer = Conv | Pool | Flatten | Dense


@dataclass(frozen=True)
class ModelShape:
    """A model as a list of layers.

    Attributes:
        title: what the table calls it.
        input_shape: shape of one example, channels last.
        layers: its layers; the last one gives the logits.
    """

    title: str
    input_shape: tuple[int, ...]
    layers: tuple[Layer, ...]


MODELS = {
    "cnn": ModelShape(
        "CNN",
        (28, 28, 1),
        (
            Conv(32, 3),
            Conv(64, 3),
            Pool(2),
            Conv(48, 3),
            Pool(5),
            Flatten(),
            Dense(48),
            Dense(CLASSES, relu=False),
        ),
    ),
    "mlp": ModelShape("MLP", (784,), (Dense(1024), Dense(1024), Dense(CLASSES, relu=False))),
}


def shape_after(layer: Layer, shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of one example after a layer, channels last.

    Example:
        >>> shape_after(Conv(16, 3), (28, 28, 1))
        (26, 26, 16)
    """
    match layer:
        case Conv(filters, size):
            return shape[0] - size + 1, shape[1] - size + 1, filters
        case Pool(size):
            return shape[0] // size, shape[1] // size, shape[2]
        case Flatten():
            flat = 1
            for extent in shape:
                flat *= extent
            return (flat,)
        case Dense(units):
            return (units,)


def count_parameters(model: ModelShape) -> int:
    """Number of weights, biases included.

    Example:
        >>> count_parameters(MODELS["mlp"])
        1863690
    """
    total, shape = 0, model.input_shape
    for layer in model.layers:
        match layer:
            case Conv(filters, size):
                total += (size * size * shape[-1] + 1) * filters
            case Dense(units):
                total += (shape[-1] + 1) * units
        shape = shape_after(layer, shape)
    return total


def make_batch(model: ModelShape, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Random examples (float32, channels last) and labels (int32), the same on every call.

    Example:
        >>> from benchmarks.data_parallel.models import MODELS
        >>> examples, labels = make_batch(MODELS["cnn"], 64)
        >>> examples.shape, labels.shape
        ((64, 28, 28, 1), (64,))
    """
    generator = np.random.default_rng(1)
    examples = generator.standard_normal((rows, *model.input_shape), dtype=np.float32)
    labels = generator.integers(0, CLASSES, rows, dtype=np.int32)
    return examples, labels
