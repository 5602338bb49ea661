"""Callbacks that set `model.stop_training` on one or all of two processes, and where the fits end then."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import keras
import numpy as np

from tests.cluster.attempt import attempt, found_on
from tests.features.table import mlp, rows

# name: (ranks that stop, hook, after how many steps); an epoch has 4.
STOPS = {
    "all": ((0, 1), "on_train_batch_end", 6),
    "chief": ((0,), "on_train_batch_end", 6),
    "other": ((1,), "on_train_batch_end", 6),
    "other, last batch of an epoch": ((1,), "on_train_batch_end", 8),
    "other, end of an epoch": ((1,), "on_epoch_end", 8),
    "other, beginning of an epoch": ((1,), "on_epoch_begin", 4),
    "chief, beginning of the fit": ((0,), "on_train_begin", 0),
    "other, later than it trains": ((1,), "on_train_batch_end", 13),
}
# Steps of the model; a fit has 12 without an end.
STEPS = {
    "nobody": 12,
    "all": 6,
    "chief": 7,
    "other": 7,
    "other, last batch of an epoch": 8,
    "other, end of an epoch": 8,
    "other, beginning of an epoch": 5,
    "chief, beginning of the fit": 1,
    "other, later than it trains": 12,
    "all, one of them late": 7,
    "other, in a model's second fit": 15,
    "other, two steps an execution": 10,
    "nobody, again": 12,
}
# The part of `make test`.
DAILY = ("all", "chief", "other, end of an epoch", "other, two steps an execution")
# Long enough for a busy machine: those that stop together are there within it.
PATIENCE = 3.0


class Stop(keras.callbacks.Callback):
    """Sets it in one place.

    Args:
        hook: the method.
        steps: after so many steps of training.
        delay: how long to wait before that, in seconds.
    """

    def __init__(self, hook: str, steps: int, delay: float = 0.0):
        super().__init__()
        self._steps, self._delay = steps, delay
        setattr(self, hook, self._stop)

    def _stop(self, *args: Any, **kwargs: Any) -> None:
        if self.model.optimizer.iterations.numpy() == self._steps:
            time.sleep(self._delay)
            self.model.stop_training = True


def build(strategy: Any, **options: Any) -> keras.Model:
    """The same model each time."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        return mlp(**options)()


def fit(model: keras.Model, callbacks: list[keras.callbacks.Callback], batch_size: int = 12) -> dict[str, Any]:
    """Trains for three epochs, or less; of four steps each."""
    history = model.fit(*rows(48), batch_size=batch_size, epochs=3, shuffle=False, callbacks=callbacks, verbose=0)
    return {
        "steps": int(model.optimizer.iterations.numpy()),
        "history": history.history,
        "weights": np.concatenate([np.ravel(weight) for weight in model.get_weights()]),
    }


def stops(kind: str, names: Collection[str]) -> dict[str, Any]:
    """Runs cases, by the names of `STEPS`, on one of two processes."""
    import tfdist
    from tfdist.runtime import common_stop

    common_stop._PATIENCE_SECONDS = PATIENCE
    strategy = getattr(tfdist, kind)(start_timeout=60, peer_timeout=60)
    rank = strategy._peers.rank
    found = {}

    def note(name: str, model: keras.Model, callbacks: list[keras.callbacks.Callback], **options: Any) -> None:
        if name in names:
            found[name] = attempt(name, fit, model, callbacks, **options)

    first = build(strategy)
    note("nobody", first, [])
    for name, (ranks, *place) in STOPS.items():
        note(name, build(strategy), [Stop(*place)] if rank in ranks else [])
    late = Stop("on_train_batch_end", 6, delay=2 * PATIENCE * rank)
    note("all, one of them late", build(strategy), [late])
    # Its step was traced before there was anything to agree on.
    note("other, in a model's second fit", first, [Stop("on_train_batch_end", 14)][:rank])

    def by_clock(batch: int, logs: Any) -> None:
        executions.stop_training = executions.optimizer.iterations.numpy() >= 8  # np.bool_

    executions = build(strategy, steps_per_execution=2)
    clock = keras.callbacks.LambdaCallback(on_train_batch_end=by_clock)
    note("other, two steps an execution", executions, [clock][:rank], batch_size=8)
    note("nobody, again", build(strategy), [])
    return found


def assert_same_end(results: list[dict[str, Any]], name: str) -> None:
    """Both processes have left that fit after the right step, with the same weights."""
    one, other = (found_on(results, rank, name) for rank in (0, 1))
    assert (one["steps"], other["steps"]) == (STEPS[name], STEPS[name])
    np.testing.assert_array_equal(one["weights"], other["weights"])
