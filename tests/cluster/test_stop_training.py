"""`model.stop_training` set on all processes, or on one: nobody is left behind in a step that others do not take."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.cluster.attempt import attempt, found_on
from tests.features.table import mlp, rows
from tests.tiers import daily
from tfdist.testing import run_local

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]

# Steps of the model; a fit has 12 without an end, 4 an epoch.
STEPS = {
    "nobody": 12,
    "all": 6,
    "chief": 7,
    "other, end of an epoch": 8,
    "other, beginning of an epoch": 5,
    "all, one of them late": 7,
    "other, in a model's second fit": 15,
    "other, two steps an execution": 10,
}
# The part of `make test`.
DAILY = ("all", "chief", "other, end of an epoch")


class Stop(keras.callbacks.Callback):
    """Sets it in one place.

    Args:
        hook: the method.
        steps: after so many steps of training.
        before: what to do before that.
    """

    def __init__(self, hook: str, steps: int, before: Callable[[], object] = lambda: None):
        super().__init__()
        self._steps, self._before = steps, before
        setattr(self, hook, self._stop)

    def _stop(self, *args: Any, **kwargs: Any) -> None:
        if self.model.optimizer.iterations.numpy() == self._steps:
            self._before()
            self.model.stop_training = True


def build(strategy: Any, **options: Any) -> keras.Model:
    """The same model each time."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        return mlp(**options)()


def fit(model: keras.Model, *callbacks: keras.callbacks.Callback, batch_size: int = 12) -> dict[str, Any]:
    """Trains for three epochs, or less."""
    history = model.fit(*rows(48), batch_size=batch_size, epochs=3, shuffle=False, callbacks=callbacks, verbose=0)
    weights = np.concatenate([np.ravel(weight) for weight in model.get_weights()])
    return {"steps": int(model.optimizer.iterations.numpy()), "history": history.history, "weights": weights}


def stops(kind: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Runs cases, by the names of `STEPS`, on one of two processes."""
    import tfdist
    from tfdist.runtime import agreement

    strategy = getattr(tfdist, kind)(start_timeout=60, peer_timeout=300)
    peers = strategy._peers
    rank = peers.rank
    first = build(strategy)

    def by_clock() -> dict[str, Any]:
        def stop(batch: int, logs: Any) -> None:
            model.stop_training = model.optimizer.iterations.numpy() >= 8  # np.bool_

        model = build(strategy, steps_per_execution=2)
        return fit(model, *[keras.callbacks.LambdaCallback(on_train_batch_end=stop)][:rank], batch_size=8)

    def one_of_them_late() -> dict[str, Any]:
        """Rank 1 sets it when rank 0 has given up."""
        decide = peers.decide

        def noted(key: str, value: Any) -> Any:
            decided = decide(key, value)
            if rank == 0 and key.startswith("stop/"):
                peers.tell("has given up", True)
            return decided

        comes = [lambda: None, lambda: peers.hear("has given up", 0, "give up", within=60.0)][rank]
        with mock.patch.object(peers, "decide", noted):
            return fit(build(strategy), Stop("on_train_batch_end", 6, comes))

    def run(name: str) -> dict[str, Any]:
        # The other process comes in "all", on a busy machine late; elsewhere one that stops waits in vain.
        with mock.patch.object(agreement, "_PATIENCE_SECONDS", 60.0 if name == "all" else 1.0):
            return cases[name]()

    cases = {
        "nobody": lambda: fit(first),
        # Its step was traced before there was anything to agree on.
        "other, in a model's second fit": lambda: fit(first, *[Stop("on_train_batch_end", 14)][:rank]),
        "all": lambda: fit(build(strategy), Stop("on_train_batch_end", 6)),
        "chief": lambda: fit(build(strategy), *[Stop("on_train_batch_end", 6)][rank:]),
        "other, end of an epoch": lambda: fit(build(strategy), *[Stop("on_epoch_end", 8)][:rank]),
        "other, beginning of an epoch": lambda: fit(build(strategy), *[Stop("on_epoch_begin", 4)][:rank]),
        "all, one of them late": one_of_them_late,
        "other, two steps an execution": by_clock,
    }
    return {name: attempt(name, run, name) for name in cases if name in names}


@functools.cache
def results(names: tuple[str, ...], kind: str = "MultiWorkerMirroredStrategy") -> list[dict[str, Any]]:
    return run_local(stops, workers=2, args=(kind, names), timeout=180)


def assert_same_end(results: list[dict[str, Any]], name: str) -> None:
    """Both processes have left that fit after the right step, with the same weights."""
    one, other = (found_on(results, rank, name) for rank in (0, 1))
    assert (one["steps"], other["steps"]) == (STEPS[name], STEPS[name])
    np.testing.assert_array_equal(one["weights"], other["weights"])


@pytest.mark.parametrize("name", daily(STEPS, *DAILY))
def test_all_leave_after_the_same_step(name):
    rest = tuple(case for case in STEPS if case not in DAILY)
    assert_same_end(results(DAILY if name in DAILY else rest), name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", DAILY)
def test_over_horovod(name):
    pytest.importorskip("horovod.tensorflow")
    assert_same_end(results(DAILY, "HorovodStrategy"), name)


def test_all_that_stop_together_do_as_one_process_does():
    expected = fit(build(tf.distribute.get_strategy()), Stop("on_train_batch_end", 6))
    found = found_on(results(DAILY), 0, "all")
    np.testing.assert_allclose(found["weights"], expected["weights"], atol=1e-6)
    assert found["history"].keys() == expected["history"].keys()
    for metric, values in expected["history"].items():
        np.testing.assert_allclose(found["history"][metric], values, atol=1e-6)
    # One step more shows.
    assert np.abs(found_on(results(DAILY), 0, "chief")["weights"] - expected["weights"]).max() > 1e-4
