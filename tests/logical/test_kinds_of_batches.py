"""What a batch may consist of: named tuples, None in the place of a target, ragged and sparse tensors, any rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.features.table import mlp, rows
from tests.models import ready
from tests.tiers import daily
from tfdist.testing import assert_transparent

SIZE = 8
X, Y = rows(21)
WEIGHTS = np.linspace(0.1, 2, 21).astype("float32")


class Batch(NamedTuple):
    features: Any
    label: Any


class ByName(keras.Sequential):
    """Its steps take their batch by the names of its parts."""

    def train_step(self, data: Batch) -> dict:
        assert isinstance(data, Batch)
        return super().train_step((data.features, data.label))


def two_outputs(**options: Any) -> keras.Model:
    """The second one has no target and no loss."""
    inputs = keras.Input((8,))
    hidden = layers.Dense(6, "tanh")(inputs)
    model = keras.Model(inputs, [layers.Dense(1)(hidden), layers.Dense(2)(hidden)])
    return ready(model, "sgd", ["mse", None], **options)


class Penalised(keras.Model):
    """Learns without targets."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(8)

    def call(self, x: Any) -> Any:
        restored = self.dense(x)
        self.add_loss(keras.ops.mean(keras.ops.square(restored - x)))
        return restored

    def compute_loss(self, x: Any = None, y: Any = None, *others: Any, **more: Any) -> Any:
        assert y is None
        return super().compute_loss(x, y, *others, **more)


class RowSums(keras.Model):
    """Of ragged rows."""

    def __init__(self) -> None:
        super().__init__()
        self.out = layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.out(keras.ops.reshape(tf.reduce_sum(x, axis=1), (-1, 1)))

    def build(self, shape: Any) -> None:
        self.out.build((None, 1))


def named() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(Batch(X, Y)).batch(SIZE)


def yields(*batch: Any) -> Callable[[], Iterator[tuple]]:
    """Makes generators without an end, of batches of these arrays, or of None."""

    def generate() -> Iterator[tuple]:
        while True:
            for i in range(0, len(X), SIZE):
                yield tuple(None if one is None else one[i : i + SIZE] for one in batch)

    return generate


def ragged() -> tf.data.Dataset:
    lengths = np.arange(21) % 4 + 1
    values = np.random.RandomState(0).randn(lengths.sum()).astype("float32")
    return tf.data.Dataset.from_tensor_slices((tf.RaggedTensor.from_row_lengths(values, lengths), Y)).batch(SIZE)


def sparse() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(np.where(X > 0, X, 0)), Y)).batch(SIZE)


def of_sparse(**options: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((8,), sparse=True), layers.Dense(1)])
    return ready(model, "sgd", "mse", jit_compile=False, **options)


def by_name(**options: Any) -> keras.Model:
    return ready(ByName([keras.Input((8,)), layers.Dense(1)]), "sgd", "mse", **options)


TWICE = {"steps_per_execution": 2}
KINDS: dict[str, tuple[Callable, Any, dict]] = {
    "a named tuple": (mlp(), named, {}),
    "a named tuple, by name": (by_name, named, {}),
    "a target that is None": (two_outputs, (X, [Y, None]), {"batch_size": SIZE}),
    "a target that is None, in executions of two steps": (
        lambda: two_outputs(**TWICE),
        (X, [Y, None]),
        {"batch_size": SIZE},
    ),
    "a generator with None for weights": (mlp(), yields(X, Y, None), {"steps_per_epoch": 3}),
    "a generator with None for a target": (lambda: ready(Penalised(), "sgd"), yields(X, None), {"steps_per_epoch": 3}),
    "a generator with None, in executions of two steps": (
        mlp(**TWICE),
        yields(X, Y, None),
        {"steps_per_epoch": 4},
    ),
    "ragged rows in executions of two steps": (lambda: ready(RowSums(), "sgd", "mse", **TWICE), ragged, {}),
    "sparse rows in executions of two steps": (lambda: of_sparse(**TWICE), sparse, {}),
}


@pytest.mark.parametrize("name", daily(KINDS, "a named tuple", "a generator with None for weights"))
def test_equals_one_process(mirrored: tf.distribute.Strategy, name: str) -> None:
    build, data, arguments = KINDS[name]
    assert_transparent(mirrored, build, data, **arguments)


def test_number_of_global_batches(mirrored: tf.distribute.Strategy) -> None:
    """TensorFlow's distributed datasets know it, too: loops count their steps by it."""
    assert mirrored.experimental_distribute_dataset(named()).cardinality == 3
    assert mirrored.experimental_distribute_dataset(named().repeat()).cardinality == tf.data.INFINITE_CARDINALITY
