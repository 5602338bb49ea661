"""Of an embedding only the rows of a batch travel: no function of a worker has a tensor of the table's size."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.logical.embedding_models import _graphs
from tests.parameter_server.sections import found, largest, run_sections
from tfdist.testing import run_local

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(210)]

_DEADLINE = 180
TABLE, WIDTH, IDS = 20_011, 16, 4
SECTIONS = (
    *("async plain Adagrad", "async sharded LazyAdam", "sync plain LazyAdam", "sync sharded Adagrad"),
    *("async plain Adam", "sync sharded Adam"),
    *("async equal", "sync equal"),
)


def embedding_model(layer: Any, optimizer: Any) -> Any:
    import keras

    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [keras.Input((IDS,), dtype="int32"), layer(), keras.layers.Flatten(), keras.layers.Dense(1)]
    )
    model.compile(optimizer(), "mse")
    return model


def used_tables(graph: Any, rows: int) -> set[str]:
    """Types of the operations with a tensor of so many rows that another one takes.

    Keras asks for the shape of a table; TensorFlow knows it without the reading that nobody takes.
    """
    return {
        operation.type
        for part in _graphs(graph)
        for operation in part.get_operations()
        for tensor in operation.outputs
        if tensor.shape.rank and tensor.shape[0] == rows and (tensor.consumers() or part is not graph)
    }


def embeddings() -> dict[str, Any]:
    """In the chief: what the workers' functions do with tables, and sharded tables."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist

    asynchronous = tfdist.ParameterServerStrategy(max_inflight=1, start_timeout=120)
    synchronous = tfdist.ParameterServerStrategy(mode="sync", start_timeout=120)
    random = np.random.default_rng(0)
    ids, targets = random.integers(0, TABLE, (96, IDS)).astype("int32"), random.normal(size=(96, 1)).astype("float32")

    def plain() -> Any:
        return keras.layers.Embedding(TABLE, WIDTH)

    def sharded() -> Any:
        return tfdist.layers.ShardedEmbedding(TABLE, WIDTH)

    def operations(strategy: Any, layer: Any, optimizer: Any) -> dict[str, list[str]]:
        with strategy.scope():
            model = embedding_model(layer, optimizer)
        model.fit(ids, targets, batch_size=32, verbose=0)
        model.evaluate(ids, targets, batch_size=32, verbose=0)
        model.predict(ids, batch_size=32, verbose=0)
        step = model.train_function._step
        applied = getattr(step, "_apply_functions", {}).values()  # in synchronous training
        graphs = {
            "train": [*(t.function.graph for t in step._traces.values()), *(f.graph for f in applied)],
            "test": [t.function.graph for t in model.test_function._step._traces.values()],
            "predict": [function.graph for function, _ in model.predict_function._functions.values()],
        }
        rows = {TABLE, -(-TABLE // 2), TABLE // 2}
        return {
            name: sorted({kind for graph in of for size in rows for kind in used_tables(graph, size)})
            for name, of in graphs.items()
        } | {"graphs": [len(of) for of in graphs.values()]}

    optimizers = {
        "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
        "LazyAdam": lambda: tfdist.optimizers.LazyAdam(0.01),
        "Adam": lambda: keras.optimizers.Adam(0.01),
    }

    def against_plain(name: str, **mode: Any) -> dict[str, Any]:
        """A sharded table on parameter servers that hold nothing yet, and Keras' own in one process."""
        found = []
        for layer, strategy in (
            (plain, tf.distribute.get_strategy()),
            (sharded, tfdist.ParameterServerStrategy(start_timeout=120, **mode)),
        ):
            with strategy.scope():
                model = embedding_model(layer, optimizers[name])
            history = model.fit(ids, targets, batch_size=20, epochs=3, verbose=0, shuffle=False).history
            values = [weight for layer in model.layers for weight in layer.get_weights()]
            found.append([*values, history["loss"], model.predict(ids, verbose=0)])
        return {"gap": largest(*found), "places": [variable.value.device for variable in model.layers[0].weights]}

    sections = {
        f"{mode} {kind} {name}": functools.partial(operations, strategy, layer, optimizer)
        for name, optimizer in optimizers.items()
        for mode, strategy in (("async", asynchronous), ("sync", synchronous))
        for kind, layer in (("plain", plain), ("sharded", sharded))
    }
    sections["async equal"] = functools.partial(against_plain, "Adagrad", max_inflight=1)
    sections["sync equal"] = functools.partial(against_plain, "Adam", mode="sync")
    return run_sections({name: sections[name] for name in SECTIONS})


@functools.cache
def results() -> dict[str, Any]:
    return run_local(embeddings, workers=2, ps=2, timeout=_DEADLINE)[0]


@pytest.mark.parametrize("name", SECTIONS[:4])
def test_no_function_has_a_tensor_of_the_tables_size(name):
    outcome = found(results(), name)
    assert min(outcome["graphs"]) >= 1
    assert outcome["train"] == outcome["test"] == outcome["predict"] == []


@pytest.mark.parametrize("name", SECTIONS[4:6])
def test_adam_of_keras_changes_every_row(name):
    """What finds no such tensor above would find one here."""
    outcome = found(results(), name)
    assert "ReadVariableOp" in outcome["train"] and "Mul" in outcome["train"]
    assert outcome["test"] == outcome["predict"] == []


@pytest.mark.parametrize("name", SECTIONS[6:])
def test_a_sharded_table_is_that_of_keras(name):
    outcome = found(results(), name)
    assert outcome["gap"] <= 1e-6
    assert outcome["places"] == [f"/job:ps/replica:0/task:{index}/device:CPU:0" for index in range(2)]
