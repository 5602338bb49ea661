"""Of an embedding only the rows of a batch travel: by the functions that workers run, and by the bytes on the wire."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.logical.embedding_models import _graphs
from tests.parameter_server.sections import found, run_sections
from tfdist.testing import run_local

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(210)]

_DEADLINE = 180
_SOURCE = Path(__file__).parents[2]
TABLE, WIDTH, IDS = 20_011, 16, 4
_MEGABYTE = 2**20


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

    import tfdist
    from tests.parameter_server.models import gaps
    from tests.parameter_server.sections import largest

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
            "predict": [f.concrete.graph for f in model.predict_function._functions.values()],
        }
        rows = {TABLE, -(-TABLE // 2), TABLE // 2}
        return {
            name: sorted({kind for graph in of for size in rows for kind in used_tables(graph, size)})
            for name, of in graphs.items()
        } | {"graphs": [len(of) for of in graphs.values()]}

    optimizers: dict[str, Callable[[], Any]] = {
        "SGD": lambda: keras.optimizers.SGD(0.1),
        "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
        "LazyAdam": lambda: tfdist.optimizers.LazyAdam(0.01),
        "Adam": lambda: keras.optimizers.Adam(0.01),
    }
    sections: dict[str, Callable[[], Any]] = {}
    for name, optimizer in optimizers.items():
        for mode, strategy in (("async", asynchronous), ("sync", synchronous)):
            for kind, layer in (("plain", plain), ("sharded", sharded)):
                sections[f"{mode} {kind} {name}"] = functools.partial(operations, strategy, layer, optimizer)

    def against_plain(name: str, **mode: Any) -> dict[str, Any]:
        """A sharded table on parameter servers that hold nothing yet, and Keras' own in one process."""
        strategy = tfdist.ParameterServerStrategy(start_timeout=120, **mode)

        def weights(layer: Any, scope: Any) -> tuple[list, list[str]]:
            with scope:
                model = embedding_model(layer, optimizers[name])
            history = model.fit(ids, targets, batch_size=20, epochs=3, verbose=0, shuffle=False).history
            places = [variable.value.device for variable in model.layers[0].weights]
            values = [weight for layer in model.layers for weight in layer.get_weights()]
            return [*values, history["loss"], model.predict(ids, verbose=0)], places

        import tensorflow as tf

        expected, _ = weights(plain, tf.distribute.get_strategy().scope())
        received, places = weights(sharded, strategy.scope())
        return {"gap": largest(expected, received), "places": places}

    for name in ("SGD", "Adagrad", "Adam"):
        sections[f"async equal {name}"] = functools.partial(against_plain, name, max_inflight=1)
        sections[f"sync equal {name}"] = functools.partial(against_plain, name, mode="sync")
    sections["plain equal"] = lambda: gaps(
        asynchronous, lambda: embedding_model(plain, optimizers["Adagrad"]), ids, targets
    )
    return run_sections(sections)


@functools.cache
def results() -> dict[str, Any]:
    (outcome,) = run_local(embeddings, workers=2, ps=2, timeout=_DEADLINE)
    return outcome


def of_all(*kinds: str, last: tuple[str, ...]) -> list[str]:
    """The names of sections."""
    return [f"{mode} {kind} {name}" for mode in ("async", "sync") for kind in kinds for name in last]


@pytest.mark.parametrize("name", of_all("plain", "sharded", last=("SGD", "Adagrad", "LazyAdam")))
def test_no_function_has_a_tensor_of_the_tables_size(name):
    outcome = found(results(), name)
    assert min(outcome["graphs"]) >= 1
    assert outcome["train"] == outcome["test"] == outcome["predict"] == []


@pytest.mark.parametrize("name", of_all("plain", "sharded", last=("Adam",)))
def test_adam_of_keras_changes_every_row(name):
    """What finds no such tensor above would find one here."""
    outcome = found(results(), name)
    assert "ReadVariableOp" in outcome["train"] and "Mul" in outcome["train"]
    assert outcome["test"] == outcome["predict"] == []


@pytest.mark.parametrize("name", of_all("equal", last=("SGD", "Adagrad", "Adam")))
def test_a_sharded_table_is_that_of_keras(name):
    outcome = found(results(), name)
    assert outcome["gap"] <= 1e-6
    assert outcome["places"] == [f"/job:ps/replica:0/task:{index}/device:CPU:0" for index in range(2)]


# --- Bytes ------------------------------------------------------------------------------------------------------------


def loopback_bytes() -> int:
    """What this network namespace has sent over its loopback device."""
    (line,) = (line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.partition(":")[2].split()[8])


def bytes_of_steps() -> dict[str, float]:
    """In the chief: megabytes of a step, for each table and optimizer."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist

    strategy = tfdist.ParameterServerStrategy(max_inflight=1, start_timeout=120)

    class Whole(keras.layers.Embedding):
        """Reads its table as a whole."""

        def call(self, ids: Any) -> Any:
            return tf.gather(tf.math.sin(self.embeddings.value), ids)

    random = np.random.default_rng(0)
    ids = random.integers(0, 1000, (320, IDS)).astype("int32")
    targets = random.normal(size=(320, 1)).astype("float32")
    optimizers = {"SGD": keras.optimizers.SGD, "Adagrad": keras.optimizers.Adagrad, "Adam": keras.optimizers.Adam}
    kinds = {name: (keras.layers.Embedding, optimizer) for name, optimizer in optimizers.items()}
    seen = {}
    for rows in (1000, 100_000):
        for name, (layer, optimizer) in {**kinds, "whole": (Whole, keras.optimizers.SGD)}.items():
            with strategy.scope():
                model = embedding_model(lambda layer=layer, rows=rows: layer(rows, WIDTH), optimizer)
            model.fit(ids, targets, batch_size=32, verbose=0)
            before = loopback_bytes()
            model.fit(ids, targets, batch_size=32, verbose=0)
            seen[f"{name} {rows}"] = (loopback_bytes() - before) / 10 / _MEGABYTE
    return seen


def main() -> None:
    """In a network namespace of its own: nothing else sends over its loopback device."""
    (seen,) = run_local(bytes_of_steps, workers=1, ps=1, timeout=150)
    print(json.dumps(seen))


@functools.cache
def megabytes() -> dict[str, float]:
    script = "ip link set lo up && exec $0 -m tests.parameter_server.test_embedding_traffic"
    process = subprocess.run(
        ["unshare", "--net", "sh", "-c", script, sys.executable],
        cwd=_SOURCE,
        env={**os.environ, "PYTHONPATH": str(_SOURCE)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.netns
# Adam changes every row, but where it is.
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam"])
def test_bytes_of_a_step_do_not_grow_with_the_table(name):
    # The larger table has 6.1 MiB.
    seen = megabytes()
    assert seen[f"{name} 100000"] < 0.5
    assert seen[f"{name} 100000"] < 1.5 * seen[f"{name} 1000"]


@pytest.mark.netns
def test_what_reads_the_table_is_seen():
    """The counter above would count it."""
    assert megabytes()["whole 100000"] > 6.0


if __name__ == "__main__":
    main()
