"""`ShardedOptimizer` on two processes: trains as the optimizer inside, and saves whole slots."""

from __future__ import annotations

import contextlib
import functools
import io
import tempfile
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import keras
import numpy as np
import pytest

import tfdist
from tests.cluster.attempt import attempt, error_of, found_on
from tests.cluster.file_checks import built, gap
from tests.cluster.writes import Writes
from tests.features.table import mlp, rows
from tfdist.optimizers import ShardedOptimizer
from tfdist.testing import run_local

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]
DEADLINE = 420
OPTIMIZERS = {
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "clipped": lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.05),
    "accumulation": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
}


def _whole(inner: Any) -> Any:
    """In place of `ShardedOptimizer`."""
    return inner


def _model(strategy: Any, wrap: Any = ShardedOptimizer, name: str = "Adam") -> Any:
    return built(strategy, mlp(optimizer=lambda: wrap(OPTIMIZERS[name]())))


def _train(model: Any, epochs: int = 1, **arguments: Any) -> Any:
    x, y = rows(90)
    model.fit(x, y, batch_size=16, epochs=epochs, shuffle=False, verbose=0, **arguments)
    return model


def _slots(model: Any) -> list[np.ndarray]:
    return [np.array(variable.numpy()) for variable in model.optimizer.variables]


def _slots_in(path: Path) -> list[np.ndarray]:
    """What a file holds of the optimizer."""
    file = zipfile.ZipFile(path).read("model.weights.h5") if path.suffix == ".keras" else path.read_bytes()
    with h5py.File(io.BytesIO(file), "r") as content:
        if "optimizer_weights" in content:
            group = content["optimizer_weights"]
            return [group[name][()] for name in group.attrs["weight_names"]]
        group = content["optimizer/vars"]
        return [group[name][()] for name in sorted(group, key=int)]


def equals_the_optimizer_inside(strategy: Any, folder: Path) -> None:
    for name in OPTIMIZERS:
        sharded, whole = (_train(_model(strategy, wrap, name), 2) for wrap in (ShardedOptimizer, _whole))
        assert gap(sharded.get_weights(), whole.get_weights()) < 1e-6, name
        assert gap(_slots(sharded), _slots(whole)) < 1e-6, name
    scaled = _model(strategy, lambda inner: keras.optimizers.LossScaleOptimizer(ShardedOptimizer(inner)))
    assert gap(_train(scaled).get_weights(), _train(_model(strategy, _whole)).get_weights()) < 1e-6


def sends_as_much_as_the_optimizer_inside(strategy: Any, folder: Path) -> None:
    exchange = strategy.extended._cross_device_ops._exchange
    # Of what one of two processes has: the sums of half of it, and those of the other process; or only the first.
    shares = {"all_reduce_each": 1.0, "reduce_scatter": 0.5, "all_gather": 1.0}

    def sent(wrap: Any) -> dict[str, float]:
        found = dict.fromkeys(shares, 0.0)

        def counting(name: str) -> Any:
            original = getattr(exchange, name)

            def call(values: Any, *args: Any, **kwargs: Any) -> Any:
                found[name] += shares[name] * sum(np.asarray(value).nbytes for value in values)
                return original(values, *args, **kwargs)

            return mock.patch.object(exchange, name, call)

        with strategy.scope():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2000, "relu"), keras.layers.Dense(1)])
            model.compile(wrap(keras.optimizers.Adam()), "mse")
        with contextlib.ExitStack() as stack:
            for name in shares:
                stack.enter_context(counting(name))
            model.fit(np.ones((48, 8)), np.ones((48, 1)), batch_size=16, verbose=0)
        return found

    sharded, whole = sent(ShardedOptimizer), sent(_whole)
    weights = 3 * 4 * 20_001  # of three steps
    assert whole["reduce_scatter"] == 0
    assert whole["all_reduce_each"] == pytest.approx(weights, rel=0.02)
    assert sharded["reduce_scatter"] == pytest.approx(weights / 2, rel=0.02)
    # The slots are collected once, when the fit ends.
    assert sharded["all_gather"] == pytest.approx(weights / 2, rel=0.02)
    assert sharded["all_reduce_each"] < 0.02 * weights


def goes_on_from_files(strategy: Any, folder: Path) -> None:
    """After a fit, in this process alone and together; and from a backup."""
    model = _train(_model(strategy))
    model.save(folder / "model.keras")
    with strategy.scope():
        together = keras.models.load_model(folder / "model.keras")
    alone = keras.models.load_model(folder / "model.keras")
    assert gap(_slots(model), _slots(alone)) == 0
    _train(model)
    for other in (together, alone):
        assert gap(model.get_weights(), _train(other).get_weights()) < 1e-6
    model.train_on_batch(*rows(16))
    if strategy.is_chief:
        kind, text = error_of(model.optimizer.variables[2].numpy)
        assert kind == "RuntimeError" and "Expected: `model.optimizer.collect()` on every process" in text
    model.optimizer.collect()
    assert model.optimizer.variables[2].numpy().shape == (8, 16)

    def stop(epoch: int, logs: object) -> None:
        if epoch == 2:
            raise InterruptedError

    def fit(name: str, *more: Any) -> Any:
        return _train(_model(strategy), 3, callbacks=[tfdist.callbacks.BackupAndRestore(folder / name), *more])

    with pytest.raises(InterruptedError):
        fit("stopped", keras.callbacks.LambdaCallback(on_epoch_begin=stop))
    assert gap(fit("whole").get_weights(), fit("stopped").get_weights()) < 1e-6


