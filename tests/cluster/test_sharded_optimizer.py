"""`ShardedOptimizer` on two processes: trains as the optimizer inside, saves whole slots, sends one vector more."""

from __future__ import annotations

import functools
import io
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pytest

from tests.cluster.attempt import attempt, error_of, found_on
from tests.cluster.file_checks import built, gap
from tests.cluster.test_communication import _closure
from tests.cluster.writes import Writes
from tests.features.table import mlp, rows
from tfdist.testing import run_local

pytestmark = [pytest.mark.cluster, pytest.mark.exhaustive]
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
    from tfdist.inspection.replica_values import parts_of_variable
    from tfdist.optimizers import ShardedOptimizer

    model = _model(strategy, "Adam", ShardedOptimizer)
    model.optimizer.build(model.trainable_variables)
    slots = model.optimizer._slots
    parts = [part for kind in slots._shards.values() for shards in kind for part in parts_of_variable(shards)]
    return [sum(part.shape.num_elements() * 4 for part in parts), 2 * sum(4 * w.size for w in model.get_weights())]


def collectives(_: Any) -> list[str]:
    """Those of TensorFlow, by which all travels with this transport."""
    import tfdist
    from tfdist.optimizers import ShardedOptimizer

    strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout=60, transport="tensorflow")
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

    folder.mkdir(exist_ok=True)
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


def _slots_in(path: Path) -> list[np.ndarray]:
    """What a file holds of the optimizer."""
    file = zipfile.ZipFile(path).read("model.weights.h5") if path.suffix == ".keras" else path.read_bytes()
    with h5py.File(io.BytesIO(file), "r") as content:
        if "optimizer_weights" in content:
            group = content["optimizer_weights"]
            return [group[name][()] for name in group.attrs["weight_names"]]
        group = content["optimizer/vars"]
        return [group[name][()] for name in sorted(group, key=int)]


def _checkpoints(folder: Path) -> list[Any]:
    import keras

    checkpoint = keras.callbacks.ModelCheckpoint
    best = {"monitor": "loss", "save_best_only": True}
    return [
        # A learning rate of 0 after the first epoch would make "best" arbitrary; this one overshoots in the second.
        keras.callbacks.LearningRateScheduler(lambda epoch: [0.01, 5.0, 0.01][epoch]),
        checkpoint(folder / "epoch-{epoch}.keras"),
        checkpoint(folder / "step-{epoch}-{batch}.keras", save_freq=2),
        checkpoint(folder / "best.keras", **best),
        # The first epoch is too early for a second one: Keras does not know yet which way is better.
        checkpoint(folder / "best-{epoch}-{batch}.weights.h5", save_freq=4, save_weights_only=True, **best),
        checkpoint(folder / "weights-{epoch}.weights.h5", save_weights_only=True),
        keras.callbacks.BackupAndRestore(folder / "backup", save_freq=5, delete_checkpoint=False),
    ]


def checkpoints(strategy: Any, folder: Path) -> dict[str, Any]:
    """Saves in the middle of a fit, with the slots split and whole; returns which files, and their differences."""
    import keras

    from tfdist.optimizers import ShardedOptimizer

    folder.mkdir(exist_ok=True)
    noted, found = Writes(str(folder)), {}
    wraps = {"split": ShardedOptimizer, "whole": lambda inner: inner}
    scale = keras.optimizers.LossScaleOptimizer
    models = {}
    for name, wrap in wraps.items():
        (folder / name).mkdir(exist_ok=True)
        models[name] = _train(_model(strategy, "Adam", wrap), 3, callbacks=_checkpoints(folder / name))
        scaling = keras.callbacks.ModelCheckpoint(folder / name / "scaled.keras", save_freq=4)
        _train(_model(strategy, "Adam", lambda inner, wrap=wrap: scale(wrap(inner))), callbacks=[scaling])
    unsaved = _train(_model(strategy, "Adam", ShardedOptimizer), 3, callbacks=_checkpoints(folder)[:1])
    found["written"] = noted.paths
    found["training"] = gap(models["split"].get_weights(), unsaved.get_weights())
    found["files"] = {name: sorted(p.name for p in (folder / name).rglob("*.*")) for name in wraps}
    found["gaps"] = {}
    for path in (p for p in (folder / "split").rglob("*.*") if p.suffix != ".json"):
        split, whole = (_slots_in(folder / name / path.relative_to(folder / "split")) for name in wraps)
        found["gaps"][path.name] = max(float(np.abs(a - b).max()) for a, b in zip(split, whole, strict=True))
    first, last = (_slots_in(folder / "split" / f"epoch-{epoch}.keras") for epoch in (1, 3))
    found["slots change by"] = gap(first[2:], last[2:])
    return found


