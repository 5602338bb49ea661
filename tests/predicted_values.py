"""Models that return more than floats, and what `predict` makes of them under any strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

X = np.arange(22, dtype="float32").reshape(11, 2)
EXPERTS = np.array([[[0.5, 1.5]], [[2.0, 3.0]], [[1.0, 0.0]]], "float32")


def _lengths(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(x[:, 0], tf.int64) % 3


def _ragged(x: tf.Tensor) -> tf.RaggedTensor:
    return tf.RaggedTensor.from_row_lengths(tf.repeat(x[:, 0], _lengths(x)), _lengths(x))


def _words(x: tf.Tensor) -> tf.RaggedTensor:
    return tf.strings.split(tf.strings.join([tf.strings.as_string(x[:, 0]), " é ", tf.strings.as_string(x[:, 1])]))


DTYPES = ("bool", "uint8", "int16", "complex64", "bfloat16")
FURTHER_DTYPES = ("int8", "uint16", "uint32", "uint64", "int64", "complex128", "float16", "float64")
OUTPUTS: dict[str, Callable[[tf.Tensor], Any]] = {
    **{dtype: lambda x, dtype=dtype: tf.cast(x, dtype) for dtype in (*DTYPES, *FURTHER_DTYPES)},
    "text": lambda x: tf.strings.join(["é", tf.strings.as_string(x)]),
    "text without letters": lambda x: tf.fill([tf.shape(x)[0]], ""),
    "ragged": _ragged,
    "ragged without values": lambda x: tf.RaggedTensor.from_row_lengths(x[:0, 0], tf.zeros_like(_lengths(x))),
    "ragged text": _words,
    "ragged bool": lambda x: _ragged(x) > 4,
    "sparse": lambda x: tf.sparse.from_dense(tf.where(x > 5, x, 0)),
    "nested": lambda x: {"bool": x > 3, "others": [x, tf.strings.as_string(x)]},
    "no columns": lambda x: (x[:, :0], tf.strings.as_string(x[:, :0]), tf.cast(x, "int16")[:, tf.newaxis, :0]),
    "more rows": lambda x: tf.reshape(x, (-1, 1)),
    "constants": lambda x: (
        x,
        tf.constant(3.0),
        tf.ones((3, 2)),
        tf.constant(7),
        tf.constant("é"),
        tf.constant(1 + 2j),
    ),
    # Floats of 64 bits have 53 for the digits.
    "large whole numbers": lambda x: (
        x,
        tf.constant(2**53 + 1, tf.int64),
        tf.constant([-(2**62) - 3, 2**63 - 1, 5], tf.int64),
        tf.constant(2**64 - 1, tf.uint64),
        tf.reduce_sum(tf.cast(x, tf.int64) * (2**55 + 1), 0),
        tf.reduce_any(tf.constant([True, False])),
    ),
    "means and sums": lambda x: (x, tf.reduce_mean(x), tf.reduce_mean(x, 0), tf.reduce_sum(x, 0)),
    # Fractions are cut off from the mean of all rows, not from that of each replica's.
    "of means and sums": lambda x: (
        x,
        tf.cast(tf.reduce_mean(x) + 0.25, tf.int32),
        tf.cast(tf.reduce_mean(x, 0) + 0.25, tf.int64),
        tf.cast(tf.reduce_sum(x) / 3 + 0.1, tf.uint8),
        tf.round(tf.reduce_mean(x / 3)),
        tf.math.floor(tf.reduce_mean(x, 0) / 3 + 0.1),
        tf.reduce_sum(tf.cast(x, tf.int64)) // 5,
        tf.sqrt(tf.reduce_mean(tf.square(x))),
        tf.reduce_mean(x) > 5,
        tf.reduce_sum(x) + 1,
        tf.reduce_max(tf.reduce_mean(x, 0)),
        tf.stack([tf.sqrt(tf.reduce_sum(x)), 1.0]),
        keras.ops.softplus(tf.reduce_mean(x, 0) - 5)[::-1],
    ),
    # Of which the number of rows is no part.
    "sizes": lambda x: (
        x,
        tf.shape(x)[1],
        tf.shape(x)[-1:],
        tf.unstack(tf.shape(x))[1],
        tf.reduce_sum(x) / tf.cast(tf.shape(x)[1], tf.float32),
    ),
    # Over the first axis, along which there are experts or centres, and no rows.
    "moved rows": lambda x: (
        tf.reduce_sum(tf.exp(-tf.square(tf.expand_dims(x, 0) - EXPERTS)), 0),
        tf.reduce_mean(EXPERTS * x, 0),
        tf.reduce_mean(EXPERTS + x, 0),
        tf.reduce_mean(tf.gather(EXPERTS[:, 0], tf.cast(x, tf.int32) % 2, axis=1), 0),
        tf.reduce_mean(tf.stack([x, 2 * x]), 0),
        tf.reduce_sum(tf.one_hot(tf.cast(x[:, 0], tf.int32) % 4, 3, axis=0), 0),
    ),
    "means of rows of other shapes": lambda x: (
        x,
        tf.reduce_mean(tf.reshape(x[:, tf.newaxis], (-1, 2, 1)), 0),
        tf.reduce_sum(tf.squeeze(tf.expand_dims(x, 1), 1), 0),
    ),
    "no rows are kept": lambda x: tf.boolean_mask(x, x[:, 0] < 0),
    "static zeros": lambda x: (x, tf.zeros((keras.ops.shape(x)[0], 2))),
}


class Returns(keras.Model):
    """Returns what a function makes of the rows."""

    def __init__(self, function: Callable[[tf.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def call(self, x: tf.Tensor) -> Any:
        return self.function(x)


def predictions(strategy: tf.distribute.Strategy, names: list[str], eagerly: bool = False) -> dict[str, Any]:
    """What `predict` and `predict_on_batch` return, as lists, by the name of the output."""
    found = {}
    for name in names:
        with strategy.scope():
            model = Returns(OUTPUTS[name])
            model.compile("sgd", "mse", run_eagerly=eagerly)
        whole, batch = model.predict(X, batch_size=4, verbose=0), model.predict_on_batch(X)
        found[name] = [[listed(x) for x in tf.nest.flatten(one)] for one in (whole, batch)]
    return found


def own_loop(strategy: tf.distribute.Strategy, names: list[str]) -> dict[str, Any]:
    """What `strategy.gather` makes of each replica's two rows."""

    def gather(function: Callable[[tf.Tensor], Any]) -> Any:
        replica = strategy.experimental_distribute_values_from_function
        rows = replica(lambda context: tf.constant(X[2 * context.replica_id_in_sync_group :][:2]))
        return strategy.gather(strategy.run(function, (rows,)), axis=0)

    return {name: listed(gather(OUTPUTS[name])) for name in names}


def listed(value: Any) -> Any:
    """A tensor as something that can be sent and compared."""
    if isinstance(value, tf.RaggedTensor):
        return value.to_list()
    if isinstance(value, tf.SparseTensor):
        return [value.indices.numpy().tolist(), value.values.numpy().tolist(), value.dense_shape.numpy().tolist()]
    value = np.asarray(value)
    is_narrow = value.dtype.name == "bfloat16"
    return value.dtype.name, (value.astype("float32") if is_narrow else value).tolist()


def assert_same(found: list, expected: list, name: str) -> None:
    """Asserts that two of `predictions` are equal, means and sums up to rounding."""
    for one, other in zip(found, expected, strict=True):
        for values, others in zip(one, other, strict=True):
            if "means and sums" in name:
                assert values[0] == others[0]
                np.testing.assert_allclose(values[1], others[1], rtol=1e-6)
            else:
                assert values == others, name