def _checkpoints(folder: Path) -> list[Any]:
    checkpoint = keras.callbacks.ModelCheckpoint
    return [
        # A learning rate of 0 after the first epoch would make "best" arbitrary; this one overshoots in the second.
        keras.callbacks.LearningRateScheduler(lambda epoch: [0.01, 5.0, 0.01][epoch]),
        checkpoint(folder / "step-{epoch}-{batch}.keras", save_freq=2),
        checkpoint(folder / "best.keras", monitor="loss", save_best_only=True),
        checkpoint(folder / "weights-{epoch}.weights.h5", save_weights_only=True),
        keras.callbacks.BackupAndRestore(folder / "backup", save_freq=5, delete_checkpoint=False),
    ]


def saves_in_the_middle_of_a_fit(strategy: Any, folder: Path) -> None:
    """With the slots split and whole."""
    noted, models = Writes(str(folder)), {}
    for name, wrap in {"split": ShardedOptimizer, "whole": _whole}.items():
        (folder / name).mkdir(exist_ok=True)
        models[name] = _train(_model(strategy, wrap), 3, callbacks=_checkpoints(folder / name))
    unsaved = _train(_model(strategy), 3, callbacks=_checkpoints(folder)[:1])
    assert gap(models["split"].get_weights(), unsaved.get_weights()) == 0
    split, whole = ({p.relative_to(folder / name) for p in (folder / name).rglob("*.*")} for name in models)
    assert split == whole
    names = [f"step-{n}-{m}.keras" for n in (1, 2, 3) for m in (2, 4, 6)]
    names += [*(f"weights-{n}.weights.h5" for n in (1, 2, 3)), "best.keras", "latest.weights.h5"]
    assert {*names} <= {path.name for path in split}
    for path in split:
        if path.suffix != ".json":
            assert gap(_slots_in(folder / "split" / path), _slots_in(folder / "whole" / path)) < 1e-6, path
    first, last = (_slots_in(folder / "split" / f"step-{epoch}-6.keras") for epoch in (1, 3))
    assert gap(first[2:], last[2:]) > 1e-3
    written = {Path(path).name for path in noted.paths}
    assert written == ({path.name for path in split} if strategy.is_chief else set())


def saves_by_code_of_ones_own(strategy: Any, folder: Path) -> None:
    """On all processes, and on the chief alone."""
    from tfdist.strategies.data_parallel import strategy as data_parallel

    model = _model(strategy)
    names = ("all.keras", "all.weights.h5", "all.h5", f"of-rank-{strategy._peers.rank}.keras")

    def save(epoch: int, logs: object) -> None:
        for name in names:
            model.save_weights(folder / name) if "weights" in name else model.save(folder / name)

    _train(model, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=save)])
    expected = _slots(_train(_model(strategy, _whole)))
    for name in names:
        assert gap(expected, _slots_in(folder / name)) < 1e-6, name
    assert gap(model.get_weights(), keras.models.load_model(folder / "all.h5").get_weights()) == 0
    if strategy.is_chief:
        model.save(folder / "chief.keras")
        assert gap(expected, _slots_in(folder / "chief.keras")) < 1e-6
    strategy._chief_io.catch_up("go on")
    model.train_on_batch(*rows(16))
    if strategy.is_chief:
        keras.saving.save_model(model, folder / "without.h5", include_optimizer=False)
        model.export(folder / "export", verbose=False)
    strategy._chief_io.catch_up("go on")
    with mock.patch.object(data_parallel, "collect_slots", lambda model: None):
        kind, _ = error_of(model.save, folder / "nothing.keras")
        assert kind == ("RuntimeError" if strategy.is_chief else "no error")
    # The last one: whoever has waited for the others in vain does not go on with them.
    with mock.patch.object(strategy._peers, "timeout", 2.0):
        if strategy.is_chief:
            kind, text = error_of(model.save, folder / "alone.keras")
            # The other one may have come to its end by then.
            assert kind in ("PeerTimeoutError", "ProcessGoneError", "ProcessLeftError")
            assert "save the model, too (each process has a part of the slots" in text


def on_two_devices_each(rate: float) -> list[np.ndarray]:
    """Runs on every process."""
    model = built(
        tfdist.MultiWorkerMirroredStrategy(start_timeout=60),
        mlp(optimizer=lambda: keras.optimizers.LossScaleOptimizer(ShardedOptimizer(keras.optimizers.SGD(rate, 0.9)))),
    )
    return _train(model).get_weights()


def test_two_devices_each():
    def run(rate: float, workers: int) -> list:
        return run_local(on_two_devices_each, workers=workers, devices_per_worker=2, timeout=120, args=(rate,))

    (expected,), (other,) = run(0.1, 1), run(0.05, 1)
    for found in run(0.1, 2):
        assert gap(found, expected) < 1e-6
        assert gap(found, other) > 1e-4


SECTIONS = {
    function.__name__: function
    for function in (
        equals_the_optimizer_inside,
        sends_as_much_as_the_optimizer_inside,
        goes_on_from_files,
        saves_in_the_middle_of_a_fit,
        saves_by_code_of_ones_own,
    )
}


def everything(folder: str) -> dict[str, Any]:
    """Runs on every process; each section asserts what it is about."""
    strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout=60, peer_timeout=300)
    found = {}
    for name, section in SECTIONS.items():
        own = Path(folder, name)
        own.mkdir(exist_ok=True)
        found[name] = attempt(name, section, strategy, own)
    return found


@functools.cache
def results() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="tfdist-sharded-") as folder:
        return run_local(everything, workers=2, args=(folder,), timeout=DEADLINE)


@pytest.mark.timeout(DEADLINE + 30)
@pytest.mark.parametrize("name", SECTIONS)
def test_section(name):
    for rank in (0, 1):
        found_on(results(), rank, name)