def saving(strategy: Any, folder: Path) -> dict[str, Any]:
    """Saves the model by code of one's own: on all processes, and on the chief alone."""
    import keras

    from tfdist.optimizers import ShardedOptimizer
    from tfdist.strategies import job_hooks

    folder.mkdir(exist_ok=True)
    found: dict[str, Any] = {}
    model = _model(strategy, "Adam", ShardedOptimizer)
    own = folder / f"of-rank-{strategy._peers.rank}.keras"

    def save(epoch: int, logs: object) -> None:
        for name in ("all.keras", "all.weights.h5", "all.h5", own.name):
            model.save_weights(folder / name) if "weights" in name else model.save(folder / name)

    _train(model, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=save)])
    whole = _train(_model(strategy, "Adam", lambda inner: inner))
    expected = [np.array(variable.numpy()) for variable in whole.optimizer.variables]
    for name in ("all.keras", "all.weights.h5", "all.h5", own.name):
        found[name] = gap(expected, _slots_in(folder / name))
    found["all.h5 loaded"] = gap(model.get_weights(), keras.models.load_model(folder / "all.h5").get_weights())

    began = time.monotonic()
    if strategy.is_chief:
        model.save(folder / "chief.keras")
        found["alone after fit"] = gap(expected, _slots_in(folder / "chief.keras"))
    found["seconds alone"] = time.monotonic() - began
    strategy._chief_io.catch_up("go on")

    model.train_on_batch(*rows(16))
    if strategy.is_chief:
        keras.saving.save_model(model, folder / "without.h5", include_optimizer=False)
        model.export(folder / "export", verbose=False)
        found["without the optimizer"] = sorted(p.name for p in folder.iterdir() if p.stem in ("without", "export"))
    strategy._chief_io.catch_up("go on")
    with mock.patch.object(job_hooks, "collect_slots", lambda model: None):
        found["if nothing were collected"] = error_of(model.save, folder / "nothing.keras")
    # The last one: whoever has waited for the others in vain does not go on with them.
    with mock.patch.object(strategy._peers, "timeout", 2.0):
        if strategy.is_chief:
            found["alone after a step"] = error_of(model.save, folder / "alone.keras")
    return found


@functools.cache
def results() -> list[dict[str, Any]]:
    """What the checks find on each rank."""

    def run(folder: str) -> dict[str, Any]:
        import tfdist

        strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout=60, peer_timeout=60)
        seen = {f.__name__: attempt(f.__name__, f, strategy) for f in (equal, loss_scaling, collectives, local_bytes)}
        return seen | {
            f.__name__: attempt(f.__name__, f, strategy, Path(folder) / f.__name__)
            for f in (files, checkpoints, saving)
        }

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

    def test_checkpoints_in_the_middle_of_a_fit(self, rank):
        found = found_on(results(), rank, "checkpoints")
        assert found["files"]["split"] == found["files"]["whole"]
        names = [f"epoch-{n}.keras" for n in (1, 2, 3)] + [f"weights-{n}.weights.h5" for n in (1, 2, 3)]
        names += [f"step-{n}-{m}.keras" for n in (1, 2, 3) for m in (2, 4, 6)] + ["best.keras", "scaled.keras"]
        assert {*names, "latest.weights.h5"} <= {*found["files"]["split"]}
        # The best so far, which each process would find in other batches.
        assert 0 < sum(name.startswith("best-") for name in found["files"]["split"]) < 4
        assert max(found["gaps"].values()) < 1e-6
        assert found["slots change by"] > 1e-3
        assert found["training"] == 0

    def test_the_chief_alone_writes_checkpoints(self):
        chief, other = (found_on(results(), rank, "checkpoints") for rank in (0, 1))
        assert {Path(path).name for path in chief["written"]} == {*chief["files"]["split"]}
        assert other["written"] == []

    def test_saving_on_all_processes(self, rank):
        found = found_on(results(), rank, "saving")
        assert max(found[name] for name in ("all.keras", "all.weights.h5", "all.h5", f"of-rank-{rank}.keras")) < 1e-6
        assert found["all.h5 loaded"] == 0

    def test_saving_on_the_chief_alone(self):
        found = found_on(results(), 0, "saving")
        assert found["alone after fit"] < 1e-6
        assert found["seconds alone"] < 10
        assert found["without the optimizer"] == ["export", "without.h5"]
        assert found["if nothing were collected"][0] == "RuntimeError"
        kind, text = found["alone after a step"]
        # The other one may have come to its end by then.
        assert kind in ("PeerTimeoutError", "ProcessGoneError")
        assert "save the model, too (each process has a part of the slots" in text
