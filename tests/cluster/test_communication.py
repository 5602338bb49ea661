"""What a training step sends: one sum, whatever the model, its metrics and the end of its data."""

from __future__ import annotations

import functools

import pytest

from tfdist.testing import run_local

pytestmark = pytest.mark.cluster


def sums(transport: str) -> dict[str, list[str]]:
    """Runs on every process: the sums over processes in the traced train functions of several models."""
    import keras
    import tensorflow as tf
    from keras import layers

    import tfdist
    from tests.features.table import batches, mlp, rows

    def of_train_step(strategy: tf.distribute.Strategy, build: object, data: object = None) -> list[str]:
        with strategy.scope():
            model = build()
        model.make_train_function()
        traced = _closure(model.train_function, "multi_step_on_iterator")
        model.fit(batches(*rows()) if data is None else data, verbose=0, epochs=1)
        (function,) = traced._list_all_concrete_functions()
        graph = function.graph.as_graph_def()
        nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
        return sorted(node.op for node in nodes if node.op.startswith(("Collective", "PyFunc")))

    plain = tfdist.MultiWorkerMirroredStrategy(transport=transport, start_timeout=60)
    found = {
        "metrics": of_train_step(plain, lambda: mlp(metrics=["accuracy", keras.metrics.AUC()])()),
        "uneven": of_train_step(plain, mlp(), batches(*rows(81))),
        "adam, clipped": of_train_step(plain, mlp(optimizer=lambda: keras.optimizers.Adam(clipnorm=1.0))),
        "global BatchNormalization": of_train_step(plain, mlp(layers.BatchNormalization)),
    }
    local = tfdist.MultiWorkerMirroredStrategy(batch_norm="local", transport=transport)
    found["local BatchNormalization"] = of_train_step(local, mlp(layers.BatchNormalization))
    return found


def _closure(function: object, name: str) -> object:
    cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
    return cells[name].cell_contents


@functools.cache
def results(transport: str) -> list[dict[str, list[str]]]:
    return run_local(sums, workers=2, timeout=150, args=(transport,))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("metrics", 1),
        ("uneven", 1),
        ("adam, clipped", 1),
        # Statistics forward, their gradients backward, and the gradients.
        ("global BatchNormalization", 3),
        ("local BatchNormalization", 1),
    ],
)
@pytest.mark.parametrize(("transport", "operation"), [("direct", "PyFunc"), ("tensorflow", "CollectiveReduceV2")])
def test_number_of_sums(model, expected, transport, operation):
    for rank, found in enumerate(results(transport)):
        assert found[model] == [operation] * expected, f"rank {rank}"
