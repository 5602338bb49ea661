"""Models with one embedding, for the tests of sharded embeddings and of optimizers for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.models import assert_arrays

ROWS = 11
WIDTH = 3


def embedding_model(shards: int | str | None, optimizer: Any = None, **kwargs: Any) -> Any:
    """A regression on four ids. With shards="plain" the layer is `keras.layers.Embedding`."""
    import keras

    from tfdist.layers import ShardedEmbedding

    keras.utils.set_random_seed(7)
    if shards == "plain":
        embedding = keras.layers.Embedding(ROWS, WIDTH, **kwargs)
    else:
        embedding = ShardedEmbedding(ROWS, WIDTH, shards=shards, **kwargs)
    model = keras.Sequential(
        [keras.layers.Input((4,), dtype="int32"), embedding, keras.layers.Flatten(), keras.layers.Dense(1)]
    )
    if optimizer is not None:
        model.compile(optimizer, "mse")
    return model


def id_batches() -> tuple[np.ndarray, np.ndarray]:
    """24 rows of four ids each, many of them several times in a batch of 8, and targets."""
    generator = np.random.default_rng(3)
    ids = generator.integers(0, ROWS - 2, (24, 4)).astype("int32")
    ids[:, 0] = ids[:, 1]
    return ids, generator.normal(size=(24, 1)).astype("float32")


def train(model: Any, epochs: int = 2) -> None:
    """Three steps an epoch, always in the same order."""
    ids, targets = id_batches()
    model.fit(ids, targets, batch_size=8, epochs=epochs, shuffle=False, verbose=0)


def state(model: Any) -> list[np.ndarray]:
    """The weights of each layer; those of an embedding as one table."""
    return [weight for layer in model.layers for weight in layer.get_weights()]


def assert_same(model: Any, other: Any, tolerance: float = 1e-6) -> None:
    """The weights of two models differ by `tolerance` at most."""
    assert_arrays(state(model), state(other), tolerance=tolerance)


def apply_function(optimizer: Any, variable: Any, ids: list[int], values: np.ndarray, dense: bool = False) -> Any:
    """A `tf.function` of one step with a gradient of some rows."""
    import tensorflow as tf

    optimizer.build([variable])

    @tf.function
    def step() -> None:
        gradient = tf.IndexedSlices(tf.constant(values), tf.constant(ids), tf.constant(variable.shape.as_list()))
        optimizer.apply([tf.convert_to_tensor(gradient) if dense else gradient], [variable])

    return step


def table_sized(graph: Any, rows: int) -> set[str]:
    """Types of the operations that have a tensor of so many rows, also in the branches of conditions."""
    return {
        operation.type
        for part in _graphs(graph)
        for operation in part.get_operations()
        for tensor in operation.outputs
        if tensor.shape.rank and tensor.shape[0] == rows
    }


def _graphs(graph: Any) -> Iterator[Any]:
    yield graph
    for operation in graph.get_operations():
        for attribute in ("then_branch", "else_branch", "f", "body"):
            if attribute in operation.node_def.attr:
                yield from _graphs(graph._get_function(operation.get_attr(attribute).name).graph)
