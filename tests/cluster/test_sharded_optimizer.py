"""`ShardedOptimizer` on two processes: trains as the optimizer inside, saves whole slots, sends one vector more."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cluster.attempt import attempt, error_of, found_on
from tests.cluster.file_checks import built, gap
from tests.cluster.test_communication import _closure
from tests.features.table import mlp, rows
from tfdist.testing import run_local

pytestmark = pytest.mark.cluster
DEADLINE = 240


def _optimizers() -> dict[str, Any]:
    import keras

    return {
        "Adam": lambda: keras.optimizers.Adam(0.01),
        "clipped": lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.05),
        "EMA": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.8),
        "accumulation": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    }


def _model(strategy: Any, name: str, wrap: Any, **arguments: Any) -> Any:
    make = _optimizers()[name]
    return built(strategy, mlp(optimizer=lambda: wrap(make()), **arguments))


def _train(model: Any, epochs: int = 1, **arguments: Any) -> Any:
    x, y = rows(90)
    model.fit(x, y, batch_size=16, epochs=epochs, shuffle=False, verbose=0, **arguments)
    return model


def equal(strategy: Any) -> dict[str, float]:
    """The largest difference of weights to those of the optimizer inside, and of slots, by optimizer."""
    from tfdist.optimizers import ShardedOptimizer

    found = {}
    for name in _optimizers():
        sharded, whole = (_train(_model(strategy, name, wrap), 2) for wrap in (ShardedOptimizer, lambda inner: inner))
        found[name] = gap(sharded.get_weights(), whole.get_weights())
        both = zip(sharded.optimizer.variables, whole.optimizer.variables, strict=True)
        found[f"slots of {name}"] = max(float(np.abs(one.numpy() - np.array(two.numpy())).max()) for one, two in both)
    return found


def loss_scaling(strategy: Any) -> float:
    import keras

    from tfdist.optimizers import ShardedOptimizer

    def scaled(wrap: Any) -> Any:
        return lambda inner: keras.optimizers.LossScaleOptimizer(wrap(inner))

    wraps = (scaled(ShardedOptimizer), lambda inner: inner)
    return gap(*(_train(_model(strategy, "Adam", wrap)).get_weights() for wrap in wraps))


def local_bytes(strategy: Any) -> list[int]:
    """Bytes that the slots take in this process, with this optimizer and without."""
    from tfdist.optimizers import ShardedOptimizer
    from tfdist.strategies.replica_values import parts_of_variable

    model = _model(strategy, "Adam", ShardedOptimizer)
    model.optimizer.build(model.trainable_variables)
    slots = model.optimizer._slots
    parts = [part for kind in slots._shards.values() for shards in kind for part in parts_of_variable(shards)]
    return [sum(part.shape.num_elements() * 4 for part in parts), 2 * sum(4 * w.size for w in model.get_weights())]


def collectives(strategy: Any) -> list[str]:
    from tfdist.optimizers import ShardedOptimizer

    model = _model(strategy, "Adam", ShardedOptimizer)
    model.make_train_function()
    traced = _closure(model.train_function, "multi_step_on_iterator")
    _train(model)
    graphs = [function.graph.as_graph_def() for function in traced._list_all_concrete_functions()]
    nodes = [n for g in graphs for n in [*g.node, *(n for f in g.library.function for n in f.node_def)]]
    return sorted({(node.op, node.name) for node in nodes if node.op.startswith("Collective")})


def files(strategy: Any, folder: Path) -> dict[str, Any]:
    """Saves after a fit, and in the middle of one; goes on from the file in this process, alone and together."""
    import keras

    import tfdist
    from tfdist.optimizers import ShardedOptimizer

    found: dict[str, Any] = {}
    model = _train(_model(strategy, "Adam", ShardedOptimizer))
    model.save(folder / "model.keras")
    with strategy.scope():
        together = keras.models.load_model(folder / "model.keras")
    alone = keras.models.load_model(folder / "model.keras")
    slots = [variable.numpy() for variable in model.optimizer.variables]
    found["slots alone"] = gap(slots, [np.array(variable.numpy()) for variable in alone.optimizer.variables])
    _train(model)
    found["on together"] = gap(model.get_weights(), _train(together).get_weights())
    found["on alone"] = gap(model.get_weights(), _train(alone).get_weights())
    model.train_on_batch(*rows(16))
    if strategy.is_chief:
        found["alone in the middle"] = error_of(model.optimizer.variables[2].numpy)
    model.optimizer.collect()
    found["collected"] = list(model.optimizer.variables[2].numpy().shape)

    stops = False

    def stop(epoch: int, logs: object) -> None:
        if epoch == 2 and stops:
            raise InterruptedError

    def fit(name: str) -> Any:
        callbacks = [
            tfdist.callbacks.BackupAndRestore(folder / name),
            keras.callbacks.LambdaCallback(on_epoch_begin=stop),
        ]
        return _train(_model(strategy, "Adam", ShardedOptimizer), 3, callbacks=callbacks)

    whole = fit("whole")
    stops = True
    found["interrupted"] = error_of(fit, "stopped")[0]
    stops = False
    found["resumed"] = gap(whole.get_weights(), fit("stopped").get_weights())
    return found


@functools.cache
def results() -> list[dict[str, Any]]:
    def run(folder: str) -> dict[str, Any]:
        import tfdist

        strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout=60, peer_timeout=60)
        seen = {f.__name__: attempt(f.__name__, f, strategy) for f in (equal, loss_scaling, local_bytes, collectives)}
        return {**seen, "files": attempt("files", files, strategy, Path(folder))}

    with tempfile.TemporaryDirectory(prefix="tfdist-sharded-") as folder:
        return run_local(run, workers=2, args=(folder,), timeout=DEADLINE)


@pytest.mark.timeout(DEADLINE + 30)
class TestTwoProcesses:
    @pytest.mark.parametrize("name", ["Adam", "clipped", "EMA", "accumulation"])
    def test_equals_the_optimizer_inside(self, rank, name):
        found = found_on(results(), rank, "equal")
        assert found[name] < 1e-6
        assert found[f"slots of {name}"] < 1e-6

    def test_loss_scaling(self, rank):
        assert found_on(results(), rank, "loss_scaling") < 1e-6

    def test_bytes(self, rank):
        sharded, whole = found_on(results(), rank, "local_bytes")
        assert sharded < 0.6 * whole

    def test_one_collective_more(self, rank):
        assert [kind for kind, _ in found_on(results(), rank, "collectives")] == [
            "CollectiveGatherV2",
            "CollectiveReduceV2",
        ]

    def test_files(self, rank):
        found = found_on(results(), rank, "files")
        assert found["slots alone"] == 0
        assert max(found["on together"], found["on alone"]) < 1e-6
        assert found["collected"] == [8, 16]

    def test_slots_are_not_read_without_the_others(self):
        kind, text = found_on(results(), 0, "files")["alone in the middle"]
        assert kind == "RuntimeError"
        assert "Expected: `model.optimizer.collect()` on every process" in text

    def test_backup_and_restore(self, rank):
        found = found_on(results(), rank, "files")
        assert found["interrupted"] == "InterruptedError"
        assert found["resumed"] < 1e-6
