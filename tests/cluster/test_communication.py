"""What a training step sends: one sum, whatever the model, its metrics and the end of its data."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest

from tests.tiers import daily
from tfdist.testing import run_local

pytestmark = pytest.mark.cluster


def sums(transport: str) -> dict[str, list]:
    """Runs on every process: the sums over processes in the traced train functions of several models."""
    import keras
    import tensorflow as tf
    from keras import layers

    import tfdist
    from tests.features.table import batches, mlp, rows

    def traced_step(strategy: tf.distribute.Strategy, build: object, data: object = None) -> object:
        with strategy.scope():
            model = build()
        model.make_train_function()
        traced = _closure(model.train_function, "multi_step_on_iterator")
        model.fit(batches(*rows()) if data is None else data, verbose=0, epochs=1)
        (function,) = traced._list_all_concrete_functions()
        return function.graph.as_graph_def()

    def of_train_step(*arguments: object) -> list[str]:
        graph = traced_step(*arguments)
        nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
        return sorted(node.op for node in nodes if _is_sum(node))

    plain = tfdist.MultiWorkerMirroredStrategy(transport=transport, start_timeout=60)
    found = {
        "metrics, uneven": of_train_step(
            plain, lambda: mlp(metrics=["accuracy", keras.metrics.AUC()])(), batches(*rows(81))
        ),
        "adam, clipped": of_train_step(plain, mlp(optimizer=lambda: keras.optimizers.Adam(clipnorm=1.0))),
        "global BatchNormalization": of_train_step(plain, mlp(layers.BatchNormalization)),
    }

    def embedding() -> keras.Model:
        model = keras.Sequential([keras.Input((3,), dtype="int32"), layers.Embedding(9, 2), layers.Flatten()])
        model.compile("adam", "mse")
        return model

    ids = tf.data.Dataset.from_tensors((tf.zeros([8, 3], tf.int32), tf.zeros([8, 6])))
    found["embedding"] = of_train_step(plain, embedding, ids)
    local = tfdist.MultiWorkerMirroredStrategy(batch_norm="local", transport=transport)
    found["local BatchNormalization"] = of_train_step(local, mlp(layers.BatchNormalization))
    small = tfdist.MultiWorkerMirroredStrategy(bucket_bytes=15_000, transport=transport)
    with small.scope():
        deep = keras.Sequential([keras.Input((8,)), *(layers.Dense(60, name=f"dense{i}") for i in range(4))])
        deep.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensors((tf.zeros([8, 8]), tf.zeros([8, 60])))
    graph = traced_step(small, lambda: deep, data)
    (step,) = [f.node_def for f in graph.library.function if any(map(_is_sum, f.node_def))]
    gradients = {f"dense{i}": f"gradient_tape/sequential.*/dense{i}.*/MatMul" for i in range(4)}
    found["buckets"] = [
        " ".join(layer for layer, name in gradients.items() if any(re.match(name, node) for node in before))
        for before in sorted((_before(node, step) for node in step if _is_sum(node)), key=len)
    ]
    found["own rows"] = own_rows(plain)
    return found


def own_rows(strategy: object) -> list:
    """This process' rows of the sum of large and of small matrices, and the operations that exchanged them."""
    import tensorflow as tf

    from tfdist.steps.reduce import reduce_scatter

    rank = strategy._peers.rank
    rows = tf.range(60_000.0)[:, None] * tf.constant([[1.0, 10.0 + rank]])

    @tf.function
    def scatter() -> list[tf.Tensor]:
        given = [rows, tf.cast(rows[:40], tf.float64), tf.cast(rows[:40], tf.bfloat16)]
        return strategy.run(lambda: reduce_scatter([tf.identity(one) for one in given]))

    operations = scatter.get_concrete_function().graph.get_operations()
    kinds = [one.type for one in operations if one.type.startswith(("Collective", "PyFunc"))]
    return [kinds, *(tf.cast(one, tf.float64).numpy() for one in scatter())]


def _is_sum(node: object) -> bool:
    return node.op.startswith(("Collective", "PyFunc"))


def _before(last: object, nodes: list) -> set[str]:
    """The names of all that a node waits for."""
    by_name = {node.name: node for node in nodes}
    found: set[str] = set()
    left = [last.name]
    while left:
        names = {one.lstrip("^").split(":")[0] for one in by_name[left.pop()].input} - found
        names &= by_name.keys()
        found |= names
        left += names
    return found


def _closure(function: object, name: str) -> object:
    cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
    return cells[name].cell_contents


@functools.cache
def results(transport: str) -> list[dict[str, list[str]]]:
    return run_local(sums, workers=2, timeout=150, args=(transport,))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("metrics, uneven", 1),
        ("adam, clipped", 1),
        # Statistics forward, their gradients backward, and the gradients.
        ("global BatchNormalization", 3),
        ("local BatchNormalization", 1),
    ],
)
@pytest.mark.parametrize(
    ("transport", "operation"),
    [("direct", "PyFunc"), ("tensorflow", "CollectiveReduceV2")],
)
def test_number_of_sums(model, expected, transport, operation):
    for rank, found in enumerate(results(transport)):
        assert found[model] == [operation] * expected, f"rank {rank}"


@pytest.mark.parametrize(
    ("transport", "operation"), daily([("direct", "PyFunc"), ("tensorflow", "CollectiveGatherV2")], "direct")
)
def test_slices(transport, operation):
    """The gradient of a table: which operation; whether it is right, the feature table tells."""
    for found in results(transport):
        assert operation in found["embedding"]


@pytest.mark.parametrize("transport", ["direct", pytest.param("tensorflow", marks=pytest.mark.nightly)])
def test_the_first_bucket_is_sent_before_the_last_gradient_exists(transport):
    for found in results(transport):
        layers = ["dense0", "dense1", "dense2", "dense3"]
        assert found["buckets"] == [" ".join(layers[-n:]) for n in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("transport", "operation"), daily([("direct", "PyFunc"), ("tensorflow", "CollectiveAllToAllV2")], "direct")
)
def test_own_rows(transport, operation):
    for rank, found in enumerate(results(transport)):
        kinds, *parts = found["own rows"]
        assert kinds == [operation] * 3
        for part, size, tolerance in zip(parts, [60_000, 40, 40], [0, 0, 2.0**-7], strict=True):
            own = np.arange(size / 2)[:, None] + rank * size / 2
            np.testing.assert_allclose(part, own * [[2.0, 21.0]], rtol=tolerance)
